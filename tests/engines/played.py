"""What stands around an engine's deployment in its tests: the running engine, and the lease on the device."""

import asyncio
from contextlib import contextmanager
from types import SimpleNamespace

from app.config import load_settings
from app.engines.deployment import Engine
from app.wire import Call, Endpoint

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


async def start(engine, key="k"):
    return await asyncio.wait_for(engine.start(call(key)), WITHIN_S)
