"""What a policy answers: a decision that explains itself, or a refusal with typed reasons."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from app.routing.classes import RequestClass
from app.routing.json_record import JsonRecord


class Ineligible(StrEnum):
    """Why a mode may not serve a request. Also the code of a refusal, when no mode may."""

    UNKNOWN_MODE = "unknown_mode"
    EXCLUDED = "failed_this_request"
    UNHEALTHY = "engine_unhealthy"
    NOT_RESIDENT = "engine_not_resident"
    BREAKER_OPEN = "circuit_breaker_open"
    NOT_LOSSLESS = "quality_exact_needs_lossless"
    QUALITY_FAILED = "quality_gate_failed"
    QUALITY_UNPROVEN = "quality_not_measured"
    OTHER_WEIGHTS = "conversation_keeps_weights"
    MEMORY = "memory_above_limit"
    ENERGY = "energy_above_limit"
    UNPROFILED = "not_in_profile"
    QUEUE_FULL = "queue_full"
    TENANT_QUEUE_FULL = "tenant_queue_full"


class LostBy(StrEnum):
    """What the runner-up lost by: the cost term that made most of the difference, or a rule."""

    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"
    INTERFERENCE = "interference"
    OTHERS = "delay_to_others"
    WAKE = "wake_up"
    ENERGY = "energy"
    LATENCY_LIMIT = "latency_limit"
    PREFIX_REUSE = "tie_goes_to_prefix_reuse"
    ORDER = "tie_goes_to_the_first"
    CONSOLIDATION = "all_work_on_one_engine"
    EXPLORATION = "exploration"
    LATER_RULE = "later_rule"
    SCORE = "predicted_score"


class CostTerms(JsonRecord, frozen=True, kw_only=True):
    """Predicted cost of one mode. Corrections are already in the terms.

    `latency_ms` is the sum of queue, prefill, decode, interference and wake; `others_ms` is the delay the request
    would cause to those already running. `score` is what was compared: milliseconds, joules, or a ratio if weighted.
    """

    queue_ms: float
    prefill_ms: float
    decode_ms: float
    interference_ms: float
    others_ms: float
    wake_ms: float
    correction: float
    latency_ms: float
    energy_j: float | None
    score: float


class Decision(JsonRecord, frozen=True, kw_only=True):
    """The chosen mode and why. All a log needs, without text of the request."""

    mode: str
    engine: str
    request_class: RequestClass
    policy: str
    settings_version: str
    profile_version: str | None = None
    rule: str | None = None
    """The rule that matched, for a policy made of rules."""
    terms: CostTerms | None = None
    runner_up: str | None = None
    runner_up_terms: CostTerms | None = None
    lost_by: LostBy | None = None
    stands_in_for: str | None = None
    """The policy that could not decide (no profile, say) and left it to this one."""
    explored: bool = False

    @property
    def reason(self) -> str:
        """The decision in one sentence."""
        words = f"{self.mode} for a {self.request_class.value} request"
        if self.explored:
            words = f"{words}, drawn at random to learn"
        elif self.rule is not None:
            words = f"{words} by the rule '{self.rule}'"
        elif self.terms is not None:
            words = f"{words}: predicted {_figures(self.terms)}"
        if self.runner_up is not None and self.lost_by is not None and not self.explored:
            words = f"{words}; {self.runner_up} lost by {self.lost_by.value.replace('_', ' ')}"
            if self.runner_up_terms is not None:
                words = f"{words} ({_figures(self.runner_up_terms)})"
        if self.stands_in_for is not None:
            words = f"{words}; {self.policy} stands in for {self.stands_in_for}"
        return f"{words}."


class Refusal(JsonRecord, frozen=True, kw_only=True):
    """No mode may serve the request: the code, and each mode's own."""

    code: Ineligible
    request_class: RequestClass
    policy: str
    settings_version: str
    by_mode: Mapping[str, Ineligible] = msgspec.field(default_factory=dict)

    @property
    def reason(self) -> str:
        """The refusal in one sentence."""
        modes = ", ".join(f"{mode}: {why.value.replace('_', ' ')}" for mode, why in self.by_mode.items())
        return f"No mode can serve this {self.request_class.value} request ({modes or 'none is deployed'})."


Outcome = Decision | Refusal


def _figures(terms: CostTerms) -> str:
    energy = "" if terms.energy_j is None else f" and {terms.energy_j:.3g} J"
    return f"{terms.latency_ms:.0f} ms{energy}"
