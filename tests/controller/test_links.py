"""Streams over the channel: complete, in order, aborted when given up, ended by an error frame when the engine dies."""

import asyncio
import json
from collections.abc import AsyncGenerator

import pytest

from app.controller.links import EngineLost
from app.wire import Call, Endpoint, EngineState


@pytest.fixture
def link(service):
    return service.links[0]


@pytest.fixture
def engine(engines):
    return engines["fp16"]


@pytest.fixture
async def following(link):
    task = asyncio.create_task(link.follow())
    yield link
    task.cancel()


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
def request_to_fp16(incoming):
    return lambda stream=True: incoming(stream=stream, headers={"x-modeswitch-policy": "static:fp16"})


@pytest.fixture
def begin(service, engine, streamed, request_to_fp16):
    async def make(first="data: 1\n\n", last=False):
        return await _begin(service, engine, streamed, request_to_fp16, first, last)

    return make


async def _begin(service, engine, streamed, request_to_fp16, first, last):
    engine.answer = streamed(first, last)
    answer = await service.answer(request_to_fp16())
    assert isinstance(answer.frames, AsyncGenerator)
    return answer.frames, engine.calls[-1]


async def test_a_stream_is_complete_and_in_order(begin, following, engine, frames):
    stream, call = await begin()
    assert len(following.in_flight) == 1
    engine.say(frames(call, "data: 2\n\n"))
    engine.say(frames(call, "data: 3\n\n"), frames(call, "", last=True))
    assert "".join([text async for text in stream]) == "data: 1\n\ndata: 2\n\ndata: 3\n\n"
    assert len(following.in_flight) == 0
    assert engine.aborted == []


async def test_frames_that_overtake_the_start_are_kept(service, following, engine, streamed, frames, request_to_fp16):
    async def late(call):
        engine.say(frames(call, "2"), frames(call, "", last=True))
        await settle()
        return streamed("1")

    engine.answer = late
    answer = await service.answer(request_to_fp16())
    assert [text async for text in answer.frames] == ["1", "2"]


async def test_a_short_stream_needs_no_channel(begin, link, engine):
    stream, _ = await begin("all\n\n", last=True)
    assert [text async for text in stream] == ["all\n\n"]
    assert (len(link.in_flight), engine.aborted) == (0, [])


async def test_a_stream_given_up_is_aborted_in_the_engine(begin, following, engine):
    stream, call = await begin()
    await anext(stream)
    await stream.aclose()
    assert engine.aborted == [call.key]
    assert len(following.in_flight) == 0


async def test_cancelling_before_the_first_frame_cancels_in_the_engine(service, link, engine, request_to_fp16):
    engine.answer = lambda call: asyncio.sleep(60)
    task = asyncio.create_task(service.answer(request_to_fp16(stream=False)))
    await settle()
    assert len(link.in_flight) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.cancelled == engine.aborted == [engine.calls[0].key]
    assert len(link.in_flight) == 0


async def test_a_lost_engine_ends_streams_with_an_error_frame(begin, following, engine):
    stream, _ = await begin()
    await anext(stream)
    engine.break_channel()
    rest = "".join([text async for text in stream])
    event, done, _ = rest.split("\n\n")
    assert json.loads(event.removeprefix("data: "))["error"]["code"] == "engine_lost"
    assert done == "data: [DONE]"
    assert following.state == "unreachable"


async def test_the_channel_is_opened_again(following, engine, monkeypatch):
    monkeypatch.setattr("app.controller.links._RECONNECT_AFTER_S", 0)
    engine.break_channel()
    engine.say(state=EngineState.STARTING)
    await asyncio.sleep(0.05)
    assert following.state == "starting"


async def test_a_fault_of_start_is_an_engine_lost(link, engine):
    engine.answer = RuntimeError("long\ntraceback\nActorDiedError: it died")
    with pytest.raises(EngineLost, match="ActorDiedError: it died"):
        await link.start(Call("key", "id", Endpoint.CHAT, "fp16", {}, stream=True))
    assert len(link.in_flight) == 0
