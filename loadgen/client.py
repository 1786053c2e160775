"""An OpenAI client made for measuring: every frame is timed, every way to fail has a name, nothing is retried."""

import asyncio
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp
from aiohttp.abc import AbstractStreamWriter

from loadgen.records import Outcome, RequestRecord
from loadgen.sse import DONE, SseParser

CHAT_PATH = "/v1/chat/completions"
COMPLETION_PATH = "/v1/completions"
RESET_PATH = "/admin/reset_prefix_cache"
INCLUDE_HEADER = "x-modeswitch-include"
_ADDRESS = re.compile(r"https?://[^/\s]")

# First match wins: aiohttp's classes overlap (a refused connection is also a ClientOSError and an OSError).
_OUTCOME_OF: tuple[tuple[type[BaseException], Outcome], ...] = (
    (aiohttp.ClientConnectorError, Outcome.REFUSED),
    (aiohttp.ConnectionTimeoutError, Outcome.REFUSED),
    (aiohttp.SocketTimeoutError, Outcome.STALLED),
    (TimeoutError, Outcome.TIMED_OUT),
    (aiohttp.ClientPayloadError, Outcome.EARLY_CLOSE),
    (aiohttp.ServerDisconnectedError, Outcome.DROPPED),
    (ConnectionError, Outcome.DROPPED),
    (aiohttp.ClientOSError, Outcome.DROPPED),
    (aiohttp.ClientResponseError, Outcome.NOT_JSON),  # bytes that are no HTTP at all
    (aiohttp.ClientError, Outcome.FAILED),
)


@dataclass(frozen=True, slots=True)
class Call:
    """A request ready to go. Encoded beforehand, so that sending costs as little as possible when it is due."""

    payload: bytes
    stream: bool
    path: str = CHAT_PATH
    headers: Mapping[str, str] = field(default_factory=dict)
    cancel_after_frames: int | None = None

    @classmethod
    def of(cls, body: Mapping[str, Any], *, path: str = CHAT_PATH, cancel_after_frames: int | None = None) -> "Call":
        """Encodes `body`; a streamed one also asks for usage, which is where token counts come from."""
        stream = bool(body.get("stream"))
        sent = dict(body, stream_options={"include_usage": True}) if stream else dict(body)
        return cls(json.dumps(sent).encode(), stream, path, {"content-type": "application/json"}, cancel_after_frames)


class _Body(aiohttp.BytesPayload):
    """A request's body, which knows when it went to the socket: the headers go with it, in one piece.

    aiohttp's own signal for sent headers comes earlier, when they are put together, and costs each request more.
    """

    sent_at: float | None = None

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        self.sent_at = time.perf_counter()
        await super().write_with_length(writer, content_length)


class ServerFault(Exception):
    """The server answered, but not as the API says. Carries the outcome and, where given, its status and its code."""

    def __init__(self, outcome: Outcome, message: str, code: str | None = None, status: int | None = None) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.code = code
        self.status = status


class OpenAIClient:
    """One server. Use as an async context manager; any number of calls may be under way at once.

    base_url: with or without the `/v1` that other clients want; entering raises ServerFault for what is no address.
    stall_s: longest silence of the server. total_s: longest request.

    >>> async with OpenAIClient("http://127.0.0.1:8000") as client:
    ...     record = await client.send(Call.of({"model": "auto", "messages": messages, "stream": True}))
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        stall_s: float = 120.0,
        total_s: float = 1800.0,
        include: str | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        # Uncompressed, for what compresses a stream holds its frames back. An answer that comes compressed all the same
        # is read.
        self._headers = {"accept-encoding": "identity"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        if include:
            self._headers[INCLUDE_HEADER] = include
        self._timeout = aiohttp.ClientTimeout(total=total_s, sock_connect=min(stall_s, 10.0), sock_read=stall_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        if not _ADDRESS.match(self.base_url):
            words = f"{self.base_url!r} is no address of a server: it begins as http://127.0.0.1:8000 does"
            raise ServerFault(Outcome.REFUSED, words)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            headers=self._headers,
            timeout=self._timeout,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("the client is used outside of its `async with`")
        return self._session

    async def send(
        self, call: Call, record: RequestRecord | None = None, *, due: float | None = None, origin: float = 0.0
    ) -> RequestRecord:
        """Sends `call` and returns the record, whatever happens: only cancelling the task raises.

        due, origin: time.perf_counter() values of the schedule and of the start of the run.
        """
        record = record if record is not None else RequestRecord()
        body = _Body(call.payload)
        start = time.perf_counter()
        record.sent_s = start - origin
        try:
            async with self.session.post(self.base_url + call.path, data=body, headers=call.headers) as response:
                _read_headers(record, response)
                if not 200 <= response.status < 300:
                    raise _http_error(response.status, await response.read())
                await (_read_stream if call.stream else _read_body)(response, record, start, call)
        except ServerFault as fault:
            record.outcome, record.error, record.error_code = fault.outcome, str(fault), fault.code
        except asyncio.CancelledError:
            record.outcome = Outcome.INTERRUPTED
            raise
        except (aiohttp.ClientError, OSError, ValueError) as error:
            record.outcome = classify(error)
            record.error = f"{type(error).__name__}: {error}".rstrip(": ")
        finally:
            record.total_ms = _since_ms(start)
            if due is not None:
                record.late_ms = ((body.sent_at or start) - due) * 1000
        return record

    async def get_json(self, path: str, *, timeout_s: float = 10.0) -> dict[str, Any]:
        """GET of a JSON object. Raises ServerFault with the outcome and a message that names the address."""
        return await self._exchange("GET", path, timeout_s)

    async def reset_prefix_cache(self) -> bool:
        """Empties the server's prefix caches.

        False where it has no such call (any server but this project's), or tells of an engine that kept its cache.
        """
        try:
            answer = await self._exchange("POST", RESET_PATH, 60.0)
        except ServerFault as fault:
            if fault.outcome is Outcome.HTTP_ERROR:
                return False
            raise
        told = answer.get("reset")
        return all(told.values()) if isinstance(told, dict) else told is not False

    async def _exchange(self, method: str, path: str, timeout_s: float) -> dict[str, Any]:
        url = self.base_url + path
        try:
            async with self.session.request(method, url, timeout=aiohttp.ClientTimeout(total=timeout_s)) as response:
                body = await response.read()
                if not 200 <= response.status < 300:
                    raise _http_error(response.status, body, url)
                return json_object(body, url) if body.strip() else {}
        except (aiohttp.ClientError, OSError) as error:
            raise ServerFault(classify(error), f"{url}: {type(error).__name__}: {error}".rstrip(": ")) from error


def classify(error: BaseException) -> Outcome:
    """The outcome that an exception of the transport stands for."""
    return next((outcome for kind, outcome in _OUTCOME_OF if isinstance(error, kind)), Outcome.FAILED)


def _since_ms(start: float) -> float:
    return (time.perf_counter() - start) * 1000


def _read_headers(record: RequestRecord, response: aiohttp.ClientResponse) -> None:
    record.status = response.status
    record.mode = response.headers.get("x-modeswitch-mode")
    record.engine = response.headers.get("x-modeswitch-engine")
    record.request_id = response.headers.get("x-request-id")


def json_object(payload: bytes, where: str) -> dict[str, Any]:
    """A server's JSON object. Raises ServerFault for anything else."""
    try:
        value = json.loads(payload)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ServerFault(Outcome.NOT_JSON, f"{where}: not a JSON object: {payload[:80]!r}")
    return value


def _http_error(status: int, body: bytes, where: str = "") -> ServerFault:
    try:
        error = json.loads(body)["error"]
        message, code = str(error["message"]), error.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, code = body[:200].decode(errors="replace"), None
    return ServerFault(
        Outcome.HTTP_ERROR,
        f"{where + ': ' if where else ''}HTTP {status}: {message}",
        None if code is None else str(code),
        status,
    )


def _take_usage(record: RequestRecord, answer: Mapping[str, Any]) -> None:
    usage = answer.get("usage")
    if isinstance(usage, dict):
        record.prompt_tokens = _count(usage.get("prompt_tokens"))
        record.output_tokens = _count(usage.get("completion_tokens"))
        details = usage.get("prompt_tokens_details")
        record.cached_tokens = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
    extras = answer.get("modeswitch")
    if isinstance(extras, dict):
        record.extras = extras


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _choices(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Empty where there are none: a frame may carry usage alone. Raises ServerFault for what is no list of objects."""
    choices = answer.get("choices")
    if choices is None:
        return []
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise ServerFault(Outcome.MALFORMED, f"choices are no list of objects: {str(choices)[:80]}")
    return choices


def _output_of(choice: Mapping[str, Any], part: str) -> tuple[str, bool]:
    """Text of a choice and whether it carries output at all (a tool call has no text). Raises ServerFault."""
    piece = choice.get(part)
    if not isinstance(piece, dict):
        text = _text(choice.get("text"))
        return text, bool(text)
    text = _text(piece.get("content"))
    return text, bool(text or piece.get("reasoning_content") or piece.get("reasoning") or piece.get("tool_calls"))


def _text(value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise ServerFault(Outcome.MALFORMED, f"an answer's text is no string: {str(value)[:80]}")
    return value or ""


async def _read_body(response: aiohttp.ClientResponse, record: RequestRecord, start: float, call: Call) -> None:
    answer = json_object(await response.read(), "answer")
    if "error" in answer:
        raise _http_error(response.status, json.dumps(answer).encode())
    _take_usage(record, answer)
    choices = _choices(answer)
    if not choices:
        raise ServerFault(Outcome.MALFORMED, f"an answer without choices: {str(answer)[:80]}")
    for choice in choices:
        record.text += _output_of(choice, "message")[0]
        record.finish_reason = choice.get("finish_reason")


async def _read_stream(response: aiohttp.ClientResponse, record: RequestRecord, start: float, call: Call) -> None:
    parser = SseParser()
    texts: list[str] = []
    async for received in response.content.iter_any():
        at_ms = _since_ms(start)
        for payload in parser.feed(received):
            if payload == DONE:
                if not texts:
                    raise ServerFault(Outcome.MALFORMED, "no frame of the stream had a choice")
                record.text = "".join(texts)
                return
            _take_frame(record, payload, at_ms, texts)
        if call.cancel_after_frames is not None and len(record.frame_ms) >= call.cancel_after_frames:
            response.close()
            raise ServerFault(Outcome.CANCELLED, f"given up after {len(record.frame_ms)} frames, as planned")
    if not record.frame_ms and parser.pending:
        raise ServerFault(Outcome.NOT_JSON, "the answer to a streamed request is no event stream")
    raise ServerFault(Outcome.EARLY_CLOSE, f"the stream ended after {len(record.frame_ms)} frames without [DONE]")


def _take_frame(record: RequestRecord, payload: bytes, at_ms: float, texts: list[str]) -> None:
    frame = json_object(payload, "frame")
    if "error" in frame:
        error = frame["error"]
        message = error.get("message") if isinstance(error, dict) else error
        code = error.get("code") if isinstance(error, dict) else None
        raise ServerFault(Outcome.ERROR_FRAME, str(message), None if code is None else str(code))
    _take_usage(record, frame)
    carried = False
    for choice in _choices(frame):
        text, has_output = _output_of(choice, "delta")
        carried = carried or has_output
        texts.append(text)
        record.finish_reason = choice.get("finish_reason") or record.finish_reason
    if carried:
        record.frame_ms.append(at_ms)
        if record.ttft_ms is None:
            record.ttft_ms = at_ms
