"""The controller's side of one engine: its channel, its latest status, and the streams that are under way."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

from app.controller.in_flight import InFlight
from app.modes import EngineSpec
from app.openai_errors import ENGINE_LOST, error_frames
from app.wire import Call, ChannelMessage, EngineState, EngineStatus, Frames, Reply, Started, Usage

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

log = logging.getLogger("ray.serve")
_RECONNECT_AFTER_S = 0.5
_ABORT_WITHIN_S = 5.0
Ended = Callable[[Usage | None, str, str | None], None]
"""Told once when a stream is over: what it took; `ok`, `failed`, `deadline` or `aborted`; the code of its error."""


class EngineLost(RuntimeError):
    """The engine cannot answer; nothing of an answer was sent yet."""


class EngineLink:
    """One engine as the controller sees it. All methods run in the controller's event loop."""

    def __init__(self, spec: EngineSpec, handle: DeploymentHandle) -> None:
        self.spec = spec
        self.status: EngineStatus | None = None
        """What the engine said last; None while the channel is down."""
        self.heard_s = time.monotonic()
        """When it said something last."""
        self.epoch = 0
        """Counts its lives; what it had cached is gone with the last one."""
        self.in_flight = InFlight()
        self._handle = handle
        self._streams: dict[str, asyncio.Queue[Frames]] = {}
        self._given_up: dict[str, asyncio.Task[Usage | None]] = {}

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def ready(self) -> bool:
        return self.status is not None and self.status.state is EngineState.READY

    @property
    def takes_priorities(self) -> bool:
        """Whether the engine orders its queue by priority; another refuses a request that has one."""
        return self.status is not None and self.status.engine_args.get("scheduling_policy") == "priority"

    @property
    def state(self) -> str:
        """`unreachable` while the replica is being started or replaced, else the engine's own state."""
        return self.status.state.value if self.status else "unreachable"

    async def follow(self) -> None:
        """Read the engine's channel for ever; a broken one is opened again."""
        while True:
            try:
                async for message in self._handle.options(stream=True).channel.remote():
                    self._take(message)
            except asyncio.CancelledError:
                raise
            except Exception as error:
                if self.status is not None:
                    log.warning("engine %s is out of reach: %s", self.name, _first_line(error))
            self._break()
            await asyncio.sleep(_RECONNECT_AFTER_S)

    def _take(self, message: ChannelMessage) -> None:
        now_s = self.heard_s = time.monotonic()
        if message.status is not None:
            if message.status.state is EngineState.READY and not self.ready:
                self.epoch += 1
            self.status = message.status
        for key in message.begun:
            self.in_flight.first_token(key, now_s)
        for frames in message.frames:
            # A stream that was given up meanwhile has no reader.
            if queue := self._streams.get(frames.key):
                queue.put_nowait(frames)

    def _break(self) -> None:
        self.status = None
        text = error_frames(f"engine {self.name} was lost", ENGINE_LOST)
        for key, queue in self._streams.items():
            queue.put_nowait(Frames(key, text, last=True, code=ENGINE_LOST))

    async def start(self, call: Call, expected_output_tokens: int = 0, prompt_tokens: int = 0) -> Reply | Started:
        """Begin a request; cancelling gives it up. Every `Started` must be read with `rest`.

        The token counts are for the account of what is in flight.

        Raises:
            EngineLost: the engine is not there, not ready or died; another one may be tried.
        """
        if call.stream:
            self._streams[call.key] = asyncio.Queue()
        self.in_flight.send(call.key, prompt_tokens, expected_output_tokens, call.tenant)
        answer: Reply | Started | None = None
        response = self._handle.start.remote(call)
        try:
            answer = await response
        except asyncio.CancelledError:
            response.cancel()
            # Ray tells the replica in its own time; a call does so at once.
            self.give_up(call.key)
            raise
        except Exception as error:
            raise EngineLost(_first_line(error)) from error
        finally:
            if not isinstance(answer, Started):
                self._forget(call.key)
        if isinstance(answer, Started):
            self.in_flight.first_token(call.key, time.monotonic())
        return answer

    async def rest(
        self, call: Call, started: Started, told: Ended | None = None, deadline_s: float | None = None
    ) -> AsyncIterator[str]:
        """The text of a begun stream, from its first frame on; closing it early gives the request up.

        `deadline_s` is of the event loop's clock; past it the stream ends in an error frame.
        """
        ended, usage, status = started.last, started.usage, "aborted"
        code: str | None = None
        queue = self._streams[call.key]
        try:
            yield started.frames
            while not ended:
                async with asyncio.timeout_at(deadline_s):
                    _, text, ended, usage, code = await queue.get()
                while not queue.empty() and not ended:
                    _, more, ended, usage, code = queue.get_nowait()
                    text += more
                if text:
                    yield text
        except TimeoutError:
            status, code = "deadline", "deadline_exceeded"
            yield error_frames("the deadline of this request has passed", code)
        finally:
            self._forget(call.key)
            if ended:
                # Complete, even if the client left while the last of it was being written.
                status = "ok" if code is None and usage is not None else "failed"
                if told is not None:
                    told(usage, status, code)
            else:
                given_up = self.give_up(call.key)
                if told is not None:
                    given_up.add_done_callback(lambda done: told(took(done), status, code))

    def give_up(self, key: str) -> asyncio.Task[Usage | None]:
        """Abort a request in the engine, once. The task ends with what it took; None where the engine cannot tell."""
        task = self._given_up.get(key)
        if task is None:
            task = self._given_up[key] = asyncio.create_task(_answer_to_abort(self._handle.abort.remote(key)))
            task.add_done_callback(lambda _: self._given_up.pop(key, None))
        return task

    def _forget(self, key: str) -> None:
        self._streams.pop(key, None)
        self.in_flight.end(key, time.monotonic())

    async def read_status(self) -> EngineStatus | None:
        """The status with memory, asked for now; the last one pushed when the engine does not answer."""
        with contextlib.suppress(Exception):
            status = await asyncio.wait_for(self._call("status"), 5.0)
            assert isinstance(status, EngineStatus)
            return status
        return self.status

    async def reset_prefix_cache(self) -> bool:
        """True once the engine's cached prefixes are forgotten."""
        with contextlib.suppress(Exception):
            if await asyncio.wait_for(self._call("reset_prefix_cache"), 30.0):
                self.epoch += 1
                return True
        return False

    async def _call(self, method: str) -> object:
        return await getattr(self._handle, method).remote()


async def _answer_to_abort(response: Awaitable[Usage | None]) -> Usage | None:
    with contextlib.suppress(Exception):
        return await asyncio.wait_for(response, _ABORT_WITHIN_S)
    return None


def took(given_up: asyncio.Task[Usage | None]) -> Usage | None:
    """What a request took that was given up, from the finished task of `give_up`."""
    return None if given_up.cancelled() else given_up.result()


def _first_line(error: BaseException) -> str:
    """One line of an error; Ray puts whole remote tracebacks into its messages."""
    cause = getattr(error, "cause", None) or error
    lines = [line for line in str(cause).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(cause).__name__
