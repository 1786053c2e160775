"""Writing an answer to the client, and noticing when the client has gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection before the answer began."""


class EventStream(Response):
    """A server-sent event stream of ready frames; when the client leaves, the source is closed at once.

    Starlette's own `StreamingResponse` opens a task group and encodes through more layers for each frame.
    """

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncIterator[str], headers: Mapping[str, str]) -> None:
        super().__init__(headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        # An empty body was measured by the base class, and a stream has no length.
        del self.headers["content-length"]
        self._frames = frames
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.ensure_future(self._write(send))
        leaving = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            await _cancel(writing)
            await _cancel(leaving)
            await close(self._frames, self._begun)

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for frame in self._frames:
            self._begun = True
            await send({"type": "http.response.body", "body": frame.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def close(frames: AsyncIterator[str], begun: bool = False) -> None:
    """Close a stream. One that was never begun would not notice, so it is begun first."""
    if isinstance(frames, AsyncGenerator):
        if not begun:
            await anext(frames, None)
        await frames.aclose()


async def unless_gone(receive: Receive, work: Awaitable[T], discard: Callable[[T], Awaitable[None]] | None = None) -> T:
    """The result of `work`, which is cancelled as soon as the client disconnects. The body must have been read.

    A result that came at the very moment when this call was cancelled goes to `discard`.

    Raises:
        ClientGone: the client disconnected first.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    except asyncio.CancelledError:
        if discard is not None and working.done() and not working.cancelled() and working.exception() is None:
            await discard(working.result())
        raise
    finally:
        await _cancel(working)
        await _cancel(leaving)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Future[T]) -> None:
    if not task.done():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
