"""Waking at a given time, to a tenth of a millisecond.

An event loop's own timers round to a millisecond. To ask the clock again and again for the rest of a wait would keep a
core busy, which slows the core beside it, and on a busy machine the kernel lets others have it just when it is needed.
"""

import asyncio
import ctypes
import os
import time
from types import TracebackType
from typing import Self

_ABSOLUTE = 1  # TFD_TIMER_ABSTIME


class _Setting(ctypes.Structure):
    """`struct itimerspec`; the interval is 0 for an alarm that goes off once."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("at_s", ctypes.c_long),
        ("at_ns", ctypes.c_long),
    )


class Alarm:
    """A timer of the Linux kernel on the running event loop, for one waiting coroutine. Use as a context manager.

    Python's own functions for it (`os.timerfd_create`) come with 3.13. Raises OSError where there are no timers left.
    """

    def __enter__(self) -> Self:
        self._libc = ctypes.CDLL(None, use_errno=True)
        # The clock of time.perf_counter().
        self._timer = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._timer < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"no timer: {os.strerror(number)}")
        self._loop = asyncio.get_running_loop()
        self._rings: asyncio.Future[None] | None = None
        self._loop.add_reader(self._timer, self._ring)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.remove_reader(self._timer)
        os.close(self._timer)

    async def until(self, due: float) -> None:
        """Returns at `due` (time.perf_counter()), never before; when that is past, after a turn of the other tasks."""
        if due <= time.perf_counter():
            await asyncio.sleep(0)
            return
        self._rings = self._loop.create_future()
        at_s, at_ns = divmod(round(due * 1e9) + 1, 10**9)
        setting = _Setting(0, 0, at_s, at_ns)
        if self._libc.timerfd_settime(self._timer, _ABSOLUTE, ctypes.byref(setting), None) < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"the timer cannot be set: {os.strerror(number)}")
        await self._rings

    def _ring(self) -> None:
        os.read(self._timer, 8)
        if self._rings is not None and not self._rings.done():
            self._rings.set_result(None)
