"""Frames on their way to the controller: held until a stream has begun, then sent together, as they become ready."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from app.engines.faults import Fault
from app.openai_errors import ENGINE_ERROR, ENGINE_LOST, error_frames
from app.wire import ChannelMessage, EngineStatus, Frames, Started, Usage


class Stream:
    """One streamed answer, from the first frame to the last. Owned by the event loop it runs in."""

    __slots__ = ("begun", "ended", "fault", "key", "lost", "parts", "ready", "usage")

    def __init__(self, key: str) -> None:
        self.key = key
        self.parts: list[str] = []
        self.ready = asyncio.Event()
        self.begun = False
        """Whether `start` has answered; until then its frames are not for the channel."""
        self.ended = False
        self.lost: str | None = None
        """Why nobody answers it, when that was so before it had begun; then nothing of it was sent."""
        self.fault: Fault | None = None
        """What was wrong with the request itself, likewise."""
        self.usage: Usage | None = None
        """Set before the last frame is put."""


class Outbox:
    """Collects the frames of all streams; one reader takes what is there, so nothing waits for a timer."""

    def __init__(self) -> None:
        self._pending: dict[str, list[str]] = {}
        self._last: dict[str, tuple[Usage | None, str | None]] = {}
        self._begun: list[str] = []
        self._status: EngineStatus | None = None
        self._news = asyncio.Event()
        self._closed = False

    def put(self, stream: Stream, text: str, last: bool = False, code: str | None = None) -> None:
        """Add a frame of a stream; `last` closes it (the text may then be empty), with the `code` of its error."""
        if not stream.begun:
            stream.parts.append(text)
            stream.ended = last
            stream.ready.set()
            return
        self._pending.setdefault(stream.key, []).append(text)
        if last:
            self._last[stream.key] = (stream.usage, code)
        self._news.set()

    def fail(self, stream: Stream, fault: Fault) -> None:
        """End a stream whose request failed: with an error frame once it has begun, else by telling `start`."""
        if stream.begun:
            self.put(stream, error_frames(fault.message, ENGINE_ERROR), last=True, code=ENGINE_ERROR)
        else:
            stream.fault = fault
            stream.ready.set()

    def lose(self, stream: Stream, why: str) -> None:
        """End a stream whose engine is gone, in the same way."""
        if stream.begun:
            self.put(stream, error_frames(why, ENGINE_LOST), last=True, code=ENGINE_LOST)
        else:
            stream.lost = why
            stream.ready.set()

    def begin(self, stream: Stream) -> Started:
        """The frames so far, for `start` to answer with; later ones go to the channel."""
        stream.begun = True
        started = Started("".join(stream.parts), stream.ended, stream.usage)
        stream.parts.clear()
        return started

    def note_begun(self, key: str) -> None:
        """The first token of a whole reply is there."""
        self._begun.append(key)
        self._news.set()

    def announce(self, status: EngineStatus) -> None:
        """Send this status with the next message; a newer one replaces it."""
        self._status = status
        self._news.set()

    def drop(self, key: str) -> None:
        """Forget what was not sent of an aborted stream."""
        self._pending.pop(key, None)
        self._last.pop(key, None)

    def close(self) -> None:
        """End `messages`; another outbox takes over."""
        self._closed = True
        self._news.set()

    async def messages(self) -> AsyncIterator[ChannelMessage]:
        """Messages for the one reader, until closed."""
        while True:
            await self._news.wait()
            if self._closed:
                return
            # All requests of one engine step become ready in the same turn of the loop: let them all get here first.
            await asyncio.sleep(0)
            self._news.clear()
            pending, last, status, begun = self._pending, self._last, self._status, tuple(self._begun)
            self._pending, self._last, self._status = {}, {}, None
            self._begun.clear()
            frames = tuple(
                Frames(key, "".join(texts), key in last, *last.get(key, ())) for key, texts in pending.items()
            )
            if frames or status or begun:
                yield ChannelMessage(frames, status, begun)
