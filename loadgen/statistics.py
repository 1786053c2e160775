"""Percentiles, sums of what may be unknown, and bootstrap intervals of paired comparisons."""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Z_95 = 1.959964
"""A normal distribution has 95 % of its probability within so many standard deviations."""


class Interval(NamedTuple):
    """An estimate with its bootstrap interval, over `pairs` pairs."""

    estimate: float
    low: float
    high: float
    pairs: int

    def words(self, form: str = ".3f") -> str:
        """With figures in this form. One pair has no spread to tell."""
        bounds = f"[{self.low:{form}}, {self.high:{form}}]" if self.pairs > 1 else "[one pair]"
        return f"{self.estimate:{form}} {bounds}"

    def as_json(self) -> dict[str, float | int | None]:
        """JSON has no infinity: the interval of a single pair has no ends."""
        return {key: value if math.isfinite(value) else None for key, value in self._asdict().items()}


class Summary(NamedTuple):
    """A sample in the few figures that latency is told in, all in the sample's unit."""

    n: int
    mean: float
    p50: float
    p95: float
    p99: float
    largest: float


def wilson(share: float, n: int, z: float = Z_95) -> tuple[float, float]:
    """Wilson's interval of a share (0 to 1) of n."""
    square = z * z / n
    middle, half_width = share + square / 2, z * math.sqrt(share * (1 - share) / n + square / (4 * n))
    return (middle - half_width) / (1 + square), (middle + half_width) / (1 + square)


def total(values: Iterable[float | None]) -> float | None:
    """The sum; None as soon as one value is unknown, for the others' would be too small."""
    found = list(values)
    known = [value for value in found if value is not None]
    return sum(known) if len(known) == len(found) else None


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between order statistics. Raises ValueError for an empty sample."""
    if not values:
        raise ValueError("no values to take a percentile of")
    return float(np.percentile(np.asarray(values, dtype=np.float64), percent))


def summarise(values: Sequence[float]) -> Summary | None:
    """None for an empty sample: an unknown latency is not 0."""
    if not values:
        return None
    sample = np.asarray(values, dtype=np.float64)
    p50, p95, p99 = (float(value) for value in np.percentile(sample, (50, 95, 99)))
    return Summary(len(values), float(sample.mean()), p50, p95, p99, float(sample.max()))


def ratio_of_pairs(numerators: Floats, denominators: Floats) -> Floats:
    """Geometric mean of the ratio of each pair, over the last axis: drift that both halves of a pair share cancels."""
    return np.asarray(np.exp(np.mean(np.log(numerators / denominators), axis=-1)))


def difference_of_pairs(left: Floats, right: Floats) -> Floats:
    """Median of left - right of each pair, over the last axis."""
    return np.asarray(np.median(left - right, axis=-1))


def ratio_of_means(left: Floats, right: Floats) -> Floats:
    """Mean of left over mean of right, over the last axis."""
    return np.asarray(left.mean(axis=-1) / right.mean(axis=-1))


def ratio_of_p95(left: Floats, right: Floats) -> Floats:
    """95th percentile of left over that of right, over the last axis."""
    return np.asarray(np.percentile(left, 95, axis=-1) / np.percentile(right, 95, axis=-1))


Statistic = Callable[[Floats, Floats], Floats]
_RATIOS: tuple[Statistic, ...] = (ratio_of_pairs, ratio_of_means, ratio_of_p95)


def paired_bootstrap(
    left: Sequence[float],
    right: Sequence[float],
    statistic: Statistic = ratio_of_pairs,
    *,
    confidence: float = 0.95,
    resamples: int = 4000,
    seed: int = 0,
) -> Interval:
    """Percentile interval of `statistic`, resampling whole pairs; pairs are rounds of an interleaved run.

    left, right: shape (pairs,). One pair has no spread, so its interval is infinite: (-inf, inf).
    Raises ValueError when the lengths differ, when there are none, or for a ratio of values not positive.
    """
    if len(left) != len(right) or not left:
        raise ValueError(f"pairs wanted: {len(left)} values on the left, {len(right)} on the right")
    a, b = np.asarray(left, dtype=np.float64), np.asarray(right, dtype=np.float64)
    if statistic in _RATIOS and (a.min() <= 0 or b.min() <= 0):
        raise ValueError("a ratio of pairs needs positive values")
    estimate = float(statistic(a, b))
    if len(a) == 1:
        return Interval(estimate, float("-inf"), float("inf"), 1)
    draws = np.random.default_rng(seed).integers(0, len(a), size=(resamples, len(a)))
    values = statistic(a[draws], b[draws])
    low, high = np.percentile(values, (50 * (1 - confidence), 50 * (1 + confidence)))
    return Interval(estimate, float(low), float(high), len(a))


def grouped_bootstrap(
    values: Sequence[float],
    weights: Sequence[float],
    groups: Sequence[Hashable],
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Percentile interval of the weighted mean, resampling whole groups, which are its `pairs`.

    values, weights, groups: shape (values,). One group has no spread, so its interval is infinite, as for one pair.
    Raises ValueError when there are none, or the lengths differ.
    """
    if not len(values) == len(weights) == len(groups) or not len(values):
        raise ValueError(f"{len(values)} values with {len(weights)} weights in {len(groups)} groups")
    places = {group: place for place, group in enumerate(dict.fromkeys(groups))}
    sums, totals = np.zeros(len(places)), np.zeros(len(places))
    for value, weight, group in zip(values, weights, groups, strict=True):
        sums[places[group]] += weight * value
        totals[places[group]] += weight
    estimate = float(sums.sum() / totals.sum())
    if len(places) == 1:
        return Interval(estimate, float("-inf"), float("inf"), 1)
    draws = np.random.default_rng(seed).integers(0, len(places), size=(resamples, len(places)))
    means = sums[draws].sum(axis=1) / totals[draws].sum(axis=1)
    low, high = np.percentile(means, (50 * (1 - confidence), 50 * (1 + confidence)))
    return Interval(estimate, float(low), float(high), len(places))
