from collections.abc import Callable
from typing import Any

import pytest

from app.routing.classes import BatchPressure, output_shape, prefill_score, prompt_shape
from app.routing.decision import Decision, Ineligible, LostBy, Refusal
from app.routing.features import Quality, RequestFeatures, Wishes
from app.routing.mode_info import ModeInfo
from app.routing.policies.rules import PUBLISHED_TARGETS, RULES, RULES_PUBLISHED, RulesPolicy
from app.routing.profile import Profile
from app.routing.settings import RoutingSettings
from app.routing.snapshot import Snapshot
from app.routing.tags import Tag

Make = Callable[..., Any]


def shaped(prompt_tokens: int, output_tokens: int, **more: Any) -> RequestFeatures:
    return RequestFeatures(
        prompt_tokens=prompt_tokens,
        expected_output_tokens=output_tokens,
        prompt_shape=prompt_shape(prompt_tokens),
        output_shape=output_shape(output_tokens),
        prefill_score=prefill_score(prompt_tokens, output_tokens, bool(more.get("memory_pressure"))),
        **more,
    )


CASES = [
    (shaped(128, 32, batch_pressure=BatchPressure.HIGH, shared_prefix=True), "int8_continuous_batching", None),
    (shaped(1024, 128, shared_prefix=True, memory_pressure=True), "gptq_prefix_caching", None),
    (shaped(2048, 128, memory_pressure=True, tag=Tag.MULTIPLE_CHOICE), "gptq", None),
    (shaped(512, 8, tag=Tag.MULTIPLE_CHOICE), "int8", None),
    (shaped(512, 300, tag=Tag.BENCHMARK), "int8", None),
    (shaped(512, 159, tag=Tag.MATHEMATICS), "speculative", None),
    (shaped(128, 32), "gptq", "speculative"),
    (shaped(1024, 32), "gptq", "int8"),
    (shaped(1024, 128), "gptq", "speculative"),
    (shaped(128, 128), "speculative", "speculative"),
    (shaped(512, 128), "speculative", None),
    (shaped(512, 8), "int8", None),
    (shaped(512, 100), "int8", None),
    (shaped(128, 100), "int8", None),
]


@pytest.mark.parametrize(("request_", "mode", "published"), CASES)
def test_the_papers_table(
    request_: RequestFeatures,
    mode: str,
    published: str | None,
    modes: tuple[ModeInfo, ...],
    profile: Profile,
    snapshot: Make,
) -> None:
    for name, rules, wanted in (("rules", RULES, mode), ("rules_published", RULES_PUBLISHED, published or mode)):
        outcome = RulesPolicy(name, rules, modes, RoutingSettings(), profile).decide(request_, snapshot())
        assert isinstance(outcome, Decision)
        assert (outcome.mode, outcome.policy) == (wanted, name)
        assert outcome.rule is not None
        assert outcome.rule in outcome.reason


def test_the_last_rule_matches_everything_and_the_variants_differ_in_four_targets() -> None:
    assert RULES[-1].applies(shaped(0, 0))
    assert {rule.name for rule in RULES} >= set(PUBLISHED_TARGETS)
    assert [rule[:2] for rule in RULES] == [rule[:2] for rule in RULES_PUBLISHED]


def test_the_later_rule_is_the_runner_up(modes: tuple[ModeInfo, ...], profile: Profile, snapshot: Make) -> None:
    policy = RulesPolicy("rules", RULES, modes, RoutingSettings(), profile)
    outcome = policy.decide(shaped(128, 128, tag=Tag.MULTIPLE_CHOICE), snapshot())
    assert isinstance(outcome, Decision)
    assert (outcome.mode, outcome.runner_up, outcome.lost_by) == ("int8", "speculative", LostBy.LATER_RULE)


@pytest.mark.parametrize(
    ("broken", "mode"),
    [
        ({"gptq": {"healthy": False}}, "int8"),
        ({"gptq": {"healthy": False}, "int8": {"in_flight": 999}}, "fp16"),
        ({"gptq": {"healthy": False}, "int8": {"healthy": False}, "fp16": {"healthy": False}}, "speculative"),
    ],
)
def test_when_a_rules_mode_cannot_serve_the_next_does(
    modes: tuple[ModeInfo, ...], profile: Profile, snapshot: Make, broken: dict[str, Any], mode: str
) -> None:
    outcome = RulesPolicy("rules", RULES, modes, RoutingSettings(), profile).decide(shaped(128, 32), snapshot(**broken))
    assert isinstance(outcome, Decision)
    assert outcome.mode == mode


def test_a_refusal_names_every_mode(modes: tuple[ModeInfo, ...], profile: Profile) -> None:
    outcome = RulesPolicy("rules", RULES, modes, RoutingSettings(), profile).decide(shaped(128, 32), Snapshot())
    assert isinstance(outcome, Refusal)
    assert outcome.by_mode == {mode.name: Ineligible.UNHEALTHY for mode in modes}


def test_exact_is_kept(modes: tuple[ModeInfo, ...], profile: Profile, snapshot: Make) -> None:
    asked = shaped(128, 32, wishes=Wishes(quality=Quality.EXACT))
    outcome = RulesPolicy("rules", RULES, modes, RoutingSettings(), profile).decide(asked, snapshot())
    assert isinstance(outcome, Decision)
    assert outcome.mode == "fp16"
