"""A heavy load goes to one engine; a light one, and one that engines share without loss, is spread as before."""

from collections.abc import Callable
from statistics import fmean
from typing import Any

import pytest

from app.routing.coefficients import compile_profile
from app.routing.decision import Decision, LostBy
from app.routing.features import Objective, Wishes
from app.routing.mode_info import ModeInfo
from app.routing.policies.cost import CostPolicy
from app.routing.policies.static import StaticPolicy
from app.routing.profile import Profile, parse_profile
from app.routing.settings import RoutingSettings
from loadgen.routing_simulation import SimulatedRequest, simulate

Make = Callable[..., Any]
MODES = (ModeInfo("fp16", "fp16", "fp16", lossless=True), ModeInfo("gptq", "gptq", "gptq", lossless=False))
SETTINGS = {"accepted_modes": frozenset({"gptq"})}


def profile(slowdown: float) -> Profile:
    """A mode that reads fast and one that steps fast, as on a CPU without 16-bit arithmetic."""
    return parse_profile(
        {
            "schema_version": 1,
            "version": "p1",
            "model": "m",
            "hardware": "h",
            "modes": {
                "fp16": {"prefill_ms": [[64, 280], [512, 1750]], "step_ms": [[1, 62], [8, 210]]},
                "gptq": {"prefill_ms": [[64, 480], [512, 3300]], "step_ms": [[1, 54], [8, 140]]},
            },
            "interference": {"fp16": {"gptq": slowdown}, "gptq": {"fp16": slowdown}},
        },
        model="m",
        hardware="h",
    )


def busy(snapshot: Make, fp16: int, gptq: int) -> Any:
    def view(requests: int) -> dict[str, int]:
        return {"in_flight": requests, "max_running": 64, "pending_output_tokens": 60 * requests}

    return snapshot({"mean_prompt_tokens": 80.0, "mean_output_tokens": 80.0}, fp16=view(fp16), gptq=view(gptq))


def decide(slowdown: float, features: Any, snapshot: Any, **settings: Any) -> Decision:
    outcome = CostPolicy(MODES, RoutingSettings(**SETTINGS, **settings), profile(slowdown)).decide(features, snapshot)
    assert isinstance(outcome, Decision)
    return outcome


def test_engines_that_hinder_each_other_are_not_both_kept_busy(features: Make, snapshot: Make) -> None:
    asked = features(prompt_tokens=300, expected_output_tokens=5, batch_size=15)
    load = busy(snapshot, fp16=4, gptq=10)
    alone = decide(2.4, asked, load, consolidate_from=100)
    together = decide(2.4, asked, load)
    assert (alone.engine, together.engine) == ("fp16", "gptq")
    assert (together.runner_up, together.lost_by) == ("fp16", LostBy.CONSOLIDATION)
    assert "all work on one engine" in together.reason


def test_engines_that_do_not_hinder_each_other_stay_busy(features: Make, snapshot: Make) -> None:
    asked = features(prompt_tokens=300, expected_output_tokens=5, batch_size=15)
    assert decide(1.0, asked, busy(snapshot, fp16=4, gptq=10)).engine == "fp16"


def test_a_light_load_is_not_put_together(features: Make, snapshot: Make) -> None:
    asked = features(prompt_tokens=300, expected_output_tokens=5, batch_size=3)
    made = decide(2.4, asked, busy(snapshot, fp16=1, gptq=1))
    assert made.lost_by is not LostBy.CONSOLIDATION


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
