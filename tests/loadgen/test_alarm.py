import asyncio
import os
import time

import pytest

from loadgen.alarm import Alarm


@pytest.mark.parametrize("wait_s", [0.0001, 0.003, 0.02])
async def test_goes_off_when_it_is_due_and_not_before(wait_s: float) -> None:
    with Alarm() as alarm:
        late_s = []
        for _ in range(20):
            due = time.perf_counter() + wait_s
            await alarm.until(due)
            late_s.append(time.perf_counter() - due)
    assert min(late_s) >= 0.0
    assert min(late_s) < 0.001, "an event loop's own timers round up to the next millisecond"


async def test_other_tasks_go_on_meanwhile() -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    other = asyncio.ensure_future(tick())
    with Alarm() as alarm:
        await alarm.until(time.perf_counter() + 0.01)
        waited = ticks
        await alarm.until(time.perf_counter() - 1.0)
    other.cancel()
    assert waited > 1
    assert ticks > waited, "they have their turn when the time is past, too"


async def test_a_wait_that_is_given_up_disturbs_no_later_one() -> None:
    with Alarm() as alarm:
        given_up = asyncio.ensure_future(alarm.until(time.perf_counter() + 0.005))
        await asyncio.sleep(0)
        given_up.cancel()
        due = time.perf_counter() + 0.02
        await alarm.until(due)
        assert time.perf_counter() >= due


async def test_leaves_nothing_open() -> None:
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with Alarm() as alarm:
            await alarm.until(time.perf_counter() + 0.001)
    assert len(os.listdir("/proc/self/fd")) <= len(before)
