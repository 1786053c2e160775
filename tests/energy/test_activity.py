"""A recorder loses no token, says up to when it has told everything, and costs microseconds."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.energy.activity import ActivityRecorder, Labels, Work

LABELS = Labels("fp16", "default", "standard")


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def recorder(clock):
    return ActivityRecorder("fp16", clock=clock)


steps = st.tuples(st.floats(0.001, 0.2), st.floats(0, 0.1), st.integers(0, 512), st.integers(0, 8), st.booleans())


@given(st.lists(steps, max_size=60))
def test_tokens_and_busy_time_are_all_told(script):
    recorder, now_s = ActivityRecorder("fp16"), 0.0
    sent = [0, 0, 0.0]
    batches = []
    recorder.begin("r", LABELS)
    for length_s, pause_s, prefill, decode, take in script:
        recorder.step(now_s, now_s + length_s, [Work("r", prefill, decode)])
        now_s += length_s + pause_s
        sent = [sent[0] + prefill, sent[1] + decode, sent[2] + length_s]
        if take:
            batches.append(recorder.take())
    batches.append(recorder.take())
    slices = [piece for batch in batches for piece in batch.slices]
    assert sum(w.prefill_tokens for piece in slices for w in piece.work) == sent[0]
    assert sum(w.decode_tokens for piece in slices for w in piece.work) == sent[1]
    assert sum(piece.busy_s for piece in slices) == pytest.approx(sent[2])
    assert [batch.seq for batch in batches] == list(range(len(batches)))
    assert all(a.end_s <= b.start_s for a, b in pairwise(slices))
    assert all(batch.labels == {"r": LABELS} for batch in batches if any(piece.work for piece in batch.slices))


def test_a_step_begins_where_the_last_one_ended_or_where_work_came(recorder, clock):
    recorder.begin("r1", LABELS)
    for clock.now_s in (101.0, 102.5):
        recorder.stepped([Work("r1", 0, 1)])
    recorder.end("r1")
    first = recorder.take()
    clock.now_s = 110.0
    recorder.begin("r2", LABELS)
    clock.now_s = 110.25
    recorder.stepped([Work("r2", 10, 1)])
    assert [(p.start_s, p.end_s) for p in first.slices] == [(100.0, 101.0), (101.0, 102.5)]
    assert first.ended == ("r1",)
    assert first.idle
    (piece,) = recorder.take().slices
    assert (piece.start_s, piece.end_s, piece.busy_s) == (110.0, 110.25, pytest.approx(0.25))


def test_a_step_under_way_is_not_told_of_yet(recorder, clock):
    recorder.begin("r1", LABELS)
    clock.now_s = 103.0
    batch = recorder.take()
    assert (batch.idle, batch.through_s) == (False, 100.0)


def test_an_idle_recorder_has_no_news(recorder, clock):
    assert recorder.take_news() is not None  # that it is resident
    assert recorder.take_news() is None
    recorder.resident = False
    assert recorder.take_news().resident is False
    assert recorder.take_news() is None


def test_what_has_no_room_is_counted(clock):
    recorder = ActivityRecorder("fp16", capacity=2, clock=clock)
    for index in range(5):
        recorder.step(index, index + 0.5)
    batch = recorder.take()
    assert (len(batch.slices), batch.dropped_slices) == (2, 3)
