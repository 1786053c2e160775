"""A deployment handle played in this process, so that the controller is tested without Ray and without engines."""

import asyncio
import json
from dataclasses import dataclass, field

import pytest

from app.config import load_settings
from app.controller.body import Incoming
from app.controller.knowledge import Knowledge
from app.controller.links import EngineLink
from app.controller.service import Service
from app.controller.tenants import Keys, Tenants
from app.controller.tokens import prompts_of
from app.energy.queries import TimeRange
from app.telemetry import NoTelemetry
from app.wire import ChannelMessage, Endpoint, EngineState, EngineStatus, Frames, Reply, Started, Usage


@dataclass
class PlayedEngine:
    """Stands where Serve's `DeploymentHandle` stands; a test scripts what it answers."""

    name: str
    outbox: asyncio.Queue = field(default_factory=asyncio.Queue)
    calls: list = field(default_factory=list)
    aborted: list = field(default_factory=list)
    cancelled: list = field(default_factory=list)
    answer: object = None
    took: Usage | Exception | None = None
    """What an aborted request had taken, or why the engine cannot tell."""
    status_error: Exception | None = None

    def options(self, **_):
        return self

    def __getattr__(self, method):
        if method in ("start", "abort", "channel", "status", "reset_prefix_cache"):
            return _Method(self, method)
        raise AttributeError(method)

    def say(self, *frames, state=None):
        status = state and EngineStatus(self.name, state, pid=1)
        self.outbox.put_nowait(ChannelMessage(frames, status))

    def say_begun(self, *keys):
        self.outbox.put_nowait(ChannelMessage((), None, keys))

    def break_channel(self):
        self.outbox.put_nowait(ConnectionError("replica died"))


class _Method:
    def __init__(self, engine, name):
        self.engine, self.name = engine, name

    def remote(self, *args):
        return getattr(self, f"_{self.name}")(*args)

    def _start(self, call):
        self.engine.calls.append(call)
        return _Response(self.engine, call)

    def _abort(self, key):
        self.engine.aborted.append(key)
        return self._took()

    async def _took(self):
        if isinstance(self.engine.took, Exception):
            raise self.engine.took
        return self.engine.took

    async def _channel(self):
        while True:
            item = await self.engine.outbox.get()
            if isinstance(item, Exception):
                raise item
            yield item

    async def _reset_prefix_cache(self):
        return True

    async def _status(self):
        if self.engine.status_error is not None:
            raise self.engine.status_error
        return EngineStatus(self.engine.name, EngineState.READY, pid=1, resident_bytes=5)


class _Response:
    def __init__(self, engine, call):
        self.engine, self.call = engine, call

    def __await__(self):
        answer = self.engine.answer
        if callable(answer):
            answer = answer(self.call)
        if asyncio.iscoroutine(answer):
            return answer.__await__()
        return self._result(answer).__await__()

    async def _result(self, answer):
        if isinstance(answer, Exception):
            raise answer
        return answer

    def cancel(self):
        self.engine.cancelled.append(self.call.key)


class CountsWords:
    """A tokenizer of one token per word."""

    def count(self, body):
        return [len(prompt.split()) for prompt in prompts_of(body)]

    def render(self, body):
        return json.dumps(body["messages"])

    def count_text(self, text, body):
        return len(text.split())


class KeepsRecords:
    """Stands where the sender to the meter stands."""

    dropped_records = 0

    def __init__(self):
        self.records = []

    def put(self, record):
        record.columns()
        self.records.append(record)

    async def wait_for(self, count=1):
        """The last record, once there are so many."""
        async with asyncio.timeout(2):
            while len(self.records) < count:
                await asyncio.sleep(0.001)
        return self.records[-1]


class PlayedMeter:
    """Stands where the meter stands; knows what a test puts in."""

    def __init__(self):
        self.requests = {}
        self.by = {}
        """What each tenant's account holds; that of all is None's."""
        self.meter_state = {"measuring": False}
        self.broken = False

    async def totals(self, since_s, until_s, tenant):
        from app.energy.queries import Totals

        if self.broken:
            raise ConnectionError("gone")
        TimeRange(since_s, until_s)
        nothing = (None,) * 6
        return Totals(since_s, until_s, *nothing, (), (), (), self.by.get(tenant, {"mode": ()}))

    async def request(self, request_id, tenant):
        return self.requests.get(request_id)

    async def state(self):
        return self.meter_state


@pytest.fixture
def settings():
    return load_settings({"preset": "cpu", "controller": {"max_body_bytes": 10_000}, "model": {"max_model_len": 100}})


@pytest.fixture
def engines(settings):
    return {spec.name: PlayedEngine(spec.name, answer=Reply(200, b"{}")) for spec in settings.engine_specs}


@pytest.fixture
def records():
    return KeepsRecords()


@pytest.fixture
def meter():
    return PlayedMeter()


@pytest.fixture
def keys():
    return Keys({})


@pytest.fixture
def knowledge():
    return Knowledge("embedded", "box")


@pytest.fixture
def new_service(settings, engines, records, keys, knowledge):
    """A service as it begins, with nothing learned."""

    def make():
        links = [EngineLink(spec, engines[spec.name]) for spec in settings.engine_specs]
        for link in links:
            link.status = EngineStatus(link.name, EngineState.READY, pid=1)
        tenants = Tenants(keys, settings.live.tenants)
        return Service(settings, links, CountsWords(), tenants, records, NoTelemetry(), knowledge)

    return make


@pytest.fixture
def service(new_service):
    return new_service()


@pytest.fixture
def incoming():
    """A request as `read_request` gives it."""

    def make(content="hello", stream=False, headers=None, model=None, **body):
        body = {"messages": [{"role": "user", "content": content}], "stream": stream, **body}
        return Incoming("id", False, Endpoint.CHAT, model, stream, body, frozenset(), headers or {})

    return make


@pytest.fixture
def usage():
    def make(output_tokens=10, **changes):
        fields = {"prompt_tokens": 5, "cached_tokens": 0, "accepted_tokens": 0, "queued_ms": 1.0}
        times = {"first_token_ms": 10.0, "last_token_ms": 100.0}
        return Usage(**{**fields, **times, "output_tokens": output_tokens, **changes})

    return make


@pytest.fixture
def streamed():
    """An answer that begins a stream whose frames the test puts on the channel."""

    def begin(first="data: 1\n\n", last=False, usage=None):
        return Started(first, last, usage)

    return begin


@pytest.fixture
def frames():
    return lambda call, text, last=False, usage=None, code=None: Frames(call.key, text, last, usage, code)
