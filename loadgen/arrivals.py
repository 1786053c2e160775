"""When requests are sent. Open loops follow a schedule and never wait for an answer; the closed loop waits for one."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

# asyncio's selector rounds a timer up to the next millisecond; the rest of a wait is spent yielding.
_TIMER_GRAIN_S = 0.0015

Send = Callable[[int, float | None], Awaitable[None]]
"""Sends request `index`; the second argument is its due time on time.perf_counter(), None in a closed loop."""


class Schedule(Protocol):
    """An open loop: when each request is due."""

    def offsets_s(self, count: int, seed: int) -> Sequence[float]:
        """Due times of `count` requests, seconds from the start, ascending."""
        ...


def _check_rate(rate_per_s: float) -> None:
    if not (rate_per_s > 0 and math.isfinite(rate_per_s)):
        raise ValueError(f"a rate of requests must be positive, got {rate_per_s}")


@dataclass(frozen=True, slots=True)
class Constant:
    """Evenly spaced."""

    rate_per_s: float

    def offsets_s(self, count: int, seed: int) -> Sequence[float]:
        _check_rate(self.rate_per_s)
        return [index / self.rate_per_s for index in range(count)]


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent arrivals: exponential gaps of mean 1 / rate."""

    rate_per_s: float

    def offsets_s(self, count: int, seed: int) -> Sequence[float]:
        _check_rate(self.rate_per_s)
        gaps = np.random.default_rng(seed).exponential(1 / self.rate_per_s, count)
        return [float(value) for value in np.cumsum(gaps)]


@dataclass(frozen=True, slots=True)
class Bursty:
    """Gamma gaps of mean 1 / rate and of coefficient of variation `variation`; 1 is Poisson, 4 comes in clumps."""

    rate_per_s: float
    variation: float = 4.0

    def offsets_s(self, count: int, seed: int) -> Sequence[float]:
        _check_rate(self.rate_per_s)
        if not self.variation > 0:
            raise ValueError(f"the variation of a bursty schedule must be positive, got {self.variation}")
        shape = self.variation**-2
        gaps = np.random.default_rng(seed).gamma(shape, 1 / (self.rate_per_s * shape), count)
        return [float(value) for value in np.cumsum(gaps)]


@dataclass(frozen=True, slots=True)
class Replayed:
    """The times of a recorded trace, played `speed` times as fast."""

    times_s: Sequence[float]
    speed: float = 1.0

    def offsets_s(self, count: int, seed: int) -> Sequence[float]:
        if not self.speed > 0:
            raise ValueError(f"the speed of a replay must be positive, got {self.speed}")
        return [value / self.speed for value in self.times_s[:count]]


RATE_SCHEDULES: dict[str, Callable[[float], Schedule]] = {"constant": Constant, "poisson": Poisson, "bursty": Bursty}


async def wait_until(due: float) -> None:
    """Returns at `due` (time.perf_counter()) to some tens of microseconds, while other tasks go on."""
    coarse_s = due - time.perf_counter() - _TIMER_GRAIN_S
    if coarse_s > 0:
        await asyncio.sleep(coarse_s)
    while time.perf_counter() < due:  # noqa: ASYNC110 (an event would be set by a timer, which has that grain)
        await asyncio.sleep(0)


async def drive_open(offsets_s: Sequence[float], send: Send, origin: float) -> None:
    """Starts request i at origin + offsets_s[i] whatever became of the earlier ones, then waits for all.

    Cancelling it cancels every request under way and waits for their ends.
    """
    async with asyncio.TaskGroup() as group:
        for index, offset_s in enumerate(offsets_s):
            due = origin + offset_s
            await wait_until(due)
            group.create_task(_run(send, index, due))


async def drive_closed(count: int, concurrency: int, send: Send) -> None:
    """Keeps `concurrency` requests under way until `count` were sent. Raises ValueError for a concurrency below 1."""
    if concurrency < 1:
        raise ValueError(f"a closed loop needs a concurrency of at least 1, got {concurrency}")
    waiting = iter(range(count))

    async def lane() -> None:
        for index in waiting:
            await send(index, None)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, count)):
            group.create_task(lane())


async def _run(send: Send, index: int, due: float) -> None:
    await send(index, due)
