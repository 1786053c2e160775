"""The controller's side of one engine: its channel, its latest status, and the streams that are under way."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from app.modes import EngineSpec
from app.openai_errors import error_frames
from app.wire import Call, ChannelMessage, EngineState, EngineStatus, Frames, Reply, Started

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

log = logging.getLogger("ray.serve")
_RECONNECT_AFTER_S = 0.5


class EngineLost(RuntimeError):
    """The engine cannot answer; nothing of an answer was sent yet."""


class EngineLink:
    """One engine as the controller sees it. All methods run in the controller's event loop."""

    def __init__(self, spec: EngineSpec, handle: DeploymentHandle) -> None:
        self.spec = spec
        self.status: EngineStatus | None = None
        """What the engine said last; None while the channel is down."""
        self.in_flight = 0
        self._handle = handle
        self._streams: dict[str, asyncio.Queue[Frames]] = {}

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def ready(self) -> bool:
        return self.status is not None and self.status.state is EngineState.READY

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
        if message.status is not None:
            self.status = message.status
        for frames in message.frames:
            # A stream that was given up meanwhile has no reader.
            if queue := self._streams.get(frames.key):
                queue.put_nowait(frames)

    def _break(self) -> None:
        self.status = None
        for key, queue in self._streams.items():
            queue.put_nowait(Frames(key, error_frames(f"engine {self.name} was lost", "engine_lost"), True))

    async def start(self, call: Call, stream: bool) -> Reply | Started:
        """Begin a request; cancelling aborts it in the engine. Every `Started` must be read with `rest`.

        Raises:
            EngineLost: the engine is not there, not ready or died; another one may be tried.
        """
        if stream:
            self._streams[call.key] = asyncio.Queue()
        self.in_flight += 1
        answer: Reply | Started | None = None
        response = self._handle.start.remote(call)
        try:
            answer = await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except Exception as error:
            raise EngineLost(_first_line(error)) from error
        finally:
            if not isinstance(answer, Started):
                self._forget(call.key)
        return answer

    async def rest(self, call: Call, started: Started) -> AsyncIterator[str]:
        """The text of a begun stream, from its first frame on; closing it early aborts the request."""
        ended = started.last
        queue = self._streams[call.key]
        try:
            yield started.frames
            while not ended:
                _, text, ended = await queue.get()
                while not queue.empty() and not ended:
                    _, more, ended = queue.get_nowait()
                    text += more
                if text:
                    yield text
        finally:
            self._forget(call.key)
            if not ended:
                self._handle.abort.remote(call.key)

    def _forget(self, key: str) -> None:
        self._streams.pop(key, None)
        self.in_flight -= 1

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
            return bool(await asyncio.wait_for(self._call("reset_prefix_cache"), 30.0))
        return False

    async def _call(self, method: str) -> object:
        return await getattr(self._handle, method).remote()


def _first_line(error: BaseException) -> str:
    """One line of an error; Ray puts whole remote tracebacks into its messages."""
    cause = getattr(error, "cause", None) or error
    lines = [line for line in str(cause).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(cause).__name__
