"""One device's track with a made-up sampler: breaks, late reports, CPU time."""

import pytest

from app.energy.activity import Slice, Work
from app.energy.attribution import Basis, TokenWeights
from app.energy.baseline import IdleBaseline
from app.energy.samplers.base import MeterInfo, Method, Point, Sample
from app.energy.track import Track


class Script:
    """A sampler that answers with prepared points, one a look."""

    period_s = 0.1
    info = MeterInfo("cpu", "made up", Method.MODELLED, "nothing")

    def __init__(self, *points):
        self._points = list(points)

    def sample(self, now_s):
        point, unbroken = self._points.pop(0)
        return Sample(now_s, point, unbroken)


def point(at_s, energy_j, unbroken=True, **cpu_s):
    return Point(at_s, energy_j, 0.001, cpu_s), unbroken


def piece(start_s, end_s, request="r"):
    return Slice(start_s, end_s, end_s - start_s, (Work(request, 0, 1),))


def track(*points, idle_w=None):
    made = Track(Script(*points), TokenWeights(0.1, 1.0), IdleBaseline(idle_w))
    for _ in points:
        made.look(0.0)
    return made


def test_processes_cpu_time_splits_what_overlaps():
    made = track(point(0, 0, A=0, B=0), point(1, 40, A=3, B=1), idle_w=0.0)
    made.add("A", [piece(0.1, 0.9)])
    made.add("B", [piece(0.1, 0.9)])
    (settlement,) = made.settle(2.0)
    assert settlement.basis is Basis.PROCESS_CPU
    assert {credit.engine: credit.energy_j for credit in settlement.credits} == {"A": 30, "B": 10}


def test_time_before_a_break_is_settled_and_the_gap_is_not():
    made = track(point(0, 0), point(1, 10), point(5, 90, unbroken=False), point(6, 100), idle_w=10.0)
    windows = [settlement.window for settlement in made.settle(10.0)]
    assert [(window.start_s, window.end_s, window.measured_j) for window in windows] == [(0, 1, 10), (5, 6, 10)]
    assert made.unmeasured_s == 4


def test_two_breaks_in_a_row():
    made = track(point(0, 0), point(2, 0, unbroken=False), point(3, 0, unbroken=False), point(4, 10), idle_w=10.0)
    (settlement,) = made.settle(10.0)
    assert settlement.window[:3] == (3, 4, 10)
    assert made.unmeasured_s == 3


def test_nothing_is_settled_before_it_is_known():
    made = track(point(0, 0), point(1, 10))
    assert made.settle(0.5) == []
    assert len(made.settle(2.0)) == 1


def test_a_late_report_is_counted():
    made = track(point(0, 0), point(1, 10))
    made.settle(2.0)
    made.add("A", [piece(0.5, 1.5)])
    assert made.late_busy_s == pytest.approx(0.5)


def test_a_new_meter_goes_on_where_the_counter_was():
    resumed = Track(Script(point(8, 180)), TokenWeights(0.1, 1.0), IdleBaseline(10.0), resume=Point(5, 100, 0.001))
    resumed.look(0.0)
    resumed.add("A", [piece(6, 7)])
    (settlement,) = resumed.settle(10.0)
    assert (settlement.window.measured_j, settlement.credited_j) == (80, 50)
    assert resumed.late_busy_s == 0


def test_a_counter_that_began_anew_meanwhile_is_a_break():
    resumed = Track(Script(point(8, 3), point(9, 13)), TokenWeights(0.1, 1.0), resume=Point(5, 100, 0.001))
    for _ in range(2):
        resumed.look(0.0)
    (settlement,) = resumed.settle(20.0)
    assert settlement.window[:3] == (8, 9, 10)
    assert resumed.unmeasured_s == 3
