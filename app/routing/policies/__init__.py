"""Policies: `(features, snapshot) -> Decision`, behind one contract (`base.py`)."""

from __future__ import annotations

from collections.abc import Iterable

from app.routing.mode_info import ModeInfo
from app.routing.policies.base import Policy
from app.routing.policies.cost import CostPolicy
from app.routing.policies.learned import LearnedPolicy, Predictor
from app.routing.policies.rules import RULES, RULES_PUBLISHED, RulesPolicy
from app.routing.policies.static import StaticPolicy
from app.routing.profile import Profile
from app.routing.settings import RoutingSettings

POLICY_NAMES = ("cost", "rules", "rules_published", "learned", "static:<mode>")

__all__ = ["POLICY_NAMES", "Policy", "make_policy"]


def make_policy(
    name: str,
    modes: Iterable[ModeInfo],
    settings: RoutingSettings,
    profile: Profile | None = None,
    predictor: Predictor | None = None,
    *,
    model: str = "",
    hardware: str = "",
) -> Policy:
    """The policy called `name`. `predictor`, `model` and `hardware` matter to `learned` only.

    Raises:
        ValueError: there is no such policy, a static mode is not deployed, or `learned` has no (fitting) predictor.
    """
    if name == "cost":
        return CostPolicy(modes, settings, profile)
    if name == "rules":
        return RulesPolicy(name, RULES, modes, settings, profile)
    if name == "rules_published":
        return RulesPolicy(name, RULES_PUBLISHED, modes, settings, profile)
    if name == "learned":
        if predictor is None:
            raise ValueError("Policy 'learned' needs a trained model; make one with `python -m loadgen train`.")
        return LearnedPolicy(predictor, modes, settings, profile, model=model, hardware=hardware)
    if name.startswith("static:"):
        return StaticPolicy(name.removeprefix("static:"), modes, settings)
    raise ValueError(f"There is no policy {name!r}; there are {', '.join(POLICY_NAMES)}.")
