"""A deployment's streams over a played model: whatever happens to one, nobody waits for ever."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from app.energy.activity import Work
from app.engines import deployment
from app.engines.deployment import EngineUnavailable
from app.wire import EngineState, Reply
from tests.engines.played import WITHIN_S, PlayedModel, call, first_engine, start


def error_event(code, message):
    """How vLLM's stream generators tell that they failed."""
    fault = {"message": message, "type": "BadRequestError", "param": None, "code": code}
    return f"data: {json.dumps({'error': fault})}\n\n"


@pytest.fixture
async def engine():
    with first_engine("cpu") as engine:
        yield engine


def play(engine, frames, dead=False):
    engine._llm = PlayedModel(frames, dead)


async def read(channel, key):
    """The text of one stream until it is closed, and the code it was closed with."""
    text = ""
    async for message in channel:
        for frames in message.frames:
            if frames.key == key:
                text += frames.text
                if frames.last:
                    assert frames.usage is not None
                    return text, frames.code
    return text, "never closed"


def error_of(text):
    event, done, _ = text.split("\n\n")
    assert done == "data: [DONE]"
    return json.loads(event.removeprefix("data: "))["error"]


@pytest.mark.parametrize(
    ("code", "message", "status", "told"),
    [
        (500, "it broke", 500, "engine_error"),
        (503, "try again", 503, "engine_error"),
        (400, "the maximum context length is 9", 400, "context_length_exceeded"),
        ("odd", "", 500, "engine_error"),
    ],
)
async def test_a_stream_that_begins_with_an_error_is_a_reply(engine, code, message, status, told):
    async def frames():
        yield error_event(code, message)
        yield "data: [DONE]\n\n"

    play(engine, frames)
    reply = await start(engine)
    assert (reply.status, json.loads(reply.body)["error"]["code"]) == (status, told)
    assert reply.usage is not None
    assert engine._streams == {}


async def test_a_stream_that_begins_with_an_error_of_a_dead_engine_may_be_tried_elsewhere(engine):
    async def frames():
        yield error_event(500, "EngineCore encountered an issue")
        yield "data: [DONE]\n\n"

    play(engine, frames, dead=True)
    with pytest.raises(EngineUnavailable, match="died"):
        await start(engine)
    assert engine._streams == {}


async def test_a_generator_that_fails_before_its_first_frame_is_told_at_once(engine):
    async def frames():
        raise RuntimeError("no first frame")
        yield

    play(engine, frames)
    reply = await start(engine)
    assert (reply.status, json.loads(reply.body)["error"]["code"]) == (500, "engine_error")
    assert b"no first frame" not in reply.body
    assert engine._streams == {}


def fault_of_a_reply():
    raise RuntimeError("no answer")


async def test_a_reply_that_fails_is_a_fault_of_the_request_while_the_engine_lives(engine):
    play(engine, fault_of_a_reply)
    reply = await start(engine)
    assert isinstance(reply, Reply)
    assert (reply.status, json.loads(reply.body)["error"]["code"]) == (500, "engine_error")
    play(engine, fault_of_a_reply, dead=True)
    with pytest.raises(EngineUnavailable):
        await start(engine)


@pytest.mark.parametrize(("dead", "code"), [(False, "engine_error"), (True, "engine_lost")])
@pytest.mark.parametrize("raises", [False, True])
async def test_a_stream_that_breaks_later_is_closed_with_an_error_and_its_reason(engine, dead, code, raises):
    async def frames():
        engine._recorder.stepped([Work("k", 5, 1)])
        yield "data: 1\n\n"
        await asyncio.sleep(0.01)
        engine._llm.dead = dead
        if raises:
            raise RuntimeError("broken midway")
        yield error_event(500, "broken midway")
        yield "data: [DONE]\n\n"

    channel = engine.channel()
    await anext(channel)
    play(engine, frames)
    assert (await start(engine)).frames == "data: 1\n\n"
    text, told = await asyncio.wait_for(read(channel, "k"), WITHIN_S)
    error = error_of(text)
    assert (told, error["code"], error["type"]) == (code, code, "server_error")
    report = engine._recorder.take()
    assert [work for piece in report.slices for work in piece.work] == [Work("k", 5, 1)]
    assert report.ended == ("k",)


async def test_an_abort_tells_what_the_request_took(engine):
    async def frames():
        yield "data: 1\n\n"
        await asyncio.sleep(3600)

    play(engine, frames)
    await start(engine)
    usage = await engine.abort("k")
    assert (usage.prompt_tokens, usage.output_tokens) == (0, 0)
    await asyncio.sleep(0)
    assert await engine.abort("k") == usage
    assert await engine.abort("unknown") is None


async def test_a_channel_that_takes_over_gets_the_status(engine):
    old, new = engine.channel(), engine.channel()
    assert (await anext(old)).status.state is EngineState.QUEUED
    waiting = asyncio.create_task(anext(old))
    await asyncio.sleep(0.01)
    message = await asyncio.wait_for(anext(new), WITHIN_S)
    assert message.status.state is EngineState.QUEUED
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(waiting, WITHIN_S)


async def test_a_start_under_way_when_the_channel_changes_hands_is_told(engine):
    async def frames():
        await asyncio.sleep(3600)
        yield

    play(engine, frames)
    starting = asyncio.create_task(engine.start(call()))
    await asyncio.sleep(0.01)
    await asyncio.wait_for(anext(engine.channel()), WITHIN_S)
    with pytest.raises(EngineUnavailable):
        await asyncio.wait_for(starting, WITHIN_S)


async def test_memory_is_not_read_for_every_call(engine, monkeypatch):
    readings = iter([(5, 6), (7, 8)])
    play(engine, None)
    engine._processes = SimpleNamespace(memory_bytes=lambda: next(readings))
    engine._llm.counters.running = 3
    for _ in range(3):
        status = await engine.status()
        assert (status.resident_bytes, status.peak_memory_bytes, status.running) == (5, 6, 3)
    monkeypatch.setattr(deployment, "_READ_MEMORY_EVERY_S", 0.0)
    assert (await engine.status()).resident_bytes == 7


async def test_an_engine_that_is_not_ready_refuses(engine):
    with pytest.raises(EngineUnavailable, match="queued"):
        await start(engine)


@pytest.fixture
async def gpu_engine():
    with first_engine("a100-40gb") as engine:
        yield engine


async def test_an_engine_serves_whose_gpu_nvml_cannot_tell(gpu_engine, monkeypatch):
    def no_nvml():
        raise OSError("no NVML")

    monkeypatch.setattr("app.engines.deployment.visible_gpu_uuid", no_nvml)
    await gpu_engine._tell_device()
    assert gpu_engine._recorder.devices == ()
    monkeypatch.setattr("app.engines.deployment.visible_gpu_uuid", lambda: "GPU-1")
    await gpu_engine._tell_device()
    assert gpu_engine._recorder.devices == ("GPU-1",)


async def test_what_an_engine_holds_is_of_the_devices_memory(engine, gpu_engine):
    class Processes:
        def memory_bytes(self):
            return 3, 4

    assert await engine._resident_bytes(Processes(), {"allocator_peak_bytes": None}) == 3
    assert await gpu_engine._resident_bytes(Processes(), {"allocator_peak_bytes": 7}) == 7
    assert await gpu_engine._resident_bytes(Processes(), {"allocator_peak_bytes": None}) is None
