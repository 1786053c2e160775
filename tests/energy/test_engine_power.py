"""Engines' powers, learned from sums."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.energy.engine_power import EnginePower


def test_alone_is_enough():
    power = EnginePower()
    power.observe({"A": 0.5}, 150)
    assert power.estimate(["A"]).watts["A"] == pytest.approx(300, rel=0.01)
    assert power.known_watts().keys() == {"A"}


def test_different_mixtures_tell_engines_apart():
    power, rng = EnginePower(), random.Random(1)
    for _ in range(200):
        busy = {"A": rng.uniform(0, 1), "B": rng.uniform(0, 1)}
        power.observe(busy, 300 * busy["A"] + 150 * busy["B"])
    assert power.estimate("AB").watts == {"A": pytest.approx(300, rel=0.01), "B": pytest.approx(150, rel=0.02)}
    assert power.estimate("AB").known == {"A", "B"}


def test_the_same_mixture_again_and_again_tells_nothing():
    power = EnginePower()
    for _ in range(200):
        power.observe({"A": 1.0, "B": 1.0}, 450)
    estimate = power.estimate("AB")
    assert estimate.known == frozenset()
    assert estimate.watts["A"] == pytest.approx(estimate.watts["B"], rel=0.01)


def test_a_profile_is_a_beginning_and_gives_way():
    power = EnginePower({"A": 100})
    assert power.known_watts() == {"A": pytest.approx(100)}
    for _ in range(20):
        power.observe({"A": 1.0}, 300)
    assert power.known_watts()["A"] == pytest.approx(300, rel=0.01)


def test_a_suggestion_does_not_outweigh_what_was_seen():
    power = EnginePower()
    power.observe({"A": 1.0}, 300)
    power.suggest({"A": 100, "B": 50})
    assert power.known_watts() == {"A": pytest.approx(300, rel=0.01), "B": pytest.approx(50)}
    power.observe({"B": 1.0}, 80)
    power.suggest({"A": 100, "B": 50})
    assert power.known_watts()["B"] == pytest.approx(80, rel=0.02)


@given(
    st.lists(st.tuples(st.dictionaries(st.sampled_from("ABC"), st.floats(0, 2)), st.floats(-100, 1000)), max_size=30)
)
def test_powers_are_never_negative_or_senseless(windows):
    power = EnginePower()
    for busy, joules in windows:
        power.observe(busy, joules)
    assert all(0 <= value < float("inf") for value in power.estimate("ABC").watts.values())
