from collections.abc import Callable
from typing import Any

import pytest

from app.routing.admission import LONGEST_RETRY_S, NO_ESTIMATE_RETRY_S, drain_s, retry_after_s
from app.routing.breaker import FAILURES_TO_OPEN, LONGEST_PAUSE_S, Breakers
from app.routing.decision import Ineligible, Refusal
from app.routing.features import Wishes
from app.routing.mode_info import ModeInfo
from app.routing.policies import make_policy
from app.routing.profile import Profile
from app.routing.settings import RoutingSettings
from app.routing.snapshot import EngineView, Snapshot

Make = Callable[..., Any]


@pytest.mark.parametrize(
    ("view", "seconds"),
    [
        ({"in_flight": 9}, 0.0),
        ({"in_flight": 10, "completions_per_s": 0.5}, 2.0),
        ({"in_flight": 19, "completions_per_s": 0.5}, 20.0),
        ({"in_flight": 10, "max_running": 10, "pending_output_tokens": 1000, "step_ms": 20.0}, 0.2),
        ({"in_flight": 10, "completions_per_s": 0.0, "max_running": 1}, 6.4),
    ],
)
def test_drain_time(view: dict[str, Any], seconds: float) -> None:
    assert drain_s(EngineView(engine="e", queue_limit=10, **view)) == pytest.approx(seconds)


def refusal(modes: tuple[ModeInfo, ...], profile: Profile, asked: Any, live: Snapshot) -> Refusal:
    outcome = make_policy("cost", modes, RoutingSettings(), profile).decide(asked, live)
    assert isinstance(outcome, Refusal)
    return outcome


def test_overload_says_when_to_come_again(
    modes: tuple[ModeInfo, ...], profile: Profile, features: Make, snapshot: Make
) -> None:
    """ray#65879: 503 with Retry-After; the engine that is free first counts."""
    rates = {"fp16": 0.1, "int8": 0.25, "gptq": 0.05, "speculative": 0.1}
    live = snapshot(
        **{name: {"in_flight": 8, "queue_limit": 8, "completions_per_s": rate} for name, rate in rates.items()}
    )
    refused = refusal(modes, profile, features(), live)
    engines = {mode.name: mode.engine for mode in modes}
    assert refused.code is Ineligible.QUEUE_FULL
    assert retry_after_s(refused, engines, live) == 4
    slow = snapshot(**{name: {"in_flight": 8, "queue_limit": 8, "completions_per_s": 1e-6} for name in rates})
    assert retry_after_s(refused, engines, slow) == LONGEST_RETRY_S


def test_a_tenant_with_its_share_comes_again_when_one_of_its_own_may_have_ended(
    modes: tuple[ModeInfo, ...], profile: Profile, features: Make, snapshot: Make
) -> None:
    engines = {mode.name: mode.engine for mode in modes}
    crowded = tuple(set(engines.values()))
    live = snapshot(**{name: {"in_flight": 50, "completions_per_s": 0.2} for name in crowded})
    refused = refusal(modes, profile, features(wishes=Wishes(crowded_engines=crowded)), live)
    assert refused.code is Ineligible.TENANT_QUEUE_FULL
    assert retry_after_s(refused, engines, live) == 5


def opened(breakers: Breakers, mode: str, pause_s: float) -> float:
    """Fail until the mode pauses for so long; returns when the pause began."""
    now_s = 0.0
    for _ in range(FAILURES_TO_OPEN):
        breakers[mode].failed(now_s)
    while (left_s := breakers[mode].retry_in_s(now_s) or 0.0) < pause_s:
        now_s += left_s
        breakers[mode].failed(now_s)
    return now_s


@pytest.mark.parametrize("pause_s", [80.0, LONGEST_PAUSE_S])
def test_a_mode_that_was_taken_out_comes_again_when_its_pause_is_over(
    modes: tuple[ModeInfo, ...], profile: Profile, features: Make, snapshot: Make, pause_s: float
) -> None:
    modes = tuple(mode for mode in modes if mode.engine == "fp16")
    engines = {mode.name: mode.engine for mode in modes}
    breakers = Breakers(engines)
    now_s = max(opened(breakers, mode, pause_s) for mode in engines)

    def told_s(now_s: float) -> int | None:
        live = snapshot({"tripped_modes": breakers.tripped(now_s)})
        return retry_after_s(refusal(modes, profile, features(), live), engines, live, breakers.pauses_s(now_s))

    assert told_s(now_s) == pause_s
    assert told_s(now_s + 20.5) == pause_s - 20
    # When a probe ends is not known.
    for mode in engines:
        breakers[mode].started(now_s + pause_s)
    assert told_s(now_s + pause_s) == NO_ESTIMATE_RETRY_S


def test_of_a_full_queue_and_a_paused_mode_the_sooner_counts(
    modes: tuple[ModeInfo, ...], profile: Profile, features: Make, snapshot: Make
) -> None:
    modes = tuple(mode for mode in modes if mode.name in ("fp16", "int8"))
    engines = {mode.name: mode.engine for mode in modes}
    breakers = Breakers(engines)
    now_s = opened(breakers, "fp16", 80.0)
    live = snapshot(
        {"tripped_modes": breakers.tripped(now_s)}, int8={"in_flight": 8, "queue_limit": 8, "completions_per_s": 0.25}
    )
    assert retry_after_s(refusal(modes, profile, features(), live), engines, live, breakers.pauses_s(now_s)) == 4


def test_what_waiting_does_not_cure_has_no_retry() -> None:
    refused = Refusal.from_json(
        '{"code":"quality_gate_failed","request_class":"standard","policy":"cost","settings_version":"v",'
        '"by_mode":{"gptq":"quality_gate_failed"}}'
    )
    assert retry_after_s(refused, {"gptq": "gptq"}, Snapshot()) is None


def test_a_full_engine_sends_requests_to_the_next_best(
    modes: tuple[ModeInfo, ...], profile: Profile, features: Make, snapshot: Make
) -> None:
    policy = make_policy("cost", modes, RoutingSettings(), profile)
    order = []
    full: dict[str, dict[str, Any]] = {}
    for _ in range(4):
        made: Any = policy.decide(features(), snapshot(**full))
        order.append(made.engine)
        full[made.engine] = {"in_flight": 256}
    assert sorted(order) == ["fp16", "gptq", "int8", "speculative"]
    assert order[0] == "gptq"
