import asyncio
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.arrivals import RATE_SCHEDULES, Bursty, Replayed, drive_closed, drive_open


@given(st.sampled_from(sorted(RATE_SCHEDULES)), st.floats(0.01, 1e4), st.integers(0, 200), st.integers(0, 2**32 - 1))
def test_a_schedule_ascends_and_repeats_for_its_seed(name: str, rate: float, count: int, seed: int) -> None:
    schedule = RATE_SCHEDULES[name](rate)
    offsets = list(schedule.offsets_s(count, seed))
    assert len(offsets) == count
    assert offsets == sorted(offsets)
    assert all(offset >= 0 for offset in offsets)
    assert offsets == list(schedule.offsets_s(count, seed))


@pytest.mark.parametrize(("name", "variation"), [("constant", 0.0), ("poisson", 1.0), ("bursty", 4.0)])
def test_rate_and_burstiness_are_as_asked(name: str, variation: float) -> None:
    gaps = np.diff(RATE_SCHEDULES[name](50.0).offsets_s(40_000, 3))
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.1, abs=1e-6)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", sorted(RATE_SCHEDULES))
def test_an_impossible_rate_is_refused(name: str, rate: float) -> None:
    with pytest.raises(ValueError, match="rate"):
        RATE_SCHEDULES[name](rate).offsets_s(3, 0)


def test_other_settings_that_are_refused() -> None:
    with pytest.raises(ValueError, match="variation"):
        Bursty(1.0, 0.0).offsets_s(3, 0)
    with pytest.raises(ValueError, match="speed"):
        Replayed([1.0], 0.0).offsets_s(1, 0)


def test_a_replay_is_scaled_in_time() -> None:
    assert Replayed([0.0, 3.0, 9.0], 3.0).offsets_s(2, 0) == [0.0, 1.0]


async def test_an_open_loop_never_waits_for_an_answer() -> None:
    started: list[int] = []
    all_started = asyncio.Event()

    async def send(index: int, due: float | None) -> None:
        assert due is not None
        started.append(index)
        if len(started) == 5:
            all_started.set()
        await all_started.wait()  # nobody is answered until the last one was sent

    await drive_open([0.0, 0.001, 0.002, 0.003, 0.004], send, time.perf_counter())
    assert started == [0, 1, 2, 3, 4]


async def test_a_closed_loop_keeps_its_concurrency() -> None:
    under_way, most, done = 0, 0, []

    async def send(index: int, due: float | None) -> None:
        nonlocal under_way, most
        assert due is None
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        done.append(index)

    await drive_closed(10, 3, send)
    assert most == 3
    assert sorted(done) == list(range(10))
    with pytest.raises(ValueError, match="concurrency"):
        await drive_closed(1, 0, send)
