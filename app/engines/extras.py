"""What a client may ask for beside the answer (`x-modeswitch-include`), put in by the engine.

The engine adds it, so that the controller passes frames on without reading them.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Any

from app.wire import Call, Endpoint, Usage


def extra_object(
    call: Call, engine: str, begun_s: float, usage: Usage | None, energy: dict[str, Any] | None
) -> dict[str, Any]:
    """The `modeswitch` object. Times are milliseconds in this engine's process, from the call's arrival there."""
    extra: dict[str, Any] = {"request_id": call.key}
    if "mode" in call.include:
        extra |= {"mode": call.mode, "engine": engine}
    if "timing" in call.include:
        extra["timing"] = {
            "queued_ms": usage and usage.queued_ms,
            "first_token_ms": usage and usage.first_token_ms,
            "total_ms": round((time.monotonic() - begun_s) * 1e3, 3),
        }
    if "usage" in call.include:
        extra["usage"] = usage and asdict(usage)
    if "decision" in call.include:
        extra["decision"] = call.decision
    if "energy" in call.include:
        extra["energy"] = energy
    return extra


def extra_chunk(call: Call, extra: dict[str, Any]) -> str:
    """A chunk without choices, as OpenAI sends usage, that carries the `modeswitch` object."""
    chat = call.endpoint is Endpoint.CHAT
    chunk: dict[str, Any] = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{call.request_id}",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": int(time.time()),
        "model": call.body.get("model"),
        "choices": [],
        "modeswitch": extra,
    }
    return f"data: {json.dumps(chunk)}\n\n"
