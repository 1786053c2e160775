import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.calibration_plan import Engine, Text
from loadgen.fitting import (
    EngineSamples,
    StreamEnergy,
    accepted_per_step,
    decode_energy,
    interference,
    modes_of_profile,
    rising,
    speculation_of,
    step_curve,
)

values = st.lists(st.floats(0, 1e6), min_size=1, max_size=20)


@given(values)
@settings(deadline=None)
def test_a_fitted_curve_never_falls_and_keeps_the_sum(measured: list[float]) -> None:
    fitted = rising(list(enumerate(measured, 1)))
    assert [x for x, _ in fitted] == list(range(1, len(measured) + 1))
    assert all(left <= right + 1e-6 for (_, left), (_, right) in pairwise(fitted))
    assert sum(y for _, y in fitted) == pytest.approx(sum(measured), rel=1e-9, abs=1e-6)
    assert [y for _, y in rising(fitted)] == pytest.approx([y for _, y in fitted])


@given(values)
@settings(deadline=None)
def test_what_rises_already_is_left_alone(measured: list[float]) -> None:
    points = list(enumerate(sorted(measured), 1))
    assert rising(points) == points


@given(st.integers(1, 64), st.integers(2, 200), st.integers(0, 5), st.integers(0, 10**6))
@settings(deadline=None)
def test_acceptance_is_recovered_from_counters(requests: int, steps: int, accepted: int, seed: int) -> None:
    per_step = [random.Random(f"{seed}/{step}").randint(0, accepted) for step in range(requests * steps)]
    generated = requests + len(per_step) + sum(per_step)
    assert accepted_per_step(generated, sum(per_step), requests) == pytest.approx(sum(per_step) / len(per_step))


def test_acceptance_of_no_step_is_unknown() -> None:
    assert accepted_per_step(1, 0, 1) is None


@given(st.floats(1, 50), st.floats(0.01, 1), st.floats(1, 100), st.floats(0, 5), st.floats(1, 3), st.integers(0, 99))
@settings(deadline=None)
def test_known_coefficients_are_recovered_through_outliers(
    fixed: float, per_token: float, step: float, growth: float, slowdown: float, seed: int
) -> None:
    rng = random.Random(seed)

    def noisy(value: float) -> list[float]:
        """Five rounds within 1 %, and one that something else disturbed."""
        return [value * rng.uniform(0.99, 1.01) for _ in range(5)] + [value * 10]

    def samples() -> EngineSamples:
        found = EngineSamples()
        found.prefill_ms = {tokens: noisy(fixed + per_token * tokens) for tokens in (64, 256, 1024)}
        found.step_ms = {Text.FREE: {batch: noisy(step + growth * batch) for batch in (1, 2, 4, 8)}}
        return found

    by_engine = {"a": samples(), "b": samples()}
    by_engine["a"].together_ms = {"b": noisy(slowdown * (step + growth))}
    modes = modes_of_profile([Engine("a", "a"), Engine("b", "b")], {"a": ["a", "a_prefix"], "b": ["b"]}, by_engine)
    assert modes["a"] == modes["a_prefix"]
    for tokens, prefill_ms in modes["a"]["prefill_ms"]:
        assert prefill_ms == pytest.approx(fixed + per_token * tokens, rel=0.02)
    for batch, step_ms in modes["b"]["step_ms"]:
        assert step_ms == pytest.approx(step + growth * batch, rel=0.02)
    assert interference(by_engine) == {"a": {"b": pytest.approx(slowdown, rel=0.03)}}


def test_an_engine_without_enough_points_is_left_out() -> None:
    short = EngineSamples(prefill_ms={64: [10.0]}, step_ms={Text.FREE: {1: [5.0]}})
    assert modes_of_profile([Engine("a", "a")], {"a": ["a"]}, {"a": short}) == {}


def test_decoding_is_charged_without_the_prefill() -> None:
    prefill_j = [(100, 1.0), (300, 3.0)]
    streams = {1: [StreamEnergy(200, 11, 2.0 + 10 * 0.5)], 4: [StreamEnergy(100, 1, 9.0)]}
    assert decode_energy(prefill_j, streams) == [(1, pytest.approx(0.5))]


@given(growth=st.floats(0.0, 1.0), accepted=st.floats(0.5, 5.0), step_ms=st.floats(1.0, 500.0))
def test_what_verifying_costs_is_recovered(growth: float, accepted: float, step_ms: float) -> None:
    generated = 100_000
    drafted = round(generated * accepted / (1.0 + accepted))
    samples = EngineSamples(
        step_ms={
            Text.FREE: {1: [step_ms], 8: [2 * step_ms]},
            Text.REWRITING: {batch: [times * step_ms * (1.0 + growth * accepted)] for batch, times in ((1, 1), (8, 2))},
        },
        generated={Text.FREE: generated, Text.REWRITING: generated},
        accepted={Text.FREE: 0, Text.REWRITING: drafted},
        requests={Text.FREE: 0, Text.REWRITING: 0},
    )
    assert step_curve(samples) == [(1, step_ms), (8, 2 * step_ms)]
    assert speculation_of(samples)["verification"] == pytest.approx(growth, abs=1e-3)
    del samples.step_ms[Text.FREE]
    assert [batch for batch, _ in step_curve(samples)] == [1, 8]
    assert speculation_of(samples)["verification"] == 0.0


def test_what_drafts_do_not_touch_is_measured_on_both_engines() -> None:
    def measured(scale: float, step_ms: float) -> EngineSamples:
        return EngineSamples(
            prefill_ms={64: [100 * scale], 512: [700 * scale]}, step_ms={Text.FREE: {1: [step_ms], 8: [2 * step_ms]}}
        )

    samples = {"fp16": measured(1.2, 60.0), "s": measured(1.0, 50.0), "other": measured(3.0, 40.0)}
    engines = [Engine("fp16", "fp16"), Engine("s", "s", True, plain="fp16"), Engine("other", "other")]
    modes = modes_of_profile(engines, {name: [name] for name in samples}, samples)
    assert modes["fp16"]["prefill_ms"] == modes["s"]["prefill_ms"] == [(64, pytest.approx(110)), (512, 770)]
    assert modes["s"]["step_ms"] == modes["fp16"]["step_ms"], "drafts make no step faster"
    assert modes["other"]["prefill_ms"] == [(64, pytest.approx(300)), (512, pytest.approx(2100))]
    samples["s"] = measured(1.0, 70.0)
    slower = modes_of_profile(engines, {name: [name] for name in samples}, samples)
    assert slower["s"]["step_ms"] == [(1, 70.0), (8, 140.0)]
