"""The constraint-aware oracle: with every mode measured on a workload, the fastest that breaks no constraint.

Source: ModeSwitch-LLM (arXiv 2605.23057), oracle policy. Pure: tables in, choices and scores out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Constraint(StrEnum):
    """What a choice can break."""

    QUALITY = "quality"
    ENERGY = "energy"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Measured:
    """One mode on one workload. Energy in J/token, memory in MB at its peak; None was not measured."""

    latency_ms: float
    energy_j_per_token: float | None = None
    memory_mb: float | None = None
    accuracy_pct: float | None = None
    rouge_reference: float | None = None  # ROUGE-L to a reference answer, 0..1
    rouge_fp16: float | None = None  # ROUGE-L to the reference mode's own answer, 0..1
    tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Constraints:
    """The paper's limits against the reference mode. What was not measured on both sides breaks none."""

    energy_ratio_max: float = 1.0
    memory_ratio_max: float = 1.02
    accuracy_drop_max_points: float = 1.5
    rouge_reference_drop_max: float = 0.02
    rouge_fp16_min: float = 0.80

    def broken_by(self, mode: Measured, reference: Measured) -> frozenset[Constraint]:
        """The constraints that `mode` breaks on the workload of `reference`."""
        broken = set()
        if (_quotient(mode.energy_j_per_token, reference.energy_j_per_token) or 0.0) > self.energy_ratio_max:
            broken.add(Constraint.ENERGY)
        if (_quotient(mode.memory_mb, reference.memory_mb) or 0.0) > self.memory_ratio_max:
            broken.add(Constraint.MEMORY)
        if self._quality_lost(mode, reference):
            broken.add(Constraint.QUALITY)
        return frozenset(broken)

    def judged(self, mode: Measured, reference: Measured) -> frozenset[Constraint]:
        """The constraints that enough was measured for to tell whether `mode` breaks them."""
        pairs = {
            Constraint.ENERGY: [(mode.energy_j_per_token, reference.energy_j_per_token or None)],
            Constraint.MEMORY: [(mode.memory_mb, reference.memory_mb or None)],
            Constraint.QUALITY: [
                (mode.accuracy_pct, reference.accuracy_pct),
                (mode.rouge_fp16, 1.0),
                (mode.rouge_reference, reference.rouge_reference),
            ],
        }
        return frozenset(kind for kind, values in pairs.items() if any(None not in pair for pair in values))

    def _quality_lost(self, mode: Measured, reference: Measured) -> bool:
        # Where a workload has right answers, these decide, and not the likeness of its text.
        if mode.accuracy_pct is not None and reference.accuracy_pct is not None:
            return reference.accuracy_pct - mode.accuracy_pct > self.accuracy_drop_max_points
        if mode.rouge_fp16 is not None and mode.rouge_fp16 < self.rouge_fp16_min:
            return True
        if mode.rouge_reference is None or reference.rouge_reference is None:
            return False
        return reference.rouge_reference - mode.rouge_reference > self.rouge_reference_drop_max


Table = Mapping[str, Mapping[str, Measured]]
"""Measurements by workload, then by mode."""


def safe_modes(by_mode: Mapping[str, Measured], reference_mode: str, constraints: Constraints) -> list[str]:
    """The modes that break nothing, fastest first; the reference itself breaks nothing by definition.

    Raises KeyError when the reference was not measured.
    """
    reference = by_mode[reference_mode]
    safe = [
        name for name, mode in by_mode.items() if name == reference_mode or not constraints.broken_by(mode, reference)
    ]
    return sorted(safe, key=lambda name: (by_mode[name].latency_ms, name))


def best_mode(by_mode: Mapping[str, Measured], reference_mode: str, constraints: Constraints) -> str:
    """The fastest of `safe_modes`. Raises KeyError as that does."""
    return safe_modes(by_mode, reference_mode, constraints)[0]


@dataclass(frozen=True, slots=True)
class Score:
    """A policy on a table, weighted by requests; ratios against the reference mode, 1 is equal."""

    requests: int
    speedup: float
    energy_ratio: float | None
    latency_capture: float  # mean of oracle latency / policy latency; above 1 where it breaks constraints to be faster
    energy_capture: float | None  # mean of oracle J/token over the policy's
    oracle_match: float
    broken: dict[Constraint, int]  # requests whose mode breaks it
    unsafe: int  # requests whose mode breaks anything


def score(
    choices: Mapping[str, str],
    table: Table,
    requests: Mapping[str, int],
    reference_mode: str,
    constraints: Constraints,
    *,
    overhead_ms: float = 0.0,
) -> Score:
    """Scores `choices` (mode by workload) on `requests` (count by workload).

    overhead_ms is added to the policy's latency of every request. Raises KeyError for what the table lacks.
    """
    parts = [
        _part(table[workload], choices[workload], reference_mode, constraints, overhead_ms, count)
        for workload, count in requests.items()
    ]
    total = sum(part.requests for part in parts)
    return Score(
        requests=total,
        speedup=_mean([(part.requests, part.speedup) for part in parts]) or 0.0,
        energy_ratio=_mean([(part.requests, part.energy_ratio) for part in parts]),
        latency_capture=_mean([(part.requests, part.latency_capture) for part in parts]) or 0.0,
        energy_capture=_mean([(part.requests, part.energy_capture) for part in parts]),
        oracle_match=sum(part.requests for part in parts if part.matches) / total,
        broken={kind: sum(part.requests for part in parts if kind in part.broken) for kind in Constraint},
        unsafe=sum(part.requests for part in parts if part.broken),
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """One workload's share of a score."""

    requests: int
    speedup: float
    energy_ratio: float | None
    latency_capture: float
    energy_capture: float | None
    matches: bool
    broken: frozenset[Constraint]


def _part(
    by_mode: Mapping[str, Measured],
    choice: str,
    reference_mode: str,
    constraints: Constraints,
    overhead_ms: float,
    requests: int,
) -> _Part:
    chosen, reference = by_mode[choice], by_mode[reference_mode]
    best_name = best_mode(by_mode, reference_mode, constraints)
    best = by_mode[best_name]
    latency_ms = chosen.latency_ms + overhead_ms
    return _Part(
        requests=requests,
        speedup=reference.latency_ms / latency_ms,
        energy_ratio=_quotient(chosen.energy_j_per_token, reference.energy_j_per_token),
        latency_capture=best.latency_ms / latency_ms,
        energy_capture=_quotient(best.energy_j_per_token, chosen.energy_j_per_token),
        matches=choice == best_name,
        broken=frozenset() if choice == reference_mode else constraints.broken_by(chosen, reference),
    )


def _quotient(value: float | None, by: float | None) -> float | None:
    return None if value is None or not by else value / by


def _mean(weighted: list[tuple[int, float | None]]) -> float | None:
    """Mean over requests; None when a part is unknown, since leaving it out would compare unlike sets."""
    known = [(weight, value) for weight, value in weighted if value is not None]
    if len(known) < len(weighted) or not known:
        return None
    return sum(weight * value for weight, value in known) / sum(weight for weight, _ in known)
