"""When a refused request may come again: Retry-After from the time that queues need to drain and breakers pause."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from types import MappingProxyType

from app.routing.decision import Ineligible, Refusal
from app.routing.snapshot import EngineView, Snapshot

SHORTEST_RETRY_S = 1
LONGEST_RETRY_S = 120
"""Of an estimate. A breaker's pause is known, and told as it is."""
NO_ESTIMATE_RETRY_S = 10.0
"""Where an engine starts, or a breaker waits for what its probe says."""
ASSUMED_STEP_MS = 50.0
"""Of an engine that has not told its step time."""
ASSUMED_OUTPUT_TOKENS = 128.0

_WORTH_WAITING = frozenset(
    {
        Ineligible.QUEUE_FULL,
        Ineligible.TENANT_QUEUE_FULL,
        Ineligible.BREAKER_OPEN,
        Ineligible.NOT_RESIDENT,
        Ineligible.UNHEALTHY,
    }
)


def drain_s(view: EngineView, at_least: int = 0) -> float:
    """Estimated seconds until the engine has a free place in its queue, and `at_least` so many requests have ended."""
    excess = max(at_least, view.in_flight - view.queue_limit + 1)
    if excess <= 0 or not view.in_flight:
        return 0.0
    if view.completions_per_s:
        return excess / view.completions_per_s
    # Nothing has finished lately: from what is still to be produced, `max_running` sequences a step.
    running = max(1, min(view.in_flight, view.max_running))
    left_tokens = view.pending_output_tokens / view.in_flight or ASSUMED_OUTPUT_TOKENS
    return excess / running * left_tokens * (view.step_ms or ASSUMED_STEP_MS) / 1000


def retry_after_s(
    refusal: Refusal,
    engines_of: dict[str, str],
    snapshot: Snapshot,
    pauses_s: Mapping[str, float] = MappingProxyType({}),
) -> int | None:
    """Whole seconds for the header Retry-After; None where waiting would not help.

    Args:
        engines_of: engine by mode name.
        pauses_s: seconds until it is tried again by the name of a mode whose breaker is open (`Breakers.pauses_s`).
    """
    waits = []
    for mode, why in refusal.by_mode.items():
        if why not in _WORTH_WAITING:
            continue
        view = snapshot.engines.get(engines_of.get(mode, ""))
        if why is Ineligible.QUEUE_FULL and view is not None:
            waits.append(min(LONGEST_RETRY_S, drain_s(view)))
        elif why is Ineligible.TENANT_QUEUE_FULL and view is not None:
            # One of the tenant's own must end.
            waits.append(min(LONGEST_RETRY_S, drain_s(view, at_least=1)))
        elif why is Ineligible.BREAKER_OPEN:
            waits.append(pauses_s.get(mode, NO_ESTIMATE_RETRY_S))
        else:
            waits.append(NO_ESTIMATE_RETRY_S)
    return max(SHORTEST_RETRY_S, ceil(min(waits))) if waits else None
