"""Online correction of the profile: observed against predicted latency, per engine and per engine and tag.

This is how a policy learns that speculation pays on rewriting and not on free text, and that a device is slower or
faster than when it was measured. Modes of one engine run the same way: a factor for each would let noise choose between
them, and one that reuses prefixes lose to one that does not. Factors are bounded and visible (`Snapshot.corrections`).

Engines share a device. Where those in use are faster than in the profile, the others are taken to be as well until
they are seen: else they would look slow for ever, and never be tried. Where those in use are slower, the others are
not taken to be, so that they are tried, and one slow engine is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import exp, inf, log
from statistics import fmean

from app.routing.tags import Tag

LOWEST_FACTOR = 0.1
HIGHEST_FACTOR = 10.0
"""Wide, for machines of one name differ threefold, and engines at the bound could not be told apart any more."""
HALF_LIFE_S = 1800.0
PRIOR_SAMPLES = 5.0
"""Samples that the wider estimate counts for: a tag's against its engine's, an engine's against the other engines'."""
MAX_EFFECTIVE_SAMPLES = 50.0
_SURPRISE = log(2.5)
"""A single request, however odd, counts for no more: the first one in an engine takes ten times as long as the next."""
UNSEEN = "*"
"""The name under which the factor of engines without a sample stands."""


def correction_key(name: str, tag: Tag) -> str:
    # Concatenation, since formatting an enum member takes ten times as long.
    return name + ":" + tag


def engine_correction(factors: Mapping[str, float], engine: str) -> float:
    """The factor of an engine, whatever the tag; 1 while nothing is learned."""
    return factors.get(engine, 0.0) or factors.get(UNSEEN, 1.0)


class _LogRatio:
    __slots__ = ("last_s", "total", "weight")

    def __init__(self, now_s: float) -> None:
        self.weight = 0.0
        self.total = 0.0
        self.last_s = now_s

    def add(self, log_ratio: float, now_s: float) -> None:
        keep = 0.5 ** (max(0.0, now_s - self.last_s) / HALF_LIFE_S)
        if self.weight * keep > MAX_EFFECTIVE_SAMPLES - 1:
            keep = (MAX_EFFECTIVE_SAMPLES - 1) / self.weight
        self.weight = self.weight * keep + 1.0
        self.total = self.total * keep + log_ratio
        self.last_s = max(self.last_s, now_s)

    def leaning_on(self, wider: float) -> float:
        """The mean, where `wider` is expected before there are samples."""
        return (self.total + PRIOR_SAMPLES * wider) / (self.weight + PRIOR_SAMPLES)


class Corrections:
    """Learns one factor per engine and one per engine and tag; memory is bounded by their number."""

    __slots__ = ("_engines", "_factors", "_tags")

    def __init__(self) -> None:
        self._engines: dict[str, _LogRatio] = {}
        self._tags: dict[str, dict[str, _LogRatio]] = {}
        self._factors: Mapping[str, float] = {}

    @property
    def factors(self) -> Mapping[str, float]:
        """By `engine`, `engine:tag` and `UNSEEN`, within the bounds. Never changed: each sample makes a new one."""
        return self._factors

    def observe(self, engine: str, tag: Tag, observed_ms: float, predicted_ms: float, now_s: float) -> None:
        """A finished request took `observed_ms` in the engine where the profile alone predicts `predicted_ms`.

        The prediction must be without correction (`CostTerms.latency_ms` divided by `correction` where there was no
        queue), and for the tokens really produced. Times that are not above 0 and finite are ignored.
        """
        if not (0 < observed_ms < inf and 0 < predicted_ms < inf):
            return
        expected = log(engine_correction(self._factors, engine))
        log_ratio = _within(log(observed_ms) - log(predicted_ms), expected - _SURPRISE, expected + _SURPRISE)
        log_ratio = _within(log_ratio, log(LOWEST_FACTOR), log(HIGHEST_FACTOR))
        tags = self._tags.setdefault(engine, {})
        self._engines.setdefault(engine, _LogRatio(now_s)).add(log_ratio, now_s)
        tags.setdefault(correction_key(engine, tag), _LogRatio(now_s)).add(log_ratio, now_s)
        self._factors = self._worked_out()

    def _worked_out(self) -> dict[str, float]:
        seen = {name: ratio.leaning_on(0.0) for name, ratio in self._engines.items()}
        factors = {UNSEEN: exp(_faster(seen.values()))}
        for engine, ratio in self._engines.items():
            wide = ratio.leaning_on(_faster(found for name, found in seen.items() if name != engine))
            factors[engine] = exp(wide)
            for key, of_tag in self._tags[engine].items():
                factors[key] = exp(of_tag.leaning_on(wide))
        return factors


def _within(value: float, low: float, high: float) -> float:
    return min(high, max(low, value))


def _faster(log_ratios: Iterable[float]) -> float:
    """How much faster these engines are than in the profile, on average; 0 where they are not."""
    found = tuple(log_ratios)
    return min(0.0, fmean(found)) if found else 0.0
