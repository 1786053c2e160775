"""Reading a request: the few fields that routing needs are checked, the rest passes on untouched.

The engine's vLLM classes validate the full OpenAI body.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from starlette.requests import Request

from app.controller.errors import ApiError, invalid
from app.wire import INCLUDABLE, Endpoint

_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_MAX_DEPTH = 100
"""Lists and objects within one another. JSON schemas of tools need a few dozen; Python reads no more than hundreds."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """A parsed request. `model` is trimmed, or None when the client named none."""

    request_id: str
    named: bool
    """The client named its request, so that the name may come again."""
    endpoint: Endpoint
    model: str | None
    stream: bool
    body: dict[str, Any]
    include: frozenset[str]
    headers: Mapping[str, str]


async def read_request(request: Request, endpoint: Endpoint, max_body_bytes: int) -> Incoming:
    """Parse and check a request.

    Raises:
        ApiError: 400 for what is not JSON, is nested too deeply or has wrong types, 413 above `max_body_bytes`.
    """
    try:
        body = _parse(await _read(request, max_body_bytes))
    except (ValueError, RecursionError):
        raise invalid("the body is not valid JSON", code="invalid_json") from None
    if not isinstance(body, dict):
        raise invalid("the body must be a JSON object")
    _check_depth(body)
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise invalid("model must be a string", "model")
    if not isinstance(stream := body.get("stream") or False, bool):
        raise invalid("stream must be true or false", "stream")
    _check_prompt(body, endpoint)
    # Serve gives one to a request without, reads it as UTF-8, and echoes it whatever it is.
    given = request.headers.get("x-request-id", "").encode("latin-1").decode(errors="replace")
    return Incoming(
        request_id=request_id_of(given) if given else uuid.uuid4().hex,
        named=bool(given),
        endpoint=endpoint,
        model=model and model.strip(),
        stream=stream,
        body=body,
        include=_include(request),
        headers=request.headers,
    )


def request_id_of(name: str) -> str:
    """What a client calls its request, fit for a log line and the ledger: that itself, or a digest of it."""
    return name if _REQUEST_ID.fullmatch(name) else hashlib.blake2b(name.encode(), digest_size=16).hexdigest()


def _parse(raw: bytes) -> Any:
    """JSON as its standard has it, in UTF-8; Python's parser also takes `NaN` and halves of surrogate pairs.

    Raises:
        ValueError: it is not.
    """
    body = json.loads(raw.decode("utf-8-sig"), parse_constant=_refuse_constant)
    if b"\\ud" in raw.lower():
        # An escaped half has no encoding, and neither the tokenizer nor an answer that quotes it could go on.
        json.dumps(body, ensure_ascii=False).encode()
    return body


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _check_depth(body: dict[str, Any]) -> None:
    """Refuse what others, here and in the engine, would read by recursion until they fail."""
    level: list[Any] = [body]
    for _ in range(_MAX_DEPTH):
        level = [
            item
            for value in level
            for item in (value.values() if isinstance(value, dict) else value)
            if isinstance(item, dict | list)
        ]
        if not level:
            return
    raise invalid(f"the body is nested more than {_MAX_DEPTH} levels deep", code="nested_too_deeply")


def _check_prompt(body: dict[str, Any], endpoint: Endpoint) -> None:
    if endpoint is Endpoint.COMPLETION:
        if body.get("prompt") is None and body.get("prompt_embeds") is None:
            raise invalid("prompt is required", "prompt")
        return
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("messages must be a list with at least one message", "messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise invalid("each message must be an object with a role", f"messages.{index}")


async def _read(request: Request, max_body_bytes: int) -> bytes:
    """The body, read no further than its limit."""
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > max_body_bytes:
        raise _too_large(max_body_bytes)
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > max_body_bytes:
            raise _too_large(max_body_bytes)
        parts.append(part)
    return b"".join(parts)


def _too_large(max_body_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_body_bytes} bytes", code="request_too_large")


def _include(request: Request) -> frozenset[str]:
    """`x-modeswitch-include: mode, timing`."""
    header = request.headers.get("x-modeswitch-include", "")
    asked = frozenset(part.strip() for part in header.split(",") if part.strip())
    if unknown := asked - INCLUDABLE:
        known = ", ".join(sorted(INCLUDABLE))
        raise invalid(f"x-modeswitch-include: {', '.join(sorted(unknown))} unknown; there are {known}")
    return asked
