"""What a request asks of the choice, from its headers and metadata."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.controller.errors import invalid
from app.routing.features import Objective, Quality, Wishes
from app.wire import Endpoint

_MOST = 10**9
"""Larger counts are taken for this, since arithmetic with them ends somewhere."""
_COMPLETION_TOKENS = 16
"""OpenAI's limit for a completion that sets none."""
_NUMBERS = frozenset({"deadline-ms", "latency-limit-ms", "energy-weight"})
_OBJECTIVES = ", ".join(objective.value for objective in Objective)


@dataclass(frozen=True, slots=True)
class Asked:
    """Headers `x-modeswitch-*`, each also `metadata.<name>` in the body (a header wins)."""

    wishes: Wishes
    policy: str | None
    label: str | None
    """`x-modeswitch-workload`: what kind of work it is. One that is too long is ignored."""
    deadline_s: float | None
    """`x-modeswitch-deadline-ms`, from the request's arrival."""


def read_asked(headers: Mapping[str, str], metadata: Any, otherwise: Objective = Objective.LATENCY) -> Asked:
    """What is asked for; `otherwise` is the objective of a request that neither names nor implies one.

    Raises:
        ApiError: 400 for an objective, quality or number that makes no sense.
    """
    known = metadata if isinstance(metadata, Mapping) else {}

    def asked(name: str) -> str | None:
        value = headers.get(f"x-modeswitch-{name}")
        if value is None:
            value = known.get(name.replace("-", "_"))
        if name in _NUMBERS and value is not None and not isinstance(value, str):
            # A number of JSON; anything else is refused where it is read as one.
            value = json.dumps(value)
        return value.strip() if isinstance(value, str) and value.strip() else None

    deadline_ms = _number(asked("deadline-ms"), "deadline-ms")
    deadline_s = None if deadline_ms is None else deadline_ms / 1e3
    return Asked(_wishes(asked, otherwise), asked("policy"), asked("workload"), deadline_s)


def _wishes(asked: Any, otherwise: Objective) -> Wishes:
    """`x-modeswitch-objective`, `-latency-limit-ms`, `-energy-weight` and `-quality`."""
    objective, quality = asked("objective"), asked("quality")
    limit_ms = _number(asked("latency-limit-ms"), "latency-limit-ms")
    weight = asked("energy-weight")
    try:
        return Wishes(
            objective=_objective(objective, limit_ms is not None, weight is not None) or otherwise,
            latency_limit_ms=limit_ms,
            energy_weight=None if weight is None else float(weight),
            quality=Quality(quality or Quality.GATED),
        )
    except ValueError as error:
        hint = f"objective is one of {_OBJECTIVES}; quality is gated or exact"
        raise invalid(f"{error} ({hint})", "metadata", "invalid_objective") from None


def _objective(named: str | None, limited: bool, weighted: bool) -> Objective | None:
    """The objective that is named, or that a latency limit or an energy weight stands for; None without any.

    Raises:
        ValueError: they contradict one another, so that one of them would be without effect.
    """
    objective = None if named is None else Objective(named)
    if limited and objective in (None, Objective.ENERGY):
        objective = Objective.LIMIT
    elif weighted and objective is None:
        objective = Objective.WEIGHTED
    if limited and objective is not Objective.LIMIT:
        raise ValueError(f"a latency limit asks for the least energy within it, and not for {named!r}")
    if weighted and objective is not Objective.WEIGHTED:
        raise ValueError(f"an energy weight goes with the objective 'weighted', not {str(objective)!r}")
    return objective


def _number(text: str | None, name: str) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise invalid(f"x-modeswitch-{name} must be a number above 0, not {text[:40]!r}", code="invalid_header")
    return value


def max_tokens_of(endpoint: Endpoint, body: Mapping[str, Any]) -> int | None:
    """The limit of output tokens of each of a request's choices; None for a chat that sets none."""
    if endpoint is Endpoint.COMPLETION:
        given = body.get("max_tokens")
        return _COMPLETION_TOKENS if given is None else _count(given)
    for name in ("max_completion_tokens", "max_tokens"):
        if (limit := _count(body.get(name))) is not None:
            return limit
    return None


def choices_of(body: Mapping[str, Any]) -> int:
    """How many answers each prompt is to get."""
    return _count(body.get("n")) or 1


def _count(value: Any) -> int | None:
    """A whole number above 0; the engine refuses anything else, and what is beyond all sense."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return min(value, _MOST) if is_count else None
