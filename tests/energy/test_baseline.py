"""Idle power comes from idle time alone."""

import pytest

from app.energy.baseline import IdleBaseline


def observe(baseline, watts, from_s, until_s, step_s=0.1):
    for index in range(round((until_s - from_s) / step_s)):
        baseline.observe(from_s + index * step_s, from_s + (index + 1) * step_s, watts * step_s)


def test_unknown_until_a_second_was_seen():
    baseline = IdleBaseline()
    observe(baseline, 80, 0, 0.5)
    assert baseline.idle_w is None
    observe(baseline, 80, 0.5, 2)
    assert baseline.idle_w == pytest.approx(80)


def test_an_engine_that_loads_unreported_does_not_move_it():
    baseline = IdleBaseline()
    observe(baseline, 80, 0, 20)
    observe(baseline, 300, 20, 60)
    assert baseline.idle_w == pytest.approx(80)


def test_it_follows_when_engines_become_resident():
    baseline = IdleBaseline()
    observe(baseline, 60, 0, 100)
    observe(baseline, 95, 100, 250)
    assert baseline.idle_w == pytest.approx(95)


def test_right_after_activity_is_not_idle():
    baseline = IdleBaseline()
    baseline.active(10.0)
    observe(baseline, 200, 10.0, 10.5)
    observe(baseline, 80, 10.5, 13)
    assert baseline.idle_w == pytest.approx(80)


def test_a_carried_value_holds_until_it_is_renewed():
    baseline = IdleBaseline(75)
    assert baseline.idle_w == 75
    observe(baseline, 80, 0, 2)
    assert baseline.idle_w == pytest.approx(80)
