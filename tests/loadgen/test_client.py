import asyncio
import json
import socket
import time

import pytest
from aiohttp import web

from loadgen.client import Call, OpenAIClient, ServerFault
from loadgen.null_server import FAULTS
from loadgen.records import ERRORS, Outcome, RequestRecord
from tests.loadgen.conftest import serve

MESSAGES = [{"role": "user", "content": "one two three"}]


def call(model: str = "null", *, stream: bool, cancel_after_frames: int | None = None, tokens: int = 5) -> Call:
    body = {"model": model, "messages": MESSAGES, "stream": stream, "max_tokens": tokens}
    return Call.of(body, cancel_after_frames=cancel_after_frames)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_proper_answer(null_url: str, stream: bool) -> None:
    async with OpenAIClient(null_url) as client:
        record = await client.send(call(stream=stream))
    assert record.outcome is Outcome.OK
    assert (record.prompt_tokens, record.output_tokens, record.finish_reason) == (3, 5, "length")
    assert record.mode == "null"
    assert record.text == " word" * 5
    assert len(record.frame_ms) == (5 if stream else 0)
    assert (record.ttft_ms == record.frame_ms[0]) if stream else record.ttft_ms is None


@pytest.mark.parametrize(
    ("fault", "stream", "outcome"),
    [
        ("drop", True, Outcome.DROPPED),
        ("drop", False, Outcome.DROPPED),
        ("stall", True, Outcome.STALLED),
        ("stall_midway", True, Outcome.STALLED),
        ("not_json", True, Outcome.NOT_JSON),
        ("not_json", False, Outcome.NOT_JSON),
        ("not_json_frame", True, Outcome.NOT_JSON),
        ("no_http", True, Outcome.NOT_JSON),
        ("error_frame", True, Outcome.ERROR_FRAME),
        ("early_close", True, Outcome.EARLY_CLOSE),
        ("no_done", True, Outcome.EARLY_CLOSE),
        ("overloaded", True, Outcome.HTTP_ERROR),
        ("bare_detail", False, Outcome.HTTP_ERROR),
        ("no_choices", True, Outcome.MALFORMED),
        ("no_choices", False, Outcome.MALFORMED),
        ("empty_stream", True, Outcome.MALFORMED),
        ("empty_choices", True, Outcome.MALFORMED),
        ("empty_choices", False, Outcome.MALFORMED),
        ("null_choice", True, Outcome.MALFORMED),
        ("null_choice", False, Outcome.MALFORMED),
        ("dict_choices", True, Outcome.MALFORMED),
        ("dict_choices", False, Outcome.MALFORMED),
        ("list_content", True, Outcome.MALFORMED),
        ("list_content", False, Outcome.MALFORMED),
        ("number_text", True, Outcome.MALFORMED),
        ("number_text", False, Outcome.MALFORMED),
    ],
)
async def test_every_fault_has_its_name_and_words(null_url: str, fault: str, stream: bool, outcome: Outcome) -> None:
    async with OpenAIClient(null_url, stall_s=0.3) as client:
        record = await client.send(call(fault, stream=stream))
    assert record.outcome is outcome
    assert outcome in ERRORS
    assert record.error


def test_no_fault_is_left_untried() -> None:
    tried = next(mark for mark in test_every_fault_has_its_name_and_words.pytestmark)  # type: ignore[attr-defined]
    assert {case[0] for case in tried.args[1]} == set(FAULTS)


async def test_a_slow_stream_ends_at_the_total_limit() -> None:
    async def drip(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b": still here\n\n")
            await asyncio.sleep(0.02)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", drip)
    server = await serve(app)
    async with OpenAIClient(str(server.make_url("")), total_s=0.2) as client:
        record = await client.send(call(stream=True))
    assert record.outcome is Outcome.TIMED_OUT
    await server.close()


async def test_frames_before_a_fault_are_kept(null_url: str) -> None:
    async with OpenAIClient(null_url) as client:
        record = await client.send(call("error_frame", stream=True))
    assert (record.error, record.error_code, len(record.frame_ms)) == ("the engine died", "engine_dead", 2)


async def test_the_envelope_of_an_http_error_is_read(null_url: str) -> None:
    async with OpenAIClient(null_url) as client:
        record = await client.send(call("overloaded", stream=False))
    assert (record.status, record.error_code) == (503, "overloaded")
    assert record.error == "HTTP 503: overloaded"


async def test_nobody_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    async with OpenAIClient(f"http://127.0.0.1:{port}") as client:
        record = await client.send(call(stream=True))
        assert record.outcome is Outcome.REFUSED
        with pytest.raises(ServerFault, match=str(port)):
            await client.get_json("/v1/models")


@pytest.mark.parametrize("address", ["", "localhost:8000", "http://", "ftp://a", "http:///v1"])
async def test_what_is_no_address_is_said_so(address: str) -> None:
    with pytest.raises(ServerFault, match="is no address of a server"):
        async with OpenAIClient(address):
            pass


async def test_the_address_that_other_clients_want_will_do(null_url: str) -> None:
    async with OpenAIClient(f"{null_url}/v1/") as client:
        assert (await client.get_json("/v1/models"))["data"][0]["id"] == "null"
        with pytest.raises(ServerFault) as caught:
            await client.get_json("/v1/modes")
    assert caught.value.status == 404


async def test_a_request_is_late_until_it_goes_to_the_socket(null_url: str) -> None:
    """Putting the headers together comes first, and whatever the loop has to do before it writes them counts."""
    async with OpenAIClient(null_url) as client:
        await client.send(call(stream=False))  # so that there is a connection
        due = time.perf_counter()
        sending = asyncio.ensure_future(client.send(call(stream=False), due=due))
        asyncio.get_running_loop().call_soon(time.sleep, 0.05)
        record = await sending
    assert record.outcome is Outcome.OK
    assert record.late_ms is not None
    assert 50.0 <= record.late_ms < record.total_ms


async def test_cancelling_is_no_error(null_url: str) -> None:
    async with OpenAIClient(null_url) as client:
        record = await client.send(call("stall_midway", stream=True, cancel_after_frames=2))
    assert record.outcome is Outcome.CANCELLED
    assert record.outcome not in ERRORS
    assert len(record.frame_ms) >= 2


async def test_a_cancelled_task_leaves_its_record_marked(null_url: str) -> None:
    record = RequestRecord()
    async with OpenAIClient(null_url) as client:
        task = asyncio.create_task(client.send(call("stall_midway", stream=True), record))
        while not record.frame_ms:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert record.outcome is Outcome.INTERRUPTED


async def test_reset_where_there_is_one(null_url: str) -> None:
    async with OpenAIClient(null_url) as client:
        assert await client.reset_prefix_cache() is True
    bare = await serve(web.Application())
    async with OpenAIClient(str(bare.make_url(""))) as client:
        assert await client.reset_prefix_cache() is False
    await bare.close()


@pytest.mark.parametrize(
    ("told", "reset"),
    [
        ({"reset": {"fp16": True, "int8": True}}, True),
        ({"reset": {"fp16": True, "int8": False}}, False),
        ({"reset": False}, False),
        ({"reset": {}}, True),
        ({}, True),
    ],
)
async def test_an_engine_that_kept_its_cache_is_no_reset(told: dict[str, object], reset: bool) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response(told)

    app = web.Application()
    app.router.add_post("/admin/reset_prefix_cache", answer)
    server = await serve(app)
    async with OpenAIClient(str(server.make_url(""))) as client:
        assert await client.reset_prefix_cache() is reset
    await server.close()


def compressing(coding: web.ContentCoding | None) -> web.Application:
    """A server that compresses as a client accepts it, or always with this coding."""
    choice = {"delta": {"content": " word"}, "message": {"content": " word"}}
    content = json.dumps({"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}).encode()

    async def answer(request: web.Request) -> web.StreamResponse:
        if not (await request.json()).get("stream"):
            response = web.Response(body=content)
            response.enable_compression(coding)
            return response
        stream = web.StreamResponse()
        stream.enable_compression(coding)
        await stream.prepare(request)
        await stream.write(b"data: " + content + b"\n\ndata: [DONE]\n\n")
        return stream

    async def models(request: web.Request) -> web.Response:
        response = web.json_response({"data": [{"id": "tiny"}]})
        response.enable_compression(coding)
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    app.router.add_get("/v1/models", models)
    return app


@pytest.mark.parametrize("coding", [None, web.ContentCoding.gzip, web.ContentCoding.deflate])
async def test_no_compression_is_asked_for_and_one_that_comes_is_read(coding: web.ContentCoding | None) -> None:
    server = await serve(compressing(coding))
    async with OpenAIClient(str(server.make_url(""))) as client:
        assert await client.get_json("/v1/models") == {"data": [{"id": "tiny"}]}
        records = [await client.send(call(stream=stream)) for stream in (True, False)]
        async with client.session.get(server.make_url("/v1/models")) as response:
            assert response.headers.get("content-encoding") == (coding.value if coding else None)
    await server.close()
    assert [(record.outcome, record.text) for record in records] == [(Outcome.OK, " word")] * 2


async def test_counts_that_are_no_numbers_are_unknown() -> None:
    async def answer(request: web.Request) -> web.Response:
        usage = {"prompt_tokens": "7", "completion_tokens": True, "prompt_tokens_details": {"cached_tokens": [1]}}
        return web.json_response({"choices": [{"message": {"content": "a"}}], "usage": usage})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    server = await serve(app)
    async with OpenAIClient(str(server.make_url(""))) as client:
        record = await client.send(call(stream=False))
    await server.close()
    assert record.outcome is Outcome.OK
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (None, None, None)


async def test_extras_tool_calls_and_lumps() -> None:
    frames = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]},
        {"choices": [{"delta": {"content": "a b c"}, "finish_reason": "stop"}]},
        {
            "choices": [],
            "usage": {"prompt_tokens": 7, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}},
        },
        {"modeswitch": {"energy": {"j": 1.5}}},
    ]

    async def answer(request: web.Request) -> web.Response:
        assert (await request.json())["stream_options"] == {"include_usage": True}
        assert request.headers["x-modeswitch-include"] == "energy"
        assert request.headers["authorization"] == "Bearer key"
        return web.Response(text="".join(f"data: {json.dumps(frame)}\n\n" for frame in frames) + "data: [DONE]\n\n")

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    server = await serve(app)
    async with OpenAIClient(str(server.make_url("")), api_key="key", include="energy") as client:
        record = await client.send(call(stream=True))
    await server.close()
    assert record.outcome is Outcome.OK
    assert len(record.frame_ms) == 2
    assert (record.cached_tokens, record.output_tokens) == (2, 4)
    assert record.extras == {"energy": {"j": 1.5}}
