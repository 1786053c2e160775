"""One request on its way: what is known of it, what was decided, and what came of it, as headers and as a record."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from app.controller.body import Incoming
from app.controller.links import EngineLink
from app.controller.prompts import Prompt
from app.controller.tenants import Admission
from app.energy.rows import LONGEST_TEXT, Context, RequestRecord
from app.routing.decision import Decision, Outcome
from app.routing.features import RequestFeatures
from app.routing.shadow import Shadow
from app.routing.snapshot import Snapshot
from app.wire import Usage


@dataclass(slots=True)
class Plan:
    """A decision with everything it was made from. `named`: the request itself named the mode."""

    features: RequestFeatures
    snapshot: Snapshot
    outcome: Outcome
    policy: str
    named: bool
    context: Context
    shadows: Sequence[Shadow]
    took_us: float

    def describe(self) -> dict[str, Any]:
        """For a client that asks why."""
        return {
            **msgspec.to_builtins(self.outcome),
            "reason": self.outcome.reason,
            "features": msgspec.to_builtins(self.features),
            "shadows": msgspec.to_builtins(list(self.shadows)),
            "decided_in_us": round(self.took_us, 1),
        }


@dataclass(slots=True)
class Ticket:
    """One request, from its arrival to its record. Times are monotonic seconds."""

    key: str
    incoming: Incoming
    tenant: str
    arrived_s: float
    prompt: Prompt | None = None
    admission: Admission | None = None
    plan: Plan | None = None
    link: EngineLink | None = None
    """The engine that it was sent to last; None while no engine has it."""
    lost_engines: list[str] = field(default_factory=list)
    dispatched_s: float | None = None
    in_flight_then: int = 0
    """Requests on the device when it was sent, itself included."""

    def headers(self) -> dict[str, str]:
        """`x-modeswitch-*` of the answer."""
        headers = {"x-modeswitch-request-id": self.key}
        if self.prompt is not None and self.prompt.exact:
            headers["x-modeswitch-prompt-tokens"] = str(self.prompt.tokens)
        if self.plan is None:
            return headers
        outcome = self.plan.outcome
        headers["x-modeswitch-policy"] = outcome.policy
        headers["x-modeswitch-class"] = outcome.request_class.value
        headers["x-modeswitch-reason"] = outcome.reason
        if isinstance(outcome, Decision):
            headers["x-modeswitch-mode"] = outcome.mode
            headers["x-modeswitch-engine"] = outcome.engine
            if outcome.profile_version:
                headers["x-modeswitch-profile"] = outcome.profile_version
            if outcome.terms is not None:
                headers["x-modeswitch-predicted-ms"] = f"{outcome.terms.latency_ms:.1f}"
        return headers

    def record(self, status: str, usage: Usage | None, code: str | None = None) -> RequestRecord:
        """The request's row in the ledger. Counts and names only."""
        plan = self.plan
        decision = plan.outcome if plan is not None and isinstance(plan.outcome, Decision) else None
        said = None if self.prompt is None else self.prompt.said
        outcome: dict[str, Any] = {
            "status": status,
            "code": code,
            "stream": self.incoming.stream,
            "total_ms": round((time.monotonic() - self.arrived_s) * 1e3, 3),
            "dispatched_ms": self.dispatched_s and round((self.dispatched_s - self.arrived_s) * 1e3, 3),
            "lost_engines": list(self.lost_engines),
            "usage": usage and asdict(usage),
        }
        return RequestRecord(
            request_id=self.key,
            recorded_s=time.time(),
            mode=None if decision is None else decision.mode,
            engine=None if decision is None else decision.engine,
            tenant=self.tenant,
            request_class=None if plan is None else plan.outcome.request_class.value,
            status=status,
            features={} if plan is None else _json(plan.features),
            snapshot={} if plan is None else _json(plan.snapshot),
            decision={}
            if plan is None
            else {
                "policy": plan.policy,
                "named": plan.named,
                # Of the first turn, too: a controller that was started again knows conversations from here.
                "conversation": said and [said.began, said.so_far],
                "decision": _json(plan.outcome),
                # A refusal names every mode; with many of them the ledger would take it for a user's text.
                "reason": plan.outcome.reason[:LONGEST_TEXT],
                "shadows": [_json(shadow) for shadow in plan.shadows],
                "decided_in_us": round(plan.took_us, 1),
            },
            outcome=outcome,
            context=None if plan is None else plan.context,
        )


def _json(value: Any) -> Any:
    """Plain JSON of a record; a score that is not finite becomes None, since JSON has no other word for it."""
    return _finite(msgspec.to_builtins(value))


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
    return value
