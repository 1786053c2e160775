"""A regular counter's steps are timed better than the looks at it; an irregular one's no worse."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.energy.samplers.step_clock import StepClock


def rms_ms(jitter_s, seed=3, period_s=0.1, until_s=60.0):
    """Errors of the clock, and of the looks' middles, after the first five seconds."""
    rng, clock = random.Random(seed), StepClock()
    errors, middles = [], []
    look_s, step_s = 0.0, 0.037
    while look_s < until_s:
        before_s, look_s = look_s, look_s + rng.uniform(0.04, 0.06)
        if step_s <= look_s:
            at_s, _ = clock.stepped(before_s, look_s)
            if step_s > 5:
                errors.append(at_s - step_s)
                middles.append((before_s + look_s) / 2 - step_s)
            step_s += period_s + rng.uniform(-jitter_s, jitter_s)
    return tuple(1000 * (sum(e * e for e in each) / len(each)) ** 0.5 for each in (errors, middles))


@pytest.mark.parametrize("period_s", [0.1, 0.0973, 0.25])
def test_a_regular_counter(period_s):
    clock_ms, middle_ms = rms_ms(0.0, period_s=period_s)
    assert clock_ms < 0.3 * middle_ms


def test_an_irregular_counter():
    clock_ms, middle_ms = rms_ms(0.03)
    assert clock_ms < 1.2 * middle_ms


@given(st.lists(st.tuples(st.floats(0.001, 1.0), st.floats(0.0, 1.0)), min_size=1, max_size=80))
def test_an_answer_is_never_far_from_the_looks(gaps):
    clock, at_s = StepClock(), 0.0
    for length_s, pause_s in gaps:
        after_s, until_s = at_s + pause_s, at_s + pause_s + length_s
        moment_s, blur_s = clock.stepped(after_s, until_s)
        assert after_s - 1e-9 <= moment_s <= until_s + 1e-9
        assert blur_s > 0
        at_s = until_s
