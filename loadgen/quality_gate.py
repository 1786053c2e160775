"""The quality gate: from paired measurements of a mode and the reference to an outcome with its confidence interval.

A combination is never inferred from its parts. Modes of one engine share what is one computation, such as a text read
without cached prefixes; one that reuses prefixes, speculates, or keeps its KV cache in another type must show its own
answers too.
Pure.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import fmean

import numpy as np

from app.routing.profile import GateOutcome, QualityEvidence
from loadgen.statistics import Z_95, Floats, Interval, paired_bootstrap, wilson

ACCURACY = "accuracy_points"
KL = "kl_nats_per_token"
GENERATED_KL = "generated_kl_nats_per_token"
"""The same of the mode's own answers, the ones to repeated prompts where it reuses prefixes."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a mode may lose against the reference.

    kl_max_nats: 0.05 nats a token make text drawn from the reference at most exp(0.05) - 1 = 5 % more perplexing.
    Accuracy: the bound of ModeSwitch-LLM (arXiv 2605.23057).
    """

    accuracy_drop_max_points: float = 1.5
    kl_max_nats: float = 0.05
    kl_covered_min: float = 0.8  # share of the reference's probability that must have been compared for a pass
    bootstrap_samples_min: int = 20  # below, a bootstrap interval is too narrow to be trusted


def kl_meaning(limits: Limits) -> str:
    """What a verdict by KL says, for people."""
    return (
        f"The KL that passes is below {limits.kl_max_nats:g} nats a token. It is a lower bound: tokens that both modes "
        "list are compared one by one, all others count as one. So a fail is certain, and a pass is given only where "
        f"{100 * limits.kl_covered_min:.0f} % of the reference's probability were compared."
    )


@dataclass(frozen=True, slots=True)
class PairedAnswer:
    """One question answered by both. `chance`: the probability that a blind guess is right."""

    reference_right: bool
    mode_right: bool
    chance: float


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far a mode strays from the reference on one text; `covered` is in 0..1."""

    kl_nats: float  # mean over tokens
    covered: float


def accuracy_evidence(
    mode: str, scope: str, answers: Sequence[PairedAnswer], limits: Limits | None = None
) -> QualityEvidence:
    """Points of accuracy gained (negative: lost) against the reference; `samples` are questions."""
    limits = limits or Limits()
    if not answers:
        return QualityEvidence(mode=mode, scope=scope, outcome=GateOutcome.INSUFFICIENT, metric=ACCURACY)
    lost = sum(answer.reference_right and not answer.mode_right for answer in answers)
    gained = sum(answer.mode_right and not answer.reference_right for answer in answers)
    delta, low, high = (100 * value for value in paired_difference(gained, lost, len(answers)))
    right = sum(answer.reference_right for answer in answers)
    if wilson_low(right, len(answers)) <= fmean(answer.chance for answer in answers):
        outcome = GateOutcome.NO_SIGNAL
    else:
        outcome = judge(low, high, -limits.accuracy_drop_max_points)
    return QualityEvidence(
        mode=mode,
        scope=scope,
        outcome=outcome,
        metric=ACCURACY,
        delta=delta,
        low=low,
        high=high,
        samples=len(answers),
    )


def kl_evidence(
    mode: str, scope: str, texts: Sequence[Divergence], limits: Limits | None = None, *, metric: str = KL
) -> QualityEvidence:
    """Nats by which the mode strays, negated so that negative is worse; `samples` are texts, the unit resampled.

    What was not compared can only add to a KL: above the bound is a fail whatever was covered, below it a pass only
    where enough was.
    """
    limits = limits or Limits()
    if not texts:
        return QualityEvidence(mode=mode, scope=scope, outcome=GateOutcome.INSUFFICIENT, metric=metric)
    interval = mean_interval([-text.kl_nats for text in texts])
    covered = fmean(text.covered for text in texts)
    outcome = judge(interval.low, interval.high, -limits.kl_max_nats)
    if len(texts) < limits.bootstrap_samples_min or (outcome is GateOutcome.PASS and covered < limits.kl_covered_min):
        outcome = GateOutcome.INSUFFICIENT
    return QualityEvidence(
        mode=mode,
        scope=scope,
        outcome=outcome,
        metric=metric,
        delta=interval.estimate,
        low=_finite(interval.low),
        high=_finite(interval.high),
        samples=len(texts),
        covered=covered,
    )


def evidence(
    mode: str,
    scope: str,
    answers: Sequence[PairedAnswer],
    texts: Sequence[Divergence] = (),
    limits: Limits | None = None,
) -> QualityEvidence:
    """The one piece of evidence for a mode in a scope, from right answers and from teacher-forced text."""
    found = []
    if answers:
        found.append(accuracy_evidence(mode, scope, answers, limits))
    if texts or not answers:
        found.append(kl_evidence(mode, scope, texts, limits))
    return settle(found)


def settle(found: Sequence[QualityEvidence]) -> QualityEvidence:
    """The piece that decides: the first, in the order given, that passes or fails; else the first of all.

    Accuracy goes before KL: where there are right answers and enough of them, likeness to the reference is secondary.
    Raises ValueError when there is none.
    """
    if not found:
        raise ValueError("no evidence to settle")
    decisive = (item for item in found if item.outcome in (GateOutcome.PASS, GateOutcome.FAIL))
    return next(decisive, found[0])


def judge(low: float, high: float, bound: float) -> GateOutcome:
    """`pass` when the whole interval is above `bound`, `fail` when none of it is."""
    if low > bound:
        return GateOutcome.PASS
    return GateOutcome.FAIL if high <= bound else GateOutcome.INSUFFICIENT


def wilson_low(right: int, total: int, z: float = Z_95) -> float:
    """Lower end of Wilson's interval of a share."""
    return wilson(right / total, total, z)[0]


def paired_difference(gained: int, lost: int, total: int, z: float = Z_95) -> tuple[float, float, float]:
    """(gained - lost) / total with Tango's score interval.

    A bootstrap would call a handful of pairs that all agree certain; this interval stays as wide as their number
    allows: 252 pairs without one difference are needed to rule out a loss of 1.5 points.
    Source: Tango, Statistics in Medicine 17 (1998) 891-908.
    """
    estimate = (gained - lost) / total

    def distance(delta: float) -> float:
        b = -gained - lost + (2 * total - gained + lost) * delta
        c = -lost * delta * (1 - delta)
        lost_share = (sqrt(max(0.0, b * b - 8 * total * c)) - b) / (4 * total)
        variance = total * (2 * lost_share + delta * (1 - delta))
        return abs(gained - lost - total * delta) / sqrt(variance) - z if variance > 0 else inf

    return estimate, _crossing(distance, estimate, -1.0), _crossing(distance, estimate, 1.0)


def _crossing(distance: Callable[[float], float], inside: float, outside: float) -> float:
    """Where the score first exceeds its limit between the estimate and the end of the range, by bisection."""
    for _ in range(60):
        middle = (inside + outside) / 2
        if distance(middle) < 0:
            inside = middle
        else:
            outside = middle
    return outside


def mean_interval(values: Sequence[float]) -> Interval:
    """The mean with its 95 % bootstrap interval. Raises ValueError for no values."""
    return paired_bootstrap(values, [0.0] * len(values), _mean_difference)


def mean_difference_interval(left: Sequence[float], right: Sequence[float]) -> Interval:
    """Mean of left - right over pairs, with its 95 % bootstrap interval. Raises ValueError for no pairs."""
    return paired_bootstrap(left, right, _mean_difference)


def _mean_difference(left: Floats, right: Floats) -> Floats:
    return np.asarray(np.mean(left - right, axis=-1))


def _finite(value: float) -> float | None:
    """JSON has no infinity; an end that is not known is null."""
    return value if abs(value) != inf else None
