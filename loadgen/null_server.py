"""A server that answers OpenAI requests without a model: it shows what the client can do, and how faults are taken.

The `model` of a request picks a fault by its name (`"model": "drop"`); every other name is answered properly.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import typer
import uvloop
from aiohttp import web

from loadgen.options import finite

_TOKENS_PER_S = web.AppKey("tokens_per_s", float)
_STALL_S = web.AppKey("stall_s", float)
_HELD = web.AppKey("held", dict)

Body = dict[str, Any]


def make_app(tokens_per_s: float = 0.0, stall_s: float = 3600.0) -> web.Application:
    """The application. tokens_per_s: pace of a stream, 0 for at once. stall_s: how long the fault `stall` is silent."""
    app = web.Application(client_max_size=64 * 2**20)
    app[_TOKENS_PER_S], app[_STALL_S], app[_HELD] = tokens_per_s, stall_s, {"resets": 0}
    app.router.add_post("/v1/chat/completions", _answer)
    app.router.add_post("/v1/completions", _answer)
    app.router.add_get("/v1/models", _models)
    app.router.add_post("/admin/reset_prefix_cache", _reset)
    return app


async def _models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "null", "object": "model"}]})


async def _reset(request: web.Request) -> web.Response:
    request.app[_HELD]["resets"] += 1
    return web.json_response(request.app[_HELD])


async def _answer(request: web.Request) -> web.StreamResponse:
    body: Body = await request.json()
    fault = FAULTS.get(str(body.get("model")))
    if fault is not None:
        return await fault(request, body)
    return await (_stream(request, body) if body.get("stream") else _whole(request, body))


def _usage(body: Body) -> dict[str, int]:
    text = body.get("prompt") or " ".join(str(message["content"]) for message in body.get("messages", ()))
    return {"prompt_tokens": len(text.split()), "completion_tokens": _output_tokens(body)}


def _output_tokens(body: Body) -> int:
    return int(body.get("max_completion_tokens") or body.get("max_tokens") or 16)


async def _whole(request: web.Request, body: Body) -> web.Response:
    message = {"role": "assistant", "content": " word" * _output_tokens(body)}
    answer = {"choices": [{"index": 0, "message": message, "finish_reason": "length"}], "usage": _usage(body)}
    return web.Response(
        body=json.dumps(answer).encode(), content_type="application/json", headers={"x-modeswitch-mode": "null"}
    )


def _frame(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


async def _begin(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream", "x-modeswitch-mode": "null"})
    await response.prepare(request)
    return response


async def _send_tokens(request: web.Request, response: web.StreamResponse, count: int) -> None:
    rate = request.app[_TOKENS_PER_S]
    frame = _frame(" word")
    begin = time.perf_counter()
    for index in range(count):
        if rate:
            await asyncio.sleep(max(0.0, begin + (index + 1) / rate - time.perf_counter()))
        await response.write(frame)


async def _stream(request: web.Request, body: Body) -> web.StreamResponse:
    response = await _begin(request)
    await _send_tokens(request, response, _output_tokens(body))
    await response.write(_frame("", "length"))
    await response.write(b"data: " + json.dumps({"choices": [], "usage": _usage(body)}).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


async def _drop(request: web.Request, body: Body) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def _stall(request: web.Request, body: Body) -> web.StreamResponse:
    await asyncio.sleep(request.app[_STALL_S])
    return web.Response()


async def _stall_midway(request: web.Request, body: Body) -> web.StreamResponse:
    response = await _begin(request)
    await _send_tokens(request, response, 2)
    await asyncio.sleep(request.app[_STALL_S])
    return response


async def _not_json(request: web.Request, body: Body) -> web.StreamResponse:
    return web.Response(text="<html>It works!</html>")


async def _not_json_frame(request: web.Request, body: Body) -> web.StreamResponse:
    response = await _begin(request)
    await response.write(_frame(" word") + b"data: {oops\n\n")
    return response


async def _error_frame(request: web.Request, body: Body) -> web.StreamResponse:
    response = await _begin(request)
    await _send_tokens(request, response, 2)
    await response.write(b'data: {"error": {"message": "the engine died", "code": "engine_dead"}}\n\ndata: [DONE]\n\n')
    return response


async def _early_close(request: web.Request, body: Body) -> web.StreamResponse:
    response = await _begin(request)
    await _send_tokens(request, response, 2)
    assert request.transport is not None
    request.transport.close()
    return response


async def _no_done(request: web.Request, body: Body) -> web.StreamResponse:
    response = await _begin(request)
    await _send_tokens(request, response, 2)
    return response


async def _overloaded(request: web.Request, body: Body) -> web.StreamResponse:
    error = {"message": "overloaded", "type": "server_error", "param": None, "code": "overloaded"}
    return web.json_response({"error": error}, status=503, headers={"retry-after": "2"})


async def _bare_detail(request: web.Request, body: Body) -> web.StreamResponse:
    return web.json_response({"detail": "Internal Server Error"}, status=500)


async def _no_http(request: web.Request, body: Body) -> web.StreamResponse:
    assert isinstance(request.transport, asyncio.Transport)
    request.transport.write(b"220 mail.example ESMTP\r\n\r\n")
    request.transport.close()
    return web.Response()


async def _no_choices(request: web.Request, body: Body) -> web.StreamResponse:
    if not body.get("stream"):
        return web.json_response({"detail": "It works!"})
    response = await _begin(request)
    await response.write(b"data: {}\n\ndata: {}\n\ndata: [DONE]\n\n")
    return response


async def _empty_stream(request: web.Request, body: Body) -> web.StreamResponse:
    response = await _begin(request)
    await response.write(b"data: [DONE]\n\n")
    return response


def _answers(choices: Any) -> Callable[[web.Request, Body], Awaitable[web.StreamResponse]]:
    """An answer, or a stream of one frame, with these `choices` for once."""

    async def answer(request: web.Request, body: Body) -> web.StreamResponse:
        content = json.dumps(
            {"choices": choices, "usage": {"prompt_tokens": "many", "completion_tokens": None}}
        ).encode()
        if not body.get("stream"):
            return web.Response(body=content, content_type="application/json")
        response = await _begin(request)
        await response.write(b"data: " + content + b"\n\ndata: [DONE]\n\n")
        return response

    return answer


FAULTS: dict[str, Callable[[web.Request, Body], Awaitable[web.StreamResponse]]] = {
    "drop": _drop,
    "stall": _stall,
    "stall_midway": _stall_midway,
    "not_json": _not_json,
    "not_json_frame": _not_json_frame,
    "error_frame": _error_frame,
    "early_close": _early_close,
    "no_done": _no_done,
    "overloaded": _overloaded,
    "bare_detail": _bare_detail,
    "no_http": _no_http,
    "no_choices": _no_choices,
    "empty_stream": _empty_stream,
    "empty_choices": _answers([]),
    "null_choice": _answers([None]),
    "dict_choices": _answers({"0": {"delta": {"content": "word"}}}),
    "list_content": _answers([{"delta": {"content": ["word"]}, "message": {"content": ["word"]}}]),
    "number_text": _answers([{"text": 3}]),
}


def register(app: typer.Typer) -> None:
    """Adds `null-server`."""

    @app.command("null-server")
    def null_server(
        port: Annotated[int, typer.Option(help="Port to listen on.")] = 8999,
        host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
        tokens_per_s: Annotated[
            float, typer.Option(callback=finite, help="Pace of each stream; 0 sends all at once.")
        ] = 0.0,
    ) -> None:
        """Serve OpenAI requests without a model, to see what the client alone can do. Faults by model name."""
        loop = uvloop.new_event_loop()
        web.run_app(make_app(tokens_per_s), host=host, port=port, access_log=None, loop=loop)
