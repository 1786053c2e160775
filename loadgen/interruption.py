"""Runs a coroutine so that Ctrl-C and SIGTERM end it in order: requests are given up, results kept, children ended."""

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvloop

EXIT_INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """For work outside of an event loop: Ctrl-C and SIGTERM raise KeyboardInterrupt while the block runs.

    Once one has ended the block, further ones are ignored.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    # Ctrl-C too: a shell starts what runs in its background with that signal ignored.
    before = {number: signal.signal(number, interrupt) for number in _SIGNALS}
    try:
        yield
    except KeyboardInterrupt:
        before = dict.fromkeys(_SIGNALS, signal.SIG_IGN)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def without_ctrl_c() -> Iterator[None]:
    """Processes started in the block are never told of Ctrl-C, which a terminal sends to every process of a command.

    They inherit that this thread has the signal blocked, so it holds from their first moment on.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_interruptible(main: Coroutine[Any, Any, None]) -> bool:
    """Runs `main` to its end; True when a signal cancelled it: from then on further ones are ignored.

    Its exceptions pass through; of a group of them, as tasks that run together raise it, the first.
    """

    async def guarded() -> bool:
        task = asyncio.ensure_future(main)
        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            return True
        except ExceptionGroup as group:
            raise _first(group) from group
        return False

    interrupted = uvloop.run(guarded())
    if interrupted:
        # What is left to do is to write what was found, which a second Ctrl-C must not cost.
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    return interrupted


def _first(error: Exception) -> Exception:
    return _first(error.exceptions[0]) if isinstance(error, ExceptionGroup) else error
