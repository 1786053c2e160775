"""What a client may ask for beside the answer (`x-modeswitch-include`), put in by the engine.

The engine adds it, so that the controller passes frames on without reading them.
"""

from __future__ import annotations

import json
import time
from typing import Any

from app.wire import Call, Endpoint


def extra_object(call: Call, engine: str, begun_s: float, first_s: float | None = None) -> dict[str, Any]:
    """The `modeswitch` object. Times are milliseconds in this engine's process, from the call's arrival there."""
    extra: dict[str, Any] = {"request_id": call.request_id}
    if "mode" in call.include:
        extra |= {"mode": call.mode, "engine": engine}
    if "timing" in call.include:
        extra["timing"] = {
            "first_frame_ms": None if first_s is None else round((first_s - begun_s) * 1e3, 3),
            "total_ms": round((time.monotonic() - begun_s) * 1e3, 3),
        }
    return extra


def extra_chunk(call: Call, engine: str, begun_s: float, first_s: float | None) -> str:
    """A chunk without choices, as OpenAI sends usage, that carries the `modeswitch` object."""
    chat = call.endpoint is Endpoint.CHAT
    chunk: dict[str, Any] = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{call.request_id}",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": int(time.time()),
        "model": call.body.get("model"),
        "choices": [],
        "modeswitch": extra_object(call, engine, begun_s, first_s),
    }
    return f"data: {json.dumps(chunk)}\n\n"
