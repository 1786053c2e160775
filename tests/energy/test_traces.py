"""Accuracy on scripted power traces: the true joules come from the schedule, and attribution never sees them."""

import itertools
import random

import pytest

from tests.energy.nvml_stub.stub_library import Function
from tests.energy.schedules import Burst, credited, errors, play, true_joules, worst_residual

UNTIL_S = 66.0
_RESIDUAL = 0.01


def jitter(seed=7):
    """Looks come 40 to 60 ms after one another, as the meter's own dither makes them."""
    rng = random.Random(seed)
    late_s = list(itertools.accumulate((rng.uniform(-0.01, 0.01) for _ in range(2000)), initial=0.0))
    return lambda tick: late_s[tick]


def repeated(engine, start_s, on_s, off_s, watts, until_s=63.0, rng=None):
    bursts, at_s = [], start_s
    while at_s + on_s < until_s:
        length_s = rng.uniform(0.5 * on_s, 1.5 * on_s) if rng else on_s
        bursts.append(Burst(engine, at_s, at_s + length_s, watts))
        at_s += length_s + (rng.uniform(0.5 * off_s, 1.5 * off_s) if rng else off_s)
    return bursts


def alternating(lengths, watts_a, watts_b, until_s=63.0):
    bursts, at_s = [], 3.0
    while at_s < until_s:
        for engine, watts in (("A", watts_a), ("B", watts_b)):
            length_s = next(lengths)
            bursts.append(Burst(engine, at_s, at_s + length_s, watts))
            at_s += length_s
    return bursts


def rng(seed=1):
    return random.Random(seed)


@pytest.fixture(params=["counter", "counter_and_instant"])
def prepare(request, stub):
    """Devices with a counter that steps at moments of its own; some offer instant power as well."""

    def set_up(device):
        stub.support(device, Function.INSTANT, request.param == "counter_and_instant")
        stub.counter(device, 0.1, 0.037)

    return set_up


ONE_ENGINE = {
    "steady": [Burst("A", 3, 63, 250)],
    "idle_gaps": repeated("A", 3, 2, 1.3, 250, rng=rng()),
    "varying_power": [Burst("A", 3 + i, 4 + i, 150 + 100 * (i % 4)) for i in range(60)],
}


@pytest.mark.parametrize("schedule", ONE_ENGINE)
def test_one_active_engine_within_2_percent(stub, prepare, schedule):
    bursts = ONE_ENGINE[schedule]
    _, settlements, events = play(stub, bursts, UNTIL_S, jitter=jitter(), prepare=prepare)
    assert abs(errors(bursts, settlements)["A"]) <= 0.02
    assert worst_residual(settlements) <= _RESIDUAL
    assert not events


OVERLAPPING = {
    "twice_the_power": repeated("A", 3, 3, 1, 300, rng=rng(1)) + repeated("B", 3.5, 4, 1.5, 150, rng=rng(2)),
    "equal_power": repeated("A", 3, 3, 1, 200, rng=rng(3)) + repeated("B", 3.5, 4, 1.5, 200, rng=rng(4)),
    "long_and_short": repeated("A", 3, 12, 2, 180) + repeated("B", 4, 0.7, 1.1, 360),
}


@pytest.mark.parametrize("schedule", OVERLAPPING)
def test_two_overlapping_engines_within_5_percent(stub, prepare, schedule):
    bursts = OVERLAPPING[schedule]
    _, settlements, _ = play(stub, bursts, UNTIL_S, jitter=jitter(), prepare=prepare)
    assert {engine: error for engine, error in errors(bursts, settlements).items() if abs(error) > 0.05} == {}
    assert worst_residual(settlements) <= _RESIDUAL


def test_two_engines_on_a_device_that_saturates(stub, prepare):
    """Their powers do not add up when both run: the shares still follow what each draws alone, within 10 %."""
    bursts = OVERLAPPING["twice_the_power"]
    _, settlements, _ = play(stub, bursts, UNTIL_S, jitter=jitter(), prepare=prepare, cap_w=350)
    assert {e: error for e, error in errors(bursts, settlements, cap_w=350).items() if abs(error) > 0.10} == {}
    assert worst_residual(settlements) <= _RESIDUAL


BURSTS = {
    "sparse": repeated("A", 3, 0.05, 0.4, 250),
    "dense": repeated("A", 3, 0.05, 0.08, 250),
    "two_engines": repeated("A", 3, 0.05, 0.4, 300) + repeated("B", 3.2, 0.05, 0.33, 150),
}


@pytest.mark.parametrize("schedule", BURSTS)
def test_bursts_of_50_ms_within_10_percent(stub, prepare, schedule):
    bursts = BURSTS[schedule]
    _, settlements, _ = play(stub, bursts, UNTIL_S, jitter=jitter(), prepare=prepare)
    assert {engine: error for engine, error in errors(bursts, settlements).items() if abs(error) > 0.10} == {}
    assert worst_residual(settlements) <= _RESIDUAL


SHORT = {
    "sparse": repeated("A", 3, 0.02, 0.4, 250),
    "dense": repeated("A", 3, 0.02, 0.05, 250),
    "two_engines": repeated("A", 3, 0.02, 0.4, 300) + repeated("B", 3.2, 0.02, 0.33, 150),
}


@pytest.mark.parametrize("schedule", SHORT)
def test_bursts_of_20_ms_between_looks_every_50_ms_within_10_percent(stub, prepare, schedule):
    bursts = SHORT[schedule]
    _, settlements, _ = play(stub, bursts, UNTIL_S, jitter=jitter(), prepare=prepare)
    assert {engine: error for engine, error in errors(bursts, settlements).items() if abs(error) > 0.10} == {}
    assert worst_residual(settlements) <= _RESIDUAL


def test_instant_power_tells_engines_apart_that_alternate_within_a_counter_step(stub):
    random_lengths = rng(5)
    bursts = alternating(iter(lambda: random_lengths.uniform(0.03, 0.1), None), 300, 150)
    prepare = lambda device: stub.counter(device, 0.1, 0.037)  # noqa: E731
    _, settlements, _ = play(stub, bursts, UNTIL_S, jitter=jitter(), prepare=prepare)
    assert {engine: error for engine, error in errors(bursts, settlements).items() if abs(error) > 0.05} == {}


def test_engines_that_were_never_apart_are_split_alike_and_flagged(stub, prepare):
    """Nothing measured can tell them apart. The sum is right, and the split says that it is approximate."""
    bursts = [Burst("A", 3, 63, 300), Burst("B", 3, 63, 150)]
    _, settlements, _ = play(stub, bursts, UNTIL_S, jitter=jitter(), prepare=prepare)
    assert {s.basis.value for s in settlements if s.credits} == {"busy_time"}
    assert sum(credited(settlements).values()) == pytest.approx(sum(true_joules(bursts).values()), rel=0.01)


def test_power_from_a_profile_tells_them_apart(stub, prepare):
    bursts = [Burst("A", 3, 63, 300), Burst("B", 3, 63, 150)]
    watts = {"A": 290.0, "B": 148.0}
    _, settlements, _ = play(stub, bursts, UNTIL_S, jitter=jitter(), prepare=prepare, engine_watts=watts)
    assert {engine: error for engine, error in errors(bursts, settlements).items() if abs(error) > 0.05} == {}


@pytest.mark.parametrize("instant", [False, True])
def test_without_a_counter_power_is_integrated(stub, instant):
    def prepare(device):
        stub.support(device, Function.COUNTER, False)
        stub.support(device, Function.INSTANT, instant)

    bursts = ONE_ENGINE["idle_gaps"]
    track, settlements, _ = play(stub, bursts, UNTIL_S, jitter=jitter(), prepare=prepare)
    assert track.sampler.info.method.value == "nvml_power"
    assert abs(errors(bursts, settlements)["A"]) <= 0.02
    assert worst_residual(settlements) <= _RESIDUAL


def test_an_idle_device_has_no_residual(stub, prepare):
    _, settlements, _ = play(stub, [], UNTIL_S, jitter=jitter(), prepare=prepare)
    assert credited(settlements) == {}
    assert worst_residual(settlements) <= _RESIDUAL


def test_unreported_work_is_residual(stub, prepare):
    """Someone else's 200 W show up as residual, not as idle and not on an engine."""
    known = repeated("A", 3, 1, 4, 250, until_s=30)
    foreign = [Burst("stranger", 35, 45, 200)]
    _, settlements, _ = play(stub, known + foreign, UNTIL_S, jitter=jitter(), prepare=prepare, unreported="stranger")
    residual_j = sum(s.residual_j for s in settlements if 34 < s.window.end_s < 46)
    assert residual_j == pytest.approx(2000, rel=0.02)
    assert abs(credited(settlements)["A"] / true_joules(known)["A"] - 1) <= 0.02
