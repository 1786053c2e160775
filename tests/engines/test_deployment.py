"""A deployment's streams over a played model: whatever happens to one, nobody waits for ever."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from app.config import load_settings
from app.energy.activity import Work
from app.engines import deployment, store
from app.engines.checkpoints import manifest
from app.engines.deployment import Engine, EngineUnavailable
from app.engines.processes import MARKER, find_marked, kill_marked
from app.engines.store import Scheme
from app.wire import Call, Endpoint, EngineState, Reply

WITHIN_S = 2.0
COUNTERS = (
    "running waiting kv_cache_usage steps prompt_tokens generation_tokens prefix_queries_tokens prefix_hits_tokens "
    "draft_tokens preemptions step_ms"
).split()


class PlayedModel:
    """Stands where the running engine stands; `frames` is what its generator does."""

    has_work = True

    def __init__(self, frames, dead=False):
        self.frames, self.dead = frames, dead
        self.counters = SimpleNamespace(**dict.fromkeys(COUNTERS, 0))

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


def error_event(code, message):
    """How vLLM's stream generators tell that they failed."""
    fault = {"message": message, "type": "BadRequestError", "param": None, "code": code}
    return f"data: {json.dumps({'error': fault})}\n\n"


class NoDevice:
    """A lease that is never granted, so that the engine stays queued."""

    class _Method:
        def remote(self, *_):
            return asyncio.sleep(3600)

    acquire = release = _Method()


def call(key="k"):
    return Call(key, "id", Endpoint.CHAT, "fp16", {})


@contextmanager
def first_engine(preset):
    settings = load_settings({"preset": preset})
    engine = Engine(settings.engine_specs[0], settings, NoDevice(), NoDevice())
    yield engine
    engine._life.cancel()
    engine._reporting.cancel()


@pytest.fixture
async def engine():
    with first_engine("cpu") as engine:
        yield engine


def play(engine, frames, dead=False):
    engine._llm = PlayedModel(frames, dead)


async def start(engine, key="k"):
    return await asyncio.wait_for(engine.start(call(key)), WITHIN_S)


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


# Starts that fail ------------------------------------------------------------------------------------------------


class FreeDevice:
    """A lease that is granted at once; counts how often it was given back."""

    def __init__(self):
        self.held, self.released = False, 0
        device = self

        class Acquire:
            async def remote(_, holder):
                device.held = True

        class Release:
            async def remote(_, holder):
                device.held = False
                device.released += 1

        self.acquire, self.release = Acquire(), Release()


class StartedModel(PlayedModel):
    """What a played start ends in."""

    def __init__(self):
        super().__init__(None)
        self.counters.stepped = asyncio.Event()

    async def connect(self, activity):
        return None

    async def effective(self):
        return {"max_num_seqs": 4, "kv_cache_tokens": 64}


class Told(Engine):
    """Remembers everything that it says of itself."""

    def __init__(self, *args):
        self.told = []
        self.killed_while_held = []
        super().__init__(*args)

    def _set(self, **changes):
        super()._set(**changes)
        self.told.append(self._status)

    async def until(self, condition):
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.005)

    def failures(self):
        """Statuses with the pause that follows a failure."""
        return [status for status in self.told if status.retry_in_s is not None]


@pytest.fixture
def whole_checkpoint(tmp_path):
    """Writes a checkpoint that the store takes for whole; returns its weights' file."""
    folder = store.checkpoint_folder("embedded", Scheme.FP16, tmp_path)

    def write():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").write_bytes(b"weights")
        made = manifest.describe(folder, source="s", fingerprint="f", scheme="fp16", recipe="r", versions={})
        manifest.write(made, folder)
        return folder / "model.safetensors"

    return write


@pytest.fixture
async def starting(tmp_path, monkeypatch):
    """Starts an engine whose process and environment are this one's, and whose loading is played."""
    monkeypatch.setenv(MARKER, "")
    monkeypatch.setattr(deployment, "UNSET", ())
    monkeypatch.setattr(deployment, "engine_environment", lambda *_: {})
    monkeypatch.setattr(deployment, "start_reaper", lambda marker: None)
    monkeypatch.setattr(deployment.fork_server, "begin", lambda: None)
    engines = []

    def kill(marker, spare):
        engines[-1].killed_while_held.append(engines[-1]._device.held)
        return kill_marked(marker, spare)

    def start(load, **args):
        monkeypatch.setattr(deployment, "_load_llm", lambda *_: load())
        monkeypatch.setattr(deployment, "kill_marked", kill)
        pauses = {"first_s": 0.01, "longest_s": 0.04}
        settings = load_settings({"preset": "cpu", "home": str(tmp_path), "restart": pauses, **args})
        engine = Told(settings.engine_specs[0], settings, FreeDevice(), NoDevice())
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine._life.cancel()
        engine._reporting.cancel()


def sleeper():
    """A process as an engine starts them: it carries the marker of this start."""
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])


async def test_an_engine_that_keeps_failing_waits_longer_each_time_until_its_checkpoint_is_mended(
    starting, whole_checkpoint
):
    whole_checkpoint().write_bytes(b"cut")
    engine = starting(StartedModel)
    await engine.until(lambda: len(engine.failures()) >= 5)
    assert [status.retry_in_s for status in engine.failures()][:5] == [0.01, 0.02, 0.04, 0.04, 0.04]
    assert {status.state for status in engine.failures()} == {EngineState.FAILED}
    assert all("is corrupt" in status.reason and "prepare" in status.reason for status in engine.failures())
    assert [status.state for status in engine.told][:4] == ["queued", "starting", "failed", "failed"]
    await engine.check_health()
    with pytest.raises(EngineUnavailable, match="fp16 is"):
        await start(engine)
    whole_checkpoint()
    await engine.until(lambda: engine.told[-1].state is EngineState.READY)
    assert (engine.told[-1].reason, engine.told[-1].retry_in_s) == (None, None)
    assert engine._device.released == len(engine.failures()) + 1


async def test_a_failed_start_says_its_root_cause_and_leaves_no_process(starting, whole_checkpoint):
    whole_checkpoint()
    left, markers = [], []

    def load():
        left.append(sleeper())
        markers.append(os.environ[MARKER])
        os.write(2, b"ERROR core.py:9] ValueError: 3 GiB KV cache is needed\n")
        raise RuntimeError("Engine core initialization failed. See root cause above.")

    engine = starting(load, restart={"first_s": 3600, "longest_s": 3600})
    await engine.until(engine.failures)
    assert engine.told[-1].reason.startswith("ValueError: 3 GiB KV cache is needed (log: ")
    assert left[0].wait(10) != 0
    assert find_marked(markers[0]) == []
    # What it left would have counted against the engine that starts next.
    assert engine.killed_while_held == [True]


async def test_a_start_that_hangs_fails_and_lets_the_others_start(starting, whole_checkpoint):
    whole_checkpoint()
    left, goes_on = [], threading.Event()

    def load():
        left.append(sleeper())
        goes_on.wait(30)

    engine = starting(load, restart={"first_s": 3600, "longest_s": 3600}, device={"lease_timeout_s": 0.2})
    try:
        await engine.until(engine.failures)
        assert "did not start within 0.2 s" in engine.told[-1].reason
        assert engine._device.released == 1
        assert left[0].wait(10) != 0
    finally:
        goes_on.set()
