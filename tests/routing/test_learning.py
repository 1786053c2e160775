"""What is learned online: corrections, acceptance, conversations; and the settings they run under."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from app.routing.acceptance import AcceptanceLearner
from app.routing.conversations import Conversations
from app.routing.corrections import HIGHEST_FACTOR, LOWEST_FACTOR, Corrections, engine_correction
from app.routing.settings import RoutingSettings
from app.routing.tags import Tag


def test_corrections_learn_by_tag_and_lean_on_the_mode() -> None:
    corrections = Corrections()
    for _ in range(60):
        corrections.observe("speculative", Tag.REWRITING, 50.0, 100.0, 0.0)
        corrections.observe("speculative", Tag.NONE, 130.0, 100.0, 0.0)
    factors = corrections.factors
    assert factors["speculative:rewriting"] == pytest.approx(0.5, rel=0.12)
    assert factors["speculative:none"] == pytest.approx(1.3, rel=0.12)
    assert 0.5 < factors["speculative"] < 1.3
    assert "fp16" not in factors


def test_where_the_device_is_faster_than_profiled_engines_not_yet_tried_are_taken_to_be_so() -> None:
    corrections = Corrections()
    for _ in range(60):
        corrections.observe("fp16", Tag.NONE, 30.0, 100.0, 0.0)
        corrections.observe("speculative", Tag.NONE, 40.0, 100.0, 0.0)
    assert engine_correction(corrections.factors, "int8") == pytest.approx((0.3 * 0.4) ** 0.5, rel=0.2)
    # Its first request must not send it back to where it cannot be chosen.
    corrections.observe("int8", Tag.NONE, 30.0, 100.0, 0.0)
    assert engine_correction(corrections.factors, "int8") == pytest.approx(0.35, rel=0.2)


def test_a_slow_engine_says_nothing_of_the_others() -> None:
    corrections = Corrections()
    for _ in range(60):
        corrections.observe("gptq", Tag.NONE, 400.0, 100.0, 0.0)
    assert corrections.factors["gptq"] == pytest.approx(4.0, rel=0.2)
    assert engine_correction(corrections.factors, "int8") == 1.0


def test_how_engines_compare_is_kept_on_a_device_of_another_speed() -> None:
    corrections = Corrections()
    for _ in range(60):
        corrections.observe("fp16", Tag.NONE, 25.0, 100.0, 0.0)
        corrections.observe("int8", Tag.NONE, 50.0, 300.0, 0.0)
    factors = corrections.factors
    assert factors["int8"] / factors["fp16"] == pytest.approx((50 / 300) / (25 / 100), rel=0.1)


def test_one_odd_request_changes_little() -> None:
    corrections = Corrections()
    corrections.observe("fp16", Tag.NONE, 1e9, 1.0, 0.0)
    assert corrections.factors["fp16"] < 1.2


@given(st.lists(st.tuples(st.floats(allow_nan=True), st.floats(allow_nan=True), st.floats(-1e9, 1e9)), max_size=30))
def test_corrections_are_bounded_whatever_is_observed(samples: list[tuple[float, float, float]]) -> None:
    corrections = Corrections()
    for observed_ms, predicted_ms, now_s in samples:
        corrections.observe("m", Tag.NONE, observed_ms, predicted_ms, now_s)
    assert all(LOWEST_FACTOR * 0.999 <= factor <= HIGHEST_FACTOR * 1.001 for factor in corrections.factors.values())


def test_a_snapshots_corrections_do_not_change_under_it() -> None:
    corrections = Corrections()
    corrections.observe("m", Tag.NONE, 2.0, 1.0, 0.0)
    before = dict(held := corrections.factors)
    corrections.observe("m", Tag.NONE, 9.0, 1.0, 0.0)
    assert held == before


def test_acceptance_is_learned_by_tag() -> None:
    learner = AcceptanceLearner()
    for _ in range(10):
        learner.observe("speculative", Tag.REWRITING, 100, 70)
        learner.observe("speculative", Tag.NONE, 100, 3)
    assert learner.per_step["speculative:rewriting"] == pytest.approx(70 / 30)
    assert learner.per_step["speculative:none"] == pytest.approx(3 / 97)


@pytest.mark.parametrize(("output", "accepted"), [(0, 0), (10, 10), (10, 11), (10, -1), (-5, 0), (20, 5)])
def test_impossible_or_few_counts_state_nothing(output: int, accepted: int) -> None:
    learner = AcceptanceLearner()
    learner.observe("speculative", Tag.NONE, output, accepted)
    assert dict(learner.per_step) == {}


def test_conversations_are_remembered_up_to_a_limit() -> None:
    conversations = Conversations(limit=2)
    conversations.began("a", "fp16")
    conversations.began("b", "gptq")
    assert conversations.weights("a") == "fp16"
    conversations.began("c", "int8")
    assert conversations.weights("b") is None
    assert len(conversations) == 2


@pytest.mark.parametrize(
    "values",
    [
        {"kv_pressure": 1.5},
        {"exploration_rate": -0.1},
        {"batch_medium": 5},
        {"energy_weight": "much"},
        {"objective": "speed"},
        {"objective": "limit"},
        {"max_energy_ratio": 0},
        {"typo": 1},
    ],
)
def test_settings_out_of_range_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        RoutingSettings.model_validate(values)


def test_equal_settings_have_equal_versions() -> None:
    one = RoutingSettings(accepted_modes=frozenset({"gptq", "int8"}))
    assert one.version == RoutingSettings(accepted_modes=frozenset({"int8", "gptq"})).version
    assert one.version != RoutingSettings().version
    assert len({RoutingSettings(objective=name).version for name in ("latency", "energy", "weighted")}) == 3
