"""What is missing of the engines' reports is counted, and time is settled only where it is known."""

from hypothesis import given
from hypothesis import strategies as st

from app.energy.activity import ActivityBatch
from app.energy.sources import Sources


def batch(seq, through_s=0.0, source="s", idle=False, **others):
    return ActivityBatch("fp16", source, seq, through_s, idle, **others)


@given(st.permutations(range(8)), st.sets(st.integers(0, 7)))
def test_each_batch_counts_once_in_any_order(order, twice):
    sources = Sources(3.0)
    arrivals = [seq for seq in order for _ in range(2 if seq in twice else 1)]
    assert sum(sources.take(batch(seq), 1.0) for seq in arrivals) == 8
    assert sources.lost_reports == 0


def test_a_hole_is_a_lost_report_until_it_arrives():
    sources = Sources(3.0)
    for seq in (0, 1, 4):
        sources.take(batch(seq), 1.0)
    assert sources.lost_reports == 2
    sources.take(batch(2), 1.0)
    assert sources.lost_reports == 1


def test_known_time_is_the_slowest_engines():
    sources = Sources(3.0)
    sources.take(batch(0, 9.9, "a"), 10.0)
    sources.take(batch(0, 7.0, "b"), 10.0)
    assert sources.known_until(10.0) == 7.0
    sources.take(batch(1, 9.9, "b", idle=True), 10.0)
    assert sources.known_until(10.0) == 9.25


def test_a_silent_engine_holds_nothing_back_for_long():
    sources = Sources(3.0)
    sources.take(batch(0, 7.0), 7.0)
    assert sources.known_until(9.9) == 7.0
    assert sources.known_until(10.5) == 9.75


def test_an_engine_in_one_endless_step_is_not_waited_for_for_ever():
    sources = Sources(3.0)
    for seq in range(100):
        sources.take(batch(seq, 7.0), 7.0 + seq)
    assert sources.known_until(106.0) == 76.0


def test_a_gone_engine_is_retired_and_its_losses_stay_counted():
    sources = Sources(3.0)
    sources.take(batch(0, dropped_slices=5), 1.0)
    sources.take(batch(2, dropped_slices=7), 1.0)
    assert sources.residents("GPU-0", only_device=True) == {"fp16": None}
    assert list(sources.retire(100.0)) == ["s"]
    assert (sources.lost_reports, sources.dropped_slices) == (1, 7)
    assert sources.residents("GPU-0", only_device=True) == {}


def test_what_was_dropped_before_this_meter_began_is_counted():
    """It takes the first batch that it hears of for the beginning, so it sees no hole."""
    sources = Sources(3.0)
    sources.take(batch(500, dropped_batches=260), 1.0)
    sources.take(batch(501, dropped_batches=260), 1.0)
    sources.take(batch(500, dropped_batches=255), 1.0)
    sources.take(batch(0, source="other", dropped_batches=1), 1.0)
    assert (sources.lost_reports, sources.dropped_batches) == (0, 261)
    list(sources.retire(100.0))
    assert sources.dropped_batches == 261


def test_residents_are_those_of_the_device():
    sources = Sources(3.0)
    sources.take(batch(0, devices=("GPU-1",), resident_bytes=5), 1.0)
    assert sources.residents("GPU-0", only_device=False) == {}
    assert sources.residents("GPU-1", only_device=False) == {"fp16": 5}
    sources.take(batch(1, devices=("GPU-1",), resident=False), 1.0)
    assert sources.residents("GPU-1", only_device=False) == {}
