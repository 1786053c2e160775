"""A heavy load goes to one engine; a light one, and one that engines share without loss, is spread as before."""

from collections.abc import Callable
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.routing.coefficients import ModeCoefficients, compile_profile
from app.routing.decision import Decision, LostBy
from app.routing.features import Objective, RequestFeatures, Wishes
from app.routing.mode_info import ModeInfo
from app.routing.policies.consolidation import usual_request
from app.routing.policies.cost import CostPolicy
from app.routing.policies.static import StaticPolicy
from app.routing.profile import Profile
from app.routing.settings import RoutingSettings
from app.routing.snapshot import EngineView, Snapshot
from app.routing.tags import Tag
from loadgen.routing_simulation import SimulatedRequest, simulate
from tests.routing.profiles import profile_of

Make = Callable[..., Any]
MODES = (ModeInfo("fp16", "fp16", "fp16", lossless=True), ModeInfo("gptq", "gptq", "gptq", lossless=False))
SETTINGS = {"accepted_modes": frozenset({"gptq"})}


def profile(slowdown: float) -> Profile:
    """A mode that reads fast and one that steps fast, as on a CPU without 16-bit arithmetic."""
    return profile_of(
        {
            "fp16": {"prefill_ms": [[64, 280], [512, 1750]], "step_ms": [[1, 62], [8, 210]]},
            "gptq": {"prefill_ms": [[64, 480], [512, 3300]], "step_ms": [[1, 54], [8, 140]]},
        },
        interference={"fp16": {"gptq": slowdown}, "gptq": {"fp16": slowdown}},
    )


def busy(snapshot: Make, fp16: int, gptq: int, arrivals_per_s: float = 0.0) -> Any:
    def view(requests: int) -> dict[str, int]:
        return {"in_flight": requests, "max_running": 64, "pending_output_tokens": 60 * requests}

    lately = {"mean_prompt_tokens": 80.0, "mean_output_tokens": 80.0, "arrivals_per_s": arrivals_per_s}
    return snapshot(lately, fp16=view(fp16), gptq=view(gptq))


def decide(slowdown: float, features: Any, snapshot: Any, **settings: Any) -> Decision:
    outcome = CostPolicy(MODES, RoutingSettings(**SETTINGS, **settings), profile(slowdown)).decide(features, snapshot)
    assert isinstance(outcome, Decision)
    return outcome


def test_engines_that_hinder_each_other_are_not_both_kept_busy(features: Make, snapshot: Make) -> None:
    asked = features(prompt_tokens=300, expected_output_tokens=5, batch_size=15)
    load = busy(snapshot, fp16=4, gptq=10, arrivals_per_s=1.0)
    alone = decide(2.4, asked, load, consolidate_from=100)
    together = decide(2.4, asked, load)
    assert (alone.engine, together.engine) == ("fp16", "gptq")
    assert (together.runner_up, together.lost_by) == ("fp16", LostBy.CONSOLIDATION)
    assert "all work on one engine" in together.reason


def test_exploration_reaches_the_other_engine_too(features: Make, snapshot: Make) -> None:
    load = busy(snapshot, fp16=4, gptq=10, arrivals_per_s=1.0)

    def drawn(draw: float) -> Decision:
        asked = features(prompt_tokens=300, expected_output_tokens=5, batch_size=15, draw=draw)
        return decide(2.4, asked, load, exploration_rate=0.1)

    explored = [drawn(number / 100) for number in range(10)]
    assert [made.engine for made in explored] == 5 * ["fp16"] + 5 * ["gptq"]
    assert {(made.explored, made.lost_by) for made in explored} == {(True, LostBy.EXPLORATION)}
    assert (drawn(0.1).engine, drawn(0.1).lost_by) == ("gptq", LostBy.CONSOLIDATION)


def test_engines_that_do_not_hinder_each_other_stay_busy(features: Make, snapshot: Make) -> None:
    asked = features(prompt_tokens=300, expected_output_tokens=5, batch_size=15)
    assert decide(1.0, asked, busy(snapshot, fp16=4, gptq=10, arrivals_per_s=1.0)).engine == "fp16"


def test_a_light_load_is_not_put_together(features: Make, snapshot: Make) -> None:
    asked = features(prompt_tokens=300, expected_output_tokens=5, batch_size=3)
    few = busy(snapshot, fp16=1, gptq=1)
    assert decide(2.4, asked, few, consolidate_from=3).lost_by is not LostBy.CONSOLIDATION
    assert decide(1.3, asked, few).lost_by is not LostBy.CONSOLIDATION, "the engines share the device with little loss"
    alone = features(prompt_tokens=300, expected_output_tokens=5)
    assert decide(2.4, alone, busy(snapshot, fp16=0, gptq=0)).lost_by is not LostBy.CONSOLIDATION


@pytest.mark.parametrize(
    ("slowdown", "arrivals_per_s", "begins"),
    [(2.4, 0.0, "fp16"), (2.4, 1.0, "gptq"), (1.0, 1.0, "fp16")],
    ids=["nobody comes", "company is expected", "company would not be in the way"],
)
def test_an_idle_device_begins_where_the_company_is_served_best(
    features: Make, snapshot: Make, slowdown: float, arrivals_per_s: float, begins: str
) -> None:
    asked = features(prompt_tokens=300, expected_output_tokens=5)
    lately = {"mean_prompt_tokens": 80.0, "mean_output_tokens": 80.0, "arrivals_per_s": arrivals_per_s}
    decision = decide(slowdown, asked, snapshot(lately, fp16={}, gptq={}))
    assert decision.engine == begins
    assert (decision.lost_by is LostBy.CONSOLIDATION) == (begins == "gptq")


@pytest.mark.parametrize("objective", [Objective.ENERGY, Objective.WEIGHTED])
def test_other_objectives_are_left_alone(features: Make, snapshot: Make, objective: Objective) -> None:
    asked = features(prompt_tokens=300, expected_output_tokens=5, batch_size=15, wishes=Wishes(objective=objective))
    assert decide(2.4, asked, busy(snapshot, fp16=4, gptq=10)).lost_by is not LostBy.CONSOLIDATION


@pytest.mark.parametrize("gap_s", [0.4, 0.7, 1.2])
def test_a_saturated_device_serves_as_with_the_best_single_mode(features: Make, gap_s: float) -> None:
    shapes = [(300, 4), (40, 80), (120, 30), (20, 60)]
    asked = [features(prompt_tokens=prompt, expected_output_tokens=output) for prompt, output in shapes * 25]
    requests = [SimulatedRequest(due_s=gap_s * place, features=one) for place, one in enumerate(asked)]
    known = profile(2.4)
    coefficients = compile_profile(known, MODES)

    def mean_ms(policy: Any) -> float:
        served = simulate(requests, policy, coefficients, known.interference)
        return fmean(one.latency_ms for one in served if one.latency_ms is not None)

    fixed = RoutingSettings(**SETTINGS)
    best_ms = min(mean_ms(StaticPolicy(mode.name, MODES, fixed, fall_back=False)) for mode in MODES)
    assert mean_ms(CostPolicy(MODES, fixed, known)) < 1.01 * best_ms


SPECULATIVE = ModeInfo("speculative", "speculative", "fp16", lossless=True, speculative=True)


def coefficients(**accepted: float) -> ModeCoefficients:
    """A speculative mode whose steps take 20 ms, and whose prompts take no time worth speaking of."""
    default = accepted.pop("default", 0.0)
    found = profile_of(
        {
            "speculative": {
                "prefill_ms": [[1, 0.0], [2, 0.0]],
                "step_ms": [[1, 20.0], [2, 20.0]],
                "speculation": {"accepted_per_step": accepted, "default": default},
            }
        }
    )
    return compile_profile(found, [SPECULATIVE])["speculative"]


def live(shares: dict[str, float], **more: Any) -> Snapshot:
    return Snapshot(mean_prompt_tokens=80.0, mean_output_tokens=80.0, mean_output_shares=shares, **more)


def view(**more: Any) -> EngineView:
    return EngineView(engine="speculative", **more)


def steps(known: ModeCoefficients, engine: EngineView, snapshot: Snapshot) -> float:
    """Decode steps of a usual request, with the corrections of the engine."""
    return usual_request(known, engine, snapshot).steps


accepted_tokens = st.floats(0, 8)


@given(accepted_tokens)
def test_text_that_speculation_foresees_takes_as_many_steps_fewer(accepted: float) -> None:
    known = coefficients(rewriting=accepted)
    rewriting = steps(known, view(), live({"rewriting": 1.0}))
    assert steps(known, view(), live({"none": 1.0})) == pytest.approx(rewriting * (1 + accepted))


@given(st.floats(0, 1), accepted_tokens)
def test_a_mixture_takes_the_steps_of_its_parts(share: float, accepted: float) -> None:
    known = coefficients(rewriting=accepted)
    pure = [steps(known, view(), live({tag: 1.0})) for tag in ("rewriting", "none")]
    mixed = steps(known, view(), live({"rewriting": share, "none": 1.0 - share}))
    assert mixed == pytest.approx(share * pure[0] + (1.0 - share) * pure[1])


@given(accepted_tokens)
def test_an_unknown_mixture_takes_the_default_acceptance(default: float) -> None:
    known = coefficients(rewriting=5.0, default=default)
    assert steps(known, view(accepted_per_step=3.0), live({})) == pytest.approx(80 / (1 + default))


@pytest.mark.parametrize(
    ("learned", "profiled", "age_s", "per_token"),
    [
        ({"speculative:rewriting": 3.0}, {"rewriting": 2.0, "default": 0.5}, 0.0, 1 / 4),
        ({}, {"rewriting": 2.0, "default": 0.5}, 0.0, 1 / 3),
        ({}, {"default": 0.5}, 0.0, 1 / 2),
        ({}, {"default": 0.5}, 60.0, 1 / 1.5),
    ],
)
def test_what_is_known_best_of_a_tag_counts(
    learned: dict[str, float], profiled: dict[str, float], age_s: float, per_token: float
) -> None:
    known, shares = coefficients(**profiled), {"rewriting": 1.0}
    engine = view(accepted_per_step=1.0, age_s=age_s)
    assert steps(known, engine, live(shares, accepted_per_step=learned)) == pytest.approx(80 * per_token)


@given(st.floats(0.4, 2.5), st.floats(0.4, 2.5))
def test_a_time_is_corrected_as_the_engine_and_the_tag_are(engine: float, tag: float) -> None:
    known = coefficients()
    corrections = {"speculative": engine, "speculative:code": tag, "other": 9.0}
    plain = steps(known, view(), live({"none": 1.0}))
    for shares, factor in (({"none": 1.0}, engine), ({"code": 1.0}, tag), ({}, engine)):
        found = steps(known, view(), live(shares, corrections=corrections))
        assert found == pytest.approx(plain * factor)


@pytest.mark.parametrize(("tag", "engine"), [(Tag.REWRITING, "speculative"), (Tag.NONE, "fp16")])
def test_the_engine_for_all_is_the_one_that_suits_their_text(tag: Tag, engine: str) -> None:
    modes = (MODES[0], SPECULATIVE)
    content = {
        "fp16": {"prefill_ms": [[64, 60], [512, 500]], "step_ms": [[1, 50], [8, 80]]},
        "speculative": {
            "prefill_ms": [[64, 60], [512, 500]],
            "step_ms": [[1, 55], [8, 160]],
            "speculation": {"accepted_per_step": {"rewriting": 3.75, "none": 0.0}},
        },
    }
    slow = {"fp16": {"speculative": 2.4}, "speculative": {"fp16": 2.4}}
    known = profile_of(content, interference=slow)
    # Half of the work is on each; one more request, which itself would rather go to the other engine.
    engines = {
        name: EngineView(engine=name, in_flight=7, pending_output_tokens=7 * 40) for name in ("fp16", "speculative")
    }
    asked = RequestFeatures(
        prompt_tokens=60,
        expected_output_tokens=80,
        batch_size=15,
        tag=Tag.NONE if tag is not Tag.NONE else Tag.REWRITING,
    )
    outcome = CostPolicy(modes, RoutingSettings(), known).decide(
        asked, live({tag.value: 1.0}, engines=engines, arrivals_per_s=2.0)
    )
    assert isinstance(outcome, Decision)
    assert outcome.engine == engine


def test_of_equally_good_engines_the_first_is_taken() -> None:
    """A set's order differs from process to process, and a logged decision must come out again in another."""
    names = ["slow", *(f"engine{number}" for number in range(12))]
    steps = {name: 100 if name == "slow" else 10 for name in names}
    content = {name: {"prefill_ms": [[1, 1], [2, 2]], "step_ms": [[1, ms], [64, 2 * ms]]} for name, ms in steps.items()}
    known = profile_of(content, interference={name: {other: 3.0 for other in names if other != name} for name in names})
    modes = [ModeInfo(name, name, "fp16", lossless=True) for name in names]
    engines = {name: EngineView(engine=name, in_flight=14 if name == "slow" else 0) for name in names}
    asked = RequestFeatures(prompt_tokens=60, expected_output_tokens=80, batch_size=15)
    outcome = CostPolicy(modes, RoutingSettings(), known).decide(
        asked, live({"none": 1.0}, engines=engines, arrivals_per_s=20.0)
    )
    assert isinstance(outcome, Decision)
    assert outcome.engine == "engine0"


def test_what_was_seen_before_is_not_computed_again_where_prefixes_are_reused() -> None:
    engine, seen = EngineView(engine="fp16"), Snapshot(mean_prompt_tokens=80.0, mean_seen_tokens=60.0)
    reuse = ModeInfo("fp16", "fp16", "fp16", lossless=True, prefix_reuse=True)
    plain, reusing = (
        usual_request(compile_profile(profile(2.4), [mode])["fp16"], engine, seen) for mode in (MODES[0], reuse)
    )
    assert reusing.prompt_ms == pytest.approx(plain.prompt_ms / 4)


def test_an_engine_is_not_left_while_others_run_there_for_a_little_speed(features: Make, snapshot: Make) -> None:
    """Both engines would be slowed, for as long as the five need to finish."""
    asked = features(prompt_tokens=40, expected_output_tokens=80, batch_size=6)
    assert decide(2.4, asked, busy(snapshot, fp16=0, gptq=0)).engine == "gptq"
    five = busy(snapshot, fp16=5, gptq=0, arrivals_per_s=0.2)
    assert decide(2.4, asked, five).engine == "fp16"
    assert decide(1.0, asked, five).engine == "gptq"


def test_more_than_an_engine_can_decode_at_once_goes_to_another(features: Make, snapshot: Make) -> None:
    asked = features(prompt_tokens=300, expected_output_tokens=5, batch_size=41)
    full = {"in_flight": 40, "max_running": 8, "pending_output_tokens": 2400}
    lately = {"mean_prompt_tokens": 80.0, "mean_output_tokens": 80.0}
    assert decide(1.6, asked, snapshot(lately, fp16=full, gptq={})).engine == "gptq"


REUSING = ModeInfo("reusing", "reusing", "fp16", lossless=True, prefix_reuse=True)


@pytest.mark.parametrize(
    ("seen", "cached", "lately", "begins"),
    [
        (0, 0, 0.0, "fp16"),
        (250, 0, 0.0, "reusing"),
        (250, 250, 0.0, "reusing"),
        (0, 0, 0.8, "reusing"),
    ],
    ids=["new", "seen elsewhere", "cached", "what comes usually comes again"],
)
def test_a_beginning_that_comes_again_is_computed_where_it_is_kept(
    seen: int, cached: int, lately: float, begins: str
) -> None:
    """The engine that keeps it is slower by a little, which the next request of that conversation makes up for."""
    points = {"prefill_ms": [[64, 300], [512, 2400]], "step_ms": [[1, 60], [8, 150]]}
    slower = {"prefill_ms": [[64, 300], [512, 2400]], "step_ms": [[1, 85], [8, 200]]}
    known = profile_of(
        {"fp16": points, "reusing": slower}, interference={"fp16": {"reusing": 2.4}, "reusing": {"fp16": 2.4}}
    )
    asked = RequestFeatures(
        prompt_tokens=300,
        expected_output_tokens=16,
        seen_tokens=seen,
        cached_tokens={"reusing": cached} if cached else {},
    )
    idle = Snapshot(
        mean_prompt_tokens=100.0,
        mean_seen_tokens=100.0 * lately,
        mean_output_tokens=16.0,
        engines={name: EngineView(engine=name) for name in ("fp16", "reusing")},
    )
    outcome = CostPolicy((MODES[0], REUSING), RoutingSettings(), known).decide(asked, idle)
    assert isinstance(outcome, Decision)
    assert outcome.engine == begins
