"""How a deployment starts its engine, and what becomes of a start that fails. Loading is played."""

import asyncio
import os
import subprocess
import sys
import threading

import pytest

from app.config import load_settings
from app.engines import deployment, store
from app.engines.checkpoints import manifest
from app.engines.deployment import Engine, EngineUnavailable
from app.engines.processes import MARKER, find_marked, kill_marked
from app.engines.store import Scheme
from app.wire import EngineState
from tests.engines.played import NoDevice, PlayedModel, first_engine, start


class DyingDevice:
    """A lease that is granted, and whose actor is gone when it is given back."""

    class _Granted:
        async def remote(self, *_):
            return None

    class _Gone:
        async def remote(self, *_):
            raise ConnectionError("the actor died")

    acquire, release = _Granted(), _Gone()


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
async def engine():
    with first_engine("cpu") as engine:
        yield engine


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
    # It is ready a moment before it gives the device back.
    await engine.until(lambda: not engine._device.held)
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
