"""A deployment's streams over a played model: whatever happens to one, nobody waits for ever."""

import asyncio
import json

import pytest

from app.config import load_settings
from app.engines.deployment import Engine, EngineUnavailable
from app.wire import Call, Endpoint, EngineState

WITHIN_S = 2.0


class PlayedModel:
    """Stands where the running engine stands; `frames` is what its generator does."""

    dead = False

    def __init__(self, frames):
        self.frames = frames

    async def respond(self, call, extra=None):
        return self.frames()


class DyingDevice:
    """A lease that is granted, and whose actor is gone when it is given back."""

    class _Granted:
        async def remote(self, *_):
            return None

    class _Gone:
        async def remote(self, *_):
            raise ConnectionError("the actor died")

    acquire, release = _Granted(), _Gone()


class NoDevice:
    """A lease that is never granted, so that the engine stays queued."""

    class _Method:
        def remote(self, *_):
            return asyncio.sleep(3600)

    acquire = release = _Method()


def call(key="k"):
    return Call(key, "id", Endpoint.CHAT, "fp16", {})


@pytest.fixture
async def engine():
    settings = load_settings({"preset": "cpu"})
    engine = Engine(settings.engine_specs[0], settings, NoDevice(), NoDevice())
    yield engine
    engine._life.cancel()
    engine._reporting.cancel()


def play(engine, frames):
    engine._llm = PlayedModel(frames)


async def start(engine, key="k"):
    return await asyncio.wait_for(engine.start(call(key)), WITHIN_S)


async def read(channel, key):
    """The text of one stream until it is closed."""
    text = ""
    async for message in channel:
        for frames in message.frames:
            if frames.key == key:
                text += frames.text
                if frames.last:
                    return text
    return text


async def test_a_generator_that_fails_before_its_first_frame_is_told_at_once(engine):
    async def frames():
        raise RuntimeError("no first frame")
        yield

    play(engine, frames)
    with pytest.raises(EngineUnavailable, match="no first frame"):
        await start(engine)
    assert engine._streams == {}


async def test_a_generator_that_fails_later_closes_its_stream_with_an_error(engine):
    async def frames():
        yield "data: 1\n\n"
        await asyncio.sleep(0.01)
        raise RuntimeError("broken midway")

    channel = engine.channel()
    await anext(channel)
    play(engine, frames)
    assert (await start(engine)).frames == "data: 1\n\n"
    text = await asyncio.wait_for(read(channel, "k"), WITHIN_S)
    event, done, _ = text.split("\n\n")
    assert json.loads(event.removeprefix("data: "))["error"]["type"] == "server_error"
    assert done == "data: [DONE]"


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


async def test_an_engine_that_is_not_ready_refuses(engine):
    with pytest.raises(EngineUnavailable, match="queued"):
        await start(engine)


async def test_an_engine_that_was_loaded_outlives_the_device(engine, monkeypatch):
    async def load(marker):
        return None

    killed = []
    monkeypatch.setattr("app.engines.deployment.kill_marked", lambda marker, spare: killed.append(marker))
    monkeypatch.setattr(engine, "_load", load)
    engine._device = DyingDevice()
    assert await engine._start()
    assert killed == []
    assert engine._status.state is EngineState.READY


async def test_an_engine_serves_whose_gpu_nvml_cannot_tell(monkeypatch):
    def no_nvml():
        raise OSError("no NVML")

    monkeypatch.setattr("app.engines.deployment.visible_gpu_uuid", no_nvml)
    settings = load_settings({"preset": "a100-40gb"})
    engine = Engine(settings.engine_specs[0], settings, DyingDevice(), NoDevice())
    for task in (engine._life, engine._reporting):
        task.cancel()
    await engine._tell_device()
    assert engine._recorder.devices == ()
    monkeypatch.setattr("app.engines.deployment.visible_gpu_uuid", lambda: "GPU-1")
    await engine._tell_device()
    assert engine._recorder.devices == ("GPU-1",)
