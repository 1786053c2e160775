"""OpenAI's error envelope, `{"error": {"message", "type", "param", "code"}}`, for the controller and the engines."""

from __future__ import annotations

import json
from typing import Any

ENGINE_LOST = "engine_lost"
"""Code of a request whose engine went away; another engine may serve it, and the mode is suspect."""
ENGINE_ERROR = "engine_error"
"""Code of a request that failed in an engine which goes on serving others."""

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def envelope(status: int, message: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """The envelope as an object; its type follows from the HTTP status."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_frames(message: str, code: str) -> str:
    """What ends a stream that broke after its first token: an error event, then `[DONE]`."""
    return f"data: {json.dumps(envelope(500, message, code))}\n\ndata: [DONE]\n\n"
