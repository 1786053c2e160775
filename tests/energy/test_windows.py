"""Time is cut where the blur of a counter's step does no harm."""

from hypothesis import given
from hypothesis import strategies as st

from app.energy.activity import Slice
from app.energy.attribution import Placed
from app.energy.samplers.base import Point
from app.energy.windows import active_at, cut, edges, reach_s, spans


def points(*moments_s):
    return [Point(at_s, 0.0, 0.025) for at_s in moments_s]


def active(*pieces):
    return spans(Placed(engine, Slice(start_s, end_s, None, ())) for engine, start_s, end_s in pieces)


def test_the_last_quiet_point_before_a_change_ends_a_window():
    assert cut(0.0, points(0.1, 0.2, 0.3), [0.25]) == 1
    assert cut(0.0, points(0.1, 0.2), []) == 1
    assert cut(0.0, points(*[0.1 * index for index in range(1, 12)]), []) == 4  # half a second is long enough


def test_after_a_change_the_first_quiet_point_ends_a_window():
    assert cut(0.0, points(0.1, 0.2, 0.3), [0.11]) == 1
    assert cut(0.0, points(0.1, 0.2), [0.11, 0.19]) is None


def test_without_a_quiet_one_the_farthest_from_any_change_does():
    moments = [0.1 * index for index in range(1, 22)]
    changes = sorted([at_s + 0.01 for at_s in moments if round(at_s, 1) != 0.7] + [0.68])
    assert cut(0.0, points(*moments), changes) == 6


def test_short_pauses_end_no_span():
    assert active(("A", 1.0, 1.5), ("A", 1.505, 2.0), ("B", 1.2, 1.3)) == {"A": [(1.0, 2.0)], "B": [(1.2, 1.3)]}
    assert edges(active(("A", 1.0, 1.5), ("B", 1.2, 1.3))) == [1.0, 1.2, 1.3, 1.5]


def test_who_is_active_around_a_moment():
    both = active(("A", 1.0, 2.0), ("B", 1.5, 3.0))
    assert active_at(1.2, 0.02, both) == {"A"}
    assert active_at(1.7, 0.02, both) == {"A", "B"}
    assert active_at(1.51, 0.02, both) is None
    assert active_at(5.0, 0.02, both) == set()


@given(st.lists(st.floats(0, 10), max_size=30), st.lists(st.floats(0.01, 10), min_size=1, max_size=40, unique=True))
def test_a_cut_is_quiet_or_the_window_was_too_long(changes, moments):
    changes.sort()
    candidates = points(*sorted(moments))
    index = cut(0.0, candidates, changes)
    if index is None:
        assert candidates[-1].at_s < 2.0
    elif candidates[-1].at_s < 2.0:
        at_s = candidates[index].at_s
        assert all(abs(at_s - change) > reach_s(candidates[index]) for change in changes)
