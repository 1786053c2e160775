from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from app.routing.decision import Decision, Ineligible, Refusal
from app.routing.features import Quality, RequestFeatures, Wishes
from app.routing.mode_info import ModeInfo
from app.routing.policies import make_policy
from app.routing.policies.learned import FEATURE_NAMES, PredictorRefused, feature_vector
from app.routing.policies.static import StaticPolicy
from app.routing.profile import Profile
from app.routing.settings import RoutingSettings
from app.routing.shadow import Shadow, evaluate
from app.routing.snapshot import Snapshot
from app.routing.tags import Tag

Make = Callable[..., Any]


@dataclass(frozen=True)
class Trained:
    answers: tuple[float, ...] = (3.0, 1.0, 2.0)
    version: str = "tree 1"
    model: str = "tiny"
    hardware: str = "box"
    feature_names: tuple[str, ...] = FEATURE_NAMES
    modes: tuple[str, ...] = ("fp16", "gptq", "int8")

    def scores(self, row: Sequence[float]) -> Sequence[float]:
        assert len(row) == len(self.feature_names)
        return self.answers


def learned(modes: tuple[ModeInfo, ...], profile: Profile, trained: Trained) -> Any:
    return make_policy("learned", modes, RoutingSettings(), profile, trained, model="tiny", hardware="box")


def test_learned_takes_the_best_eligible_score(
    modes: tuple[ModeInfo, ...], profile: Profile, features: Make, snapshot: Make
) -> None:
    policy = learned(modes, profile, Trained())
    made = policy.decide(features(), snapshot())
    assert (made.mode, made.runner_up, made.policy, made.profile_version) == ("gptq", "int8", "learned", "tree 1")
    assert policy.decide(features(), snapshot(gptq={"healthy": False})).mode == "int8"
    assert policy.decide(features(wishes=Wishes(quality=Quality.EXACT)), snapshot()).mode == "fp16"
    assert isinstance(policy.decide(features(), Snapshot()), Refusal)


def test_learned_leaves_to_the_rules_what_it_does_not_know(
    modes: tuple[ModeInfo, ...], profile: Profile, features: Make, snapshot: Make
) -> None:
    nan = float("nan")
    made = learned(modes, profile, Trained((nan, nan, nan))).decide(features(), snapshot())
    assert (made.policy, made.stands_in_for) == ("rules", "learned")
    assert learned(modes, profile, Trained((nan, 1.0, nan))).decide(features(), snapshot()).mode == "gptq"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"feature_names": ("prompt_tokens", "moon_phase")}, "moon_phase"),
        ({"feature_names": FEATURE_NAMES[::-1]}, "their order"),
        ({"modes": ("fp16", "int3")}, "int3"),
        ({"model": "large"}, "model 'large'"),
        ({"hardware": "H100"}, "hardware 'H100'"),
    ],
)
def test_a_predictor_for_something_else_is_refused(
    modes: tuple[ModeInfo, ...], profile: Profile, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(PredictorRefused, match=words):
        learned(modes, profile, replace(Trained(), **change))


def test_the_feature_vector_has_the_named_values(features: Make) -> None:
    row = dict(zip(FEATURE_NAMES, feature_vector(features(tag=Tag.CODE, prompt_tokens=50)), strict=True))
    assert row["prompt_tokens"] == 50.0
    assert row["tag_code"] == 1.0
    assert row["tag_rewriting"] == 0.0


def test_static_stays_with_its_mode_whatever_its_quality(
    modes: tuple[ModeInfo, ...], features: Make, snapshot: Make
) -> None:
    made = make_policy("static:gptq", modes, RoutingSettings()).decide(features(), snapshot())
    assert isinstance(made, Decision)
    assert (made.mode, made.policy) == ("gptq", "static:gptq")


def test_an_operators_static_mode_falls_back_and_a_requests_does_not(
    modes: tuple[ModeInfo, ...], features: Make, snapshot: Make
) -> None:
    down = snapshot(gptq={"healthy": False})
    made = StaticPolicy("gptq", modes, RoutingSettings()).decide(features(), down)
    assert isinstance(made, Decision)
    assert made.mode == "fp16"
    refused = StaticPolicy("gptq", modes, RoutingSettings(), fall_back=False).decide(features(), down)
    assert isinstance(refused, Refusal)
    assert refused.code is Ineligible.UNHEALTHY
    exact = features(wishes=Wishes(quality=Quality.EXACT))
    lossy = StaticPolicy("gptq", modes, RoutingSettings(), fall_back=False).decide(exact, snapshot())
    assert isinstance(lossy, Refusal)
    assert lossy.code is Ineligible.NOT_LOSSLESS


@pytest.mark.parametrize("name", ["", "best", "static:", "static:int3", "learned", "COST"])
def test_an_unknown_policy_is_refused_with_what_there_is(modes: tuple[ModeInfo, ...], name: str) -> None:
    with pytest.raises(ValueError, match=r"there are|needs a trained model"):
        make_policy(name, modes, RoutingSettings())


class Broken:
    name = "broken"

    def decide(self, features: RequestFeatures, snapshot: Snapshot) -> Decision:
        raise ZeroDivisionError("no")


class Wordy:
    name = "wordy"

    def decide(self, features: RequestFeatures, snapshot: Snapshot) -> Decision:
        raise ValueError("what somebody asked, " * 1000)


def test_shadows_are_compared_and_one_that_fails_disturbs_nothing(
    modes: tuple[ModeInfo, ...], profile: Profile, features: Make, snapshot: Make
) -> None:
    asked, live = features(), snapshot()
    cost = make_policy("cost", modes, RoutingSettings(), profile)
    rules = make_policy("rules", modes, RoutingSettings(), profile)
    seen = evaluate([rules, cost, Broken(), Wordy()], cost.decide(asked, live), asked, live)
    assert [shadow.policy for shadow in seen] == ["rules", "cost", "broken", "wordy"]
    assert seen[1].agrees
    assert seen[1].latency_ms
    assert seen[2].error == "ZeroDivisionError: no"
    # The ledger refuses a row with a long text.
    assert seen[3].error is not None
    assert seen[3].error.startswith("ValueError: what")
    assert len(seen[3].error) < 300
    assert Shadow.from_json(seen[1].to_json()) == seen[1]
