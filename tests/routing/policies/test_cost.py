from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.routing.corrections import Corrections
from app.routing.decision import Decision, Ineligible, LostBy, Outcome, Refusal
from app.routing.features import Objective, Quality, RequestFeatures, Wishes
from app.routing.mode_info import ModeInfo
from app.routing.policies.cost import CostPolicy
from app.routing.policies.engine_load import engine_loads
from app.routing.profile import Profile, parse_profile
from app.routing.settings import RoutingSettings
from app.routing.snapshot import EngineView, Residency, Snapshot
from app.routing.tags import Tag
from tests.routing.profiles import profile_of

Make = Callable[..., Any]
Decide = Callable[[RequestFeatures, Snapshot], Decision]


@pytest.fixture
def decide(modes: tuple[ModeInfo, ...], profile: Profile) -> Decide:
    return decider(modes, profile)


def decider(modes: tuple[ModeInfo, ...], profile: Profile | None, **settings: Any) -> Decide:
    policy = CostPolicy(modes, RoutingSettings(**settings), profile)

    def decide(features: RequestFeatures, snapshot: Snapshot) -> Decision:
        return chosen(policy.decide(features, snapshot))

    return decide


def chosen(outcome: Outcome) -> Decision:
    assert isinstance(outcome, Decision), outcome.reason
    return outcome


def test_the_fastest_mode_for_the_shape_wins(decide: Decide, features: Make, snapshot: Make) -> None:
    assert decide(features(prompt_tokens=100, expected_output_tokens=200), snapshot()).engine == "gptq"
    assert decide(features(prompt_tokens=2000, expected_output_tokens=1), snapshot()).engine == "int8"


def test_the_decision_explains_itself(decide: Decide, features: Make, snapshot: Make) -> None:
    made = decide(features(prompt_tokens=2000, expected_output_tokens=1), snapshot())
    assert made.terms is not None
    assert made.runner_up_terms is not None
    assert made.runner_up is not None
    assert made.policy == "cost"
    assert made.profile_version == "p1"
    assert made.terms.latency_ms == pytest.approx(5.0 + 0.07 * 1999)
    assert made.runner_up in made.reason
    assert "predicted 145 ms" in made.reason


def test_a_cached_prefix_is_not_paid_for(decide: Decide, features: Make, snapshot: Make) -> None:
    asked = features(prompt_tokens=4000, expected_output_tokens=2, cached_tokens={"fp16": 3900})
    made = decide(asked, snapshot())
    assert made.mode == "prefix_caching"
    assert made.lost_by is LostBy.PREFILL


def test_load_wins_over_a_small_prefix_hit(decide: Decide, features: Make, snapshot: Make) -> None:
    """sglang PR#14532: cache affinity picked an overloaded worker."""
    asked = features(prompt_tokens=500, expected_output_tokens=100, cached_tokens={"gptq": 64})
    busy = snapshot({"stale_after_s": 5.0}, gptq={"in_flight": 40, "max_running": 8, "pending_output_tokens": 8000})
    assert decide(asked, snapshot()).engine == "gptq"
    assert decide(asked, busy).engine != "gptq"


def test_prompts_ahead_of_it_are_waited_for(decide: Decide, features: Make, snapshot: Make) -> None:
    asked = features(prompt_tokens=100, expected_output_tokens=20)
    crowded = snapshot(gptq={"in_flight": 1, "pending_prefill_tokens": 20_000, "pending_output_tokens": 5})
    assert decide(asked, crowded).engine != "gptq"


def test_a_busy_device_is_not_split(decide: Decide, features: Make, snapshot: Make, content: Make, modes: Any) -> None:
    """Four requests run on INT8. GPTQ is faster alone, but starting it slows all of them."""
    running = snapshot(int8={"in_flight": 4, "running": 4, "pending_output_tokens": 400, "step_ms": 15.0})
    asked = features(prompt_tokens=50, expected_output_tokens=100)
    made = decide(asked, running)
    assert made.engine == "int8"
    harmless = parse_profile(content(interference={}), model="tiny", hardware="box")
    assert decider(modes, harmless)(asked, running).engine == "gptq"


def test_work_for_an_engine_that_runs_already_delays_the_other_engines_too(
    modes: tuple[ModeInfo, ...], profile: Profile, features: Make, snapshot: Make
) -> None:
    asked = features(prompt_tokens=1001, expected_output_tokens=11)

    def terms(**in_flight: int) -> Any:
        busy = {name: {"in_flight": n, "pending_output_tokens": 10 * n} for name, n in in_flight.items()}
        return CostPolicy(modes, RoutingSettings(), profile).predictions(asked, snapshot(**busy))["fp16"]

    alone, beside = terms(fp16=2), terms(fp16=2, gptq=3)
    # Three requests run there, and each is slowed by 0.6 while this prompt of 105 ms is read and the batch is larger.
    assert beside.others_ms - alone.others_ms >= 3 * 0.6 * 105.0
    assert beside.latency_ms == pytest.approx(1.6 * alone.latency_ms)
    assert terms(gptq=3).others_ms == pytest.approx(3 * 0.6 * (105.0 + 10 * 20.0))


def test_sequences_of_one_request_are_decoded_in_one_batch(
    modes: tuple[ModeInfo, ...], profile: Profile, features: Make, snapshot: Make
) -> None:
    policy = CostPolicy(modes, RoutingSettings(), profile)

    def fp16(sequences: int, **view: Any) -> Any:
        asked = features(prompt_tokens=100, expected_output_tokens=101, sequences=sequences)
        return policy.predictions(asked, snapshot(fp16=view))["fp16"]

    one, eight = fp16(1), fp16(8)
    assert (one.decode_ms, eight.decode_ms) == (100 * 20.0, pytest.approx(100 * 34.0))
    assert eight.prefill_ms == one.prefill_ms
    # A token in a batch of eight takes a quarter of the joules.
    assert one.energy_j() - eight.energy_j() == pytest.approx(100 * 4.0 - 8 * 100 * 1.0)
    # Eight that join make the steps of those who run longer by as many.
    busy = {"in_flight": 1, "pending_output_tokens": 50}
    assert fp16(7, **busy).others_ms - fp16(1, **busy).others_ms == pytest.approx(6 * 2.0 * 50)
    # Where there is no place for all of them, some wait.
    full = {**busy, "max_running": 4}
    assert fp16(3, **full).queue_ms == 0.0
    assert fp16(4, **full).queue_ms > 0.0


@given(st.sampled_from(["step_ms", "prefill_j", "wake_ms", None]), st.integers(0, 3), st.integers(0, 90))
def test_modes_of_an_engine_cost_the_same_only_if_they_were_measured_alike(
    apart: str | None, load: int, cached: int
) -> None:
    """A mode's cost is shared with the next one of its engine, which must not show: each is as predicted by itself."""
    measured = {
        "prefill_ms": [[1, 5.0], [1001, 105.0]],
        "step_ms": [[1, 20.0], [8, 34.0]],
        "prefill_j": [[1, 4.0], [1001, 80.0]],
        "decode_j_per_token": [[1, 4.0], [8, 1.0]],
        "wake_ms": 10.0,
        "peak_memory_bytes": 1000.0,
    }
    other = {"step_ms": [[1, 30.0], [8, 44.0]], "prefill_j": [[1, 8.0], [1001, 90.0]], "wake_ms": 700.0}
    content = {
        "plain": measured,
        "alias": measured | {"peak_memory_bytes": 1500.0} | ({apart: other[apart]} if apart else {}),
        "reusing": measured,
    }
    modes = [ModeInfo(name, "one", "fp16", True, prefix_reuse=name == "reusing") for name in content]
    policy = CostPolicy(modes, RoutingSettings(), profile_of(content))
    engine = EngineView(engine="one", in_flight=load, residency=Residency.RESIDENT if load else Residency.ASLEEP)
    live = Snapshot(engines={"one": engine})
    asked = RequestFeatures(prompt_tokens=100, expected_output_tokens=20, cached_tokens={"one": cached})
    found = policy.predictions(asked, live)
    assert found == {mode.name: policy.prediction(mode.name, asked, live) for mode in modes}

    def cost(name: str) -> tuple[float, float | None]:
        return found[name].latency_ms, found[name].energy_j()

    differs = apart is not None and (apart != "wake_ms" or not load)
    assert (cost("alias") != cost("plain")) == differs
    assert (cost("reusing") != cost("plain")) == bool(cached)


def test_what_is_left_of_a_request_is_left_of_each_of_its_sequences(features: Make, snapshot: Make) -> None:
    view = {"in_flight": 1, "running": 8, "max_running": 8, "pending_output_tokens": 50}
    (load, *_) = engine_loads(features(), snapshot(fp16=view), {}).values()
    assert (load.load, load.left_tokens) == (8, 50)


def test_a_full_kv_cache_is_waited_for(
    content: Make, modes: tuple[ModeInfo, ...], features: Make, snapshot: Make
) -> None:
    profile = parse_profile(content(interference={}), model="tiny", hardware="box")
    policy = CostPolicy(modes, RoutingSettings(consolidate_from=9), profile)
    asked = features(prompt_tokens=200, expected_output_tokens=200)

    def live(kv_use: float, **changes: Any) -> Snapshot:
        busy = {"in_flight": 2, "pending_output_tokens": 400, "kv_capacity_tokens": 1000, "kv_use": kv_use, **changes}
        return snapshot(gptq=busy)

    def queue_ms(kv_use: float, **changes: Any) -> float:
        found = policy.prediction("gptq", asked, live(kv_use, **changes))
        assert found is not None
        return found.queue_ms

    assert queue_ms(0.5) == queue_ms(0.95, age_s=60.0) == queue_ms(0.95, kv_capacity_tokens=None) == 0
    assert 0 < queue_ms(0.7) < queue_ms(0.95)
    assert chosen(policy.decide(asked, live(0.5))).engine == "gptq"
    assert chosen(policy.decide(asked, live(1.0))).engine == "int8"


def test_a_stale_report_of_load_is_not_believed(decide: Decide, features: Make, snapshot: Make) -> None:
    report = {"running": 8, "waiting": 200, "max_running": 8}
    assert decide(features(), snapshot(gptq={**report, "age_s": 0.1})).engine != "gptq"
    assert decide(features(), snapshot(gptq={**report, "age_s": 60.0})).engine == "gptq"


def test_a_sleeping_engine_is_charged_its_wake_up(decide: Decide, features: Make, snapshot: Make) -> None:
    asleep = snapshot(gptq={"residency": Residency.ASLEEP, "wake_ms": 2000.0})
    assert decide(features(expected_output_tokens=100), asleep).engine != "gptq"
    long = decide(features(expected_output_tokens=5000), asleep)
    assert long.engine == "gptq"
    assert long.terms is not None
    assert long.terms.wake_ms == 2000.0


def test_speculation_is_for_rewriting(decide: Decide, features: Make, snapshot: Make) -> None:
    asked = {"wishes": Wishes(quality=Quality.EXACT), "expected_output_tokens": 300}
    assert decide(features(tag=Tag.REWRITING, **asked), snapshot()).mode == "speculative"
    assert decide(features(tag=Tag.NONE, **asked), snapshot()).engine == "fp16"


def test_verifying_drafts_makes_their_steps_longer(
    modes: tuple[ModeInfo, ...], profile: Profile, features: Make, snapshot: Make
) -> None:
    content = profile.model_dump(mode="json")
    asked = features(tag=Tag.REWRITING, expected_output_tokens=300)

    def decode_ms(verification: float) -> float:
        content["modes"]["speculative"]["speculation"]["verification"] = verification
        known = parse_profile(content, model=profile.model, hardware=profile.hardware)
        return CostPolicy(modes, RoutingSettings(), known).predictions(asked, snapshot())["speculative"].decode_ms

    accepted = content["modes"]["speculative"]["speculation"]["accepted_per_step"]["rewriting"]
    assert decode_ms(0.5) == pytest.approx((1 + 0.5 * accepted) * decode_ms(0.0))
    assert decode_ms(1.0) == pytest.approx((1 + accepted) * decode_ms(0.0)), "no gain: a step as long as its tokens"


def test_what_acceptance_shows_online_is_used(decide: Decide, features: Make, snapshot: Make) -> None:
    asked = {"wishes": Wishes(quality=Quality.EXACT), "expected_output_tokens": 300}
    learned = snapshot({"accepted_per_step": {"speculative:code": 1.5, "speculative:rewriting": 0.0}})
    assert decide(features(tag=Tag.CODE, **asked), learned).mode == "speculative"
    assert decide(features(tag=Tag.REWRITING, **asked), learned).engine == "fp16"
    # The engine's latest rate stands in for a tag nobody has measured, unless it is old.
    for age_s, mode in ((0.0, "speculative"), (60.0, "prefix_caching")):
        seen = snapshot(speculative={"accepted_per_step": 1.5, "age_s": age_s})
        assert decide(features(tag=Tag.CODE, **asked), seen).mode == mode


def test_online_correction_changes_the_choice(decide: Decide, features: Make, snapshot: Make) -> None:
    corrections = Corrections()
    for _ in range(30):
        corrections.observe("gptq", Tag.NONE, 300.0, 100.0, 0.0)
    made = decide(features(), snapshot({"corrections": corrections.factors}))
    assert made.engine == "int8"
    assert decide(features(), snapshot()).engine == "gptq"


def test_noise_does_not_choose_between_modes_of_one_engine(decide: Decide, features: Make, snapshot: Make) -> None:
    """The one that reuses prefixes is preferred whatever the engine's factor has come to be."""
    for observed_ms in (60.0, 100.0, 140.0):
        corrections = Corrections()
        for _ in range(10):
            corrections.observe("gptq", Tag.NONE, observed_ms, 100.0, 0.0)
        asked = features(prompt_tokens=100, expected_output_tokens=200)
        made = decide(asked, snapshot({"corrections": corrections.factors}))
        assert made.mode == "gptq_prefix_caching"


def test_objectives(modes: tuple[ModeInfo, ...], profile: Profile, features: Make, snapshot: Make) -> None:
    decide = decider(modes, profile)

    def engine(**wishes: Any) -> str:
        return decide(
            features(prompt_tokens=100, expected_output_tokens=200, wishes=Wishes(**wishes)), snapshot()
        ).engine

    assert engine() == "gptq"
    assert engine(objective=Objective.ENERGY) == "int8"
    assert engine(objective=Objective.WEIGHTED, energy_weight=0.0) == "gptq"
    assert engine(objective=Objective.WEIGHTED, energy_weight=1.0) == "int8"
    assert engine(objective=Objective.LIMIT, latency_limit_ms=1e6) == "int8"
    assert engine(objective=Objective.LIMIT, latency_limit_ms=1700.0) == "gptq"
    assert engine(objective=Objective.LIMIT, latency_limit_ms=0.1) == "gptq"


def test_unknown_energy_is_not_zero(content: Make, modes: tuple[ModeInfo, ...], features: Make, snapshot: Make) -> None:
    data = content()
    for name in ("gptq", "gptq_prefix_caching"):
        del data["modes"][name]["prefill_j"]
    decide = decider(modes, parse_profile(data, model="tiny", hardware="box"))
    asked = features(expected_output_tokens=200, wishes=Wishes(objective=Objective.ENERGY))
    assert decide(asked, snapshot()).engine == "int8"
    fast = decide(features(expected_output_tokens=200), snapshot())
    assert fast.terms is not None
    assert fast.terms.energy_j is None


def test_the_energy_limit(modes: tuple[ModeInfo, ...], profile: Profile, features: Make, snapshot: Make) -> None:
    policy = CostPolicy(modes, RoutingSettings(max_energy_ratio=0.4), profile)
    assert chosen(policy.decide(features(expected_output_tokens=200), snapshot())).engine == "int8"


def test_on_a_shared_engine_a_tie_goes_to_prefix_reuse(decide: Decide, features: Make, snapshot: Make) -> None:
    made = decide(features(wishes=Wishes(quality=Quality.EXACT)), snapshot())
    assert made.mode == "prefix_caching"
    assert made.runner_up == "fp16"
    assert made.lost_by is LostBy.PREFIX_REUSE


@pytest.mark.parametrize("objective", [Objective.LATENCY, Objective.ENERGY, Objective.WEIGHTED])
def test_what_is_equal_is_said_to_be(decide: Decide, features: Make, snapshot: Make, objective: Objective) -> None:
    asked = features(prompt_tokens=2000, expected_output_tokens=1, wishes=Wishes(objective=objective))
    made = decide(asked, snapshot())
    assert (made.mode, made.runner_up) == ("int8", "int8_continuous_batching")
    assert made.lost_by is LostBy.ORDER


def test_without_a_profile_the_rules_decide(modes: tuple[ModeInfo, ...], features: Make, snapshot: Make) -> None:
    made = decider(modes, None, accepted_modes=frozenset({"gptq"}))(features(expected_output_tokens=32), snapshot())
    assert (made.mode, made.policy, made.stands_in_for) == ("gptq", "rules", "cost")
    assert "rules stands in for cost" in made.reason


def test_modes_the_profile_lacks_are_not_chosen(
    content: Make, modes: tuple[ModeInfo, ...], features: Make, snapshot: Make
) -> None:
    data = content()
    data["modes"] = {"fp16": data["modes"]["fp16"]}
    policy = CostPolicy(modes, RoutingSettings(), parse_profile(data, model="tiny", hardware="box"))
    assert chosen(policy.decide(features(), snapshot())).mode == "fp16"
    without = policy.decide(features(), snapshot(fp16={"healthy": False}))
    assert chosen(without).stands_in_for == "cost"


def test_a_refusal_when_all_queues_are_full(
    modes: tuple[ModeInfo, ...], profile: Profile, features: Make, snapshot: Make
) -> None:
    full = {engine: {"in_flight": 256} for engine in ("fp16", "int8", "gptq", "speculative")}
    outcome = CostPolicy(modes, RoutingSettings(), profile).decide(features(), snapshot(**full))
    assert isinstance(outcome, Refusal)
    assert outcome.code is Ineligible.QUEUE_FULL


@given(st.floats(0, 1, exclude_max=True), st.floats(0.01, 1))
def test_exploration_stays_among_eligible_modes(draw: float, rate: float) -> None:
    modes = (ModeInfo("fp16", "fp16", "fp16", True), ModeInfo("gptq", "gptq", "gptq", False))
    content = {
        name: {"prefill_ms": [[1, 1.0], [9, 2.0]], "step_ms": [[1, step]]} for name, step in (("fp16", 9), ("gptq", 1))
    }
    profile = profile_of(content)
    live = Snapshot(engines={name: EngineView(engine=name) for name in ("fp16", "gptq")})
    asked = RequestFeatures(prompt_tokens=9, expected_output_tokens=9, draw=draw)
    ungated = chosen(CostPolicy(modes, RoutingSettings(exploration_rate=rate), profile).decide(asked, live))
    assert ungated.mode == "fp16"
    settings = RoutingSettings(exploration_rate=rate, accepted_modes=frozenset({"gptq"}))
    gated = chosen(CostPolicy(modes, settings, profile).decide(asked, live))
    assert gated.explored == (draw < rate)
    if not gated.explored:
        assert gated.mode == "gptq"


def test_exploration_reaches_every_mode(
    modes: tuple[ModeInfo, ...], profile: Profile, features: Make, snapshot: Make
) -> None:
    decide = decider(modes, profile, exploration_rate=0.1)
    drawn = {decide(features(draw=number / 1000), snapshot()).mode for number in range(100)}
    assert drawn == {mode.name for mode in modes}


def test_one_mode_is_predicted_as_among_all_even_where_it_is_not_eligible(
    modes: tuple[ModeInfo, ...], profile: Profile, features: Make, snapshot: Make
) -> None:
    policy = CostPolicy(modes, RoutingSettings(), profile)
    live = snapshot(gptq={"in_flight": 3, "pending_output_tokens": 90}, fp16={"in_flight": 1})
    for name, found in policy.predictions(features(), live).items():
        assert policy.prediction(name, features(), live) == found
    full = snapshot(gptq={"in_flight": 256})
    assert "gptq" not in policy.predictions(features(), full)
    assert policy.prediction("gptq", features(), full) is not None
    assert policy.prediction("none", features(), live) is None
    assert CostPolicy(modes, RoutingSettings()).prediction("gptq", features(), live) is None
