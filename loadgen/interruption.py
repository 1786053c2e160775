"""Runs a coroutine so that Ctrl-C and SIGTERM end it in order: requests are given up, results kept, children ended."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

import uvloop

EXIT_INTERRUPTED = 130


def run_interruptible(main: Coroutine[Any, Any, None]) -> bool:
    """Runs `main` to its end; True when a signal cancelled it. Its exceptions pass through."""

    async def guarded() -> bool:
        task = asyncio.ensure_future(main)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            return True
        return False

    return uvloop.run(guarded())
