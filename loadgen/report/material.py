"""What a report is made of, whichever command measured it: the drawing code knows no file format."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from loadgen.statistics import wilson


class Estimate(NamedTuple):
    """A figure with its 95 % interval and what it rests on; None where that is not known."""

    value: float
    low: float | None = None
    high: float | None = None
    n: int | None = None

    @classmethod
    def read(cls, interval: Mapping[str, Any]) -> Self:
        """From an `Interval` as the commands write it. Raises KeyError, TypeError or ValueError for another form."""
        value, low, high = (_finite(interval[name]) for name in ("estimate", "low", "high"))
        if value is None:
            raise ValueError("an estimate that is no number")
        return cls(value, low, high, int(interval["pairs"]))

    @classmethod
    def percent(cls, percent: float, n: int) -> Self:
        """A share of n questions with Wilson's 95 % interval, all in percent. Raises ValueError for what is none."""
        if not (0 <= percent <= 100 and n > 0):
            raise ValueError(f"{percent} % of {n} questions is no share")
        low, high = wilson(percent / 100, n)
        return cls(percent, 100 * low, 100 * high, n)

    @property
    def inverse(self) -> "Estimate":
        """Of a ratio the other way round: latencies become a speed-up."""
        return Estimate(1 / self.value, _inverse(self.high), _inverse(self.low), self.n)

    @property
    def words(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.2f}"
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"

    @property
    def errors(self) -> tuple[float, float]:
        """Distances from the value down and up to the ends of the interval; 0 where there is none."""
        low = self.value if self.low is None else self.low
        high = self.value if self.high is None else self.high
        return max(0.0, self.value - low), max(0.0, high - self.value)


def _finite(value: Any) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _inverse(value: float | None) -> float | None:
    return None if not value else 1 / value


@dataclass(frozen=True, slots=True)
class Effect:
    """One mode on one workload, as ratios to the reference mode there. Speed-up: latency the other way round."""

    workload: str
    mode: str
    speedup: Estimate
    energy_ratio: Estimate | None = None


@dataclass(frozen=True, slots=True)
class Screening:
    """All modes on all workloads."""

    source: str
    reference: str
    effects: Sequence[Effect]

    @property
    def workloads(self) -> list[str]:
        return list(dict.fromkeys(effect.workload for effect in self.effects))

    @property
    def modes(self) -> list[str]:
        """Without the reference, whose ratios are 1."""
        return [mode for mode in dict.fromkeys(effect.mode for effect in self.effects) if mode != self.reference]


@dataclass(frozen=True, slots=True)
class Family:
    """A policy on one kind of request: what it won, and which modes it chose how often."""

    name: str
    speedup: Estimate | None
    energy_ratio: Estimate | None
    choices: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Controlled:
    """One policy by kind of request, as ratios to `reference`."""

    source: str
    policy: str
    setting: str
    reference: str
    families: Sequence[Family]


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """One policy over everything. Shares are 0 to 1; unknown is None."""

    name: str
    requests: int
    speedup: Estimate | None
    energy_ratio: Estimate | None = None
    oracle_share: float | None = None
    """The oracle's latency over this one's; 1 is as fast as the oracle."""
    oracle_match: float | None = None
    unsafe: int | None = None
    """Requests whose choice breaks a constraint."""
    errors: int | None = None
    overhead_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Policies side by side, as ratios to `reference`."""

    source: str
    setting: str
    reference: str
    rows: Sequence[PolicyRow]
    resampled: str = "paired requests"
    """What the intervals resample."""


ACCURACY = "accuracy (%)"


@dataclass(frozen=True, slots=True)
class Accuracy:
    """A mode's score on a benchmark, or its difference to the reference's, in the metric's units."""

    mode: str
    scope: str
    metric: str
    value: Estimate
    outcome: str = ""


@dataclass(frozen=True, slots=True)
class Confusion:
    """`matrix[true][predicted]` in requests."""

    source: str
    name: str
    labels: Sequence[str]
    matrix: Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Sample:
    """Latencies in ms of one group's successful requests."""

    group: str
    total_ms: Sequence[float]
    ttft_ms: Sequence[float] = ()


class Served(NamedTuple):
    """One request in time, in seconds from the start of its run."""

    started_s: float
    ended_s: float
    mode: str
    energy_j: float | None


@dataclass(frozen=True, slots=True)
class Latencies:
    """Groups whose distributions are compared."""

    source: str
    samples: Sequence[Sample]


@dataclass(frozen=True, slots=True)
class Timeline:
    """A run in time."""

    source: str
    requests: Sequence[Served]


@dataclass(slots=True)
class Material:
    """Everything found; `unreadable` says of each file what is wrong with it."""

    title: str
    screenings: list[Screening] = field(default_factory=list)
    controlled: list[Controlled] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    accuracies: list[tuple[str, list[Accuracy]]] = field(default_factory=list)
    confusions: list[Confusion] = field(default_factory=list)
    latencies: list[Latencies] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
