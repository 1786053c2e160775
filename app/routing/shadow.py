"""Shadow policies: evaluated and logged beside the one that decides, never executed."""

from __future__ import annotations

from collections.abc import Iterable

from app.routing.decision import Decision, Outcome
from app.routing.features import RequestFeatures
from app.routing.json_record import JsonRecord
from app.routing.policies.base import Policy
from app.routing.snapshot import Snapshot

_LONGEST_ERROR = 200
"""Characters kept of what a policy failed with: its message may quote anything, and the ledger keeps no long texts."""


class Shadow(JsonRecord, frozen=True, kw_only=True):
    """What another policy would have done. `mode` is None when it refused or failed."""

    policy: str
    mode: str | None
    agrees: bool
    latency_ms: float | None = None
    energy_j: float | None = None
    error: str | None = None


def evaluate(
    shadows: Iterable[Policy], executed: Outcome, features: RequestFeatures, snapshot: Snapshot
) -> tuple[Shadow, ...]:
    """What each shadow policy decides on the same inputs; one that fails says so and disturbs nothing."""
    return tuple(_one(policy, executed, features, snapshot) for policy in shadows)


def _one(policy: Policy, executed: Outcome, features: RequestFeatures, snapshot: Snapshot) -> Shadow:
    mode = executed.mode if isinstance(executed, Decision) else None
    try:
        outcome = policy.decide(features, snapshot)
    except Exception as error:
        words = f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]
        return Shadow(policy=policy.name, mode=None, agrees=False, error=words)
    if not isinstance(outcome, Decision):
        return Shadow(policy=policy.name, mode=None, agrees=mode is None, error=None)
    terms = outcome.terms
    return Shadow(
        policy=policy.name,
        mode=outcome.mode,
        agrees=outcome.mode == mode,
        latency_ms=None if terms is None else terms.latency_ms,
        energy_j=None if terms is None else terms.energy_j,
    )
