"""Online correction of the profile: observed against predicted latency, per engine and per engine and tag.

This is how a policy learns that speculation pays on rewriting and not on free text, and that a device is slower than
when it was measured. Modes of one engine run the same way: a factor for each would let noise choose between them, and
one that reuses prefixes lose to one that does not. Factors are bounded and visible (`Snapshot.corrections`).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, inf, log

from app.routing.tags import Tag

LOWEST_FACTOR = 0.4
HIGHEST_FACTOR = 2.5
HALF_LIFE_S = 1800.0
PRIOR_SAMPLES = 5.0
"""Samples that the wider estimate counts for: a tag's against its engine's, an engine's against 1."""
MAX_EFFECTIVE_SAMPLES = 50.0


def correction_key(name: str, tag: Tag) -> str:
    # Concatenation, since formatting an enum member takes ten times as long.
    return name + ":" + tag


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


class Corrections:
    """Learns one factor per engine and one per engine and tag; memory is bounded by their number."""

    __slots__ = ("_factors", "_ratios")

    def __init__(self) -> None:
        self._ratios: dict[str, _LogRatio] = {}
        self._factors: Mapping[str, float] = {}

    @property
    def factors(self) -> Mapping[str, float]:
        """By `engine` and `engine:tag`, within the bounds. Never changed: there is a new one after each sample."""
        return self._factors

    def observe(self, engine: str, tag: Tag, observed_ms: float, predicted_ms: float, now_s: float) -> None:
        """A finished request took `observed_ms` in the engine where the profile alone predicts `predicted_ms`.

        The prediction must be without correction (`CostTerms.latency_ms` divided by `correction` where there was no
        queue), and for the tokens really produced. Times that are not above 0 and finite are ignored.
        """
        if not (0 < observed_ms < inf and 0 < predicted_ms < inf):
            return
        # A single request, however odd, counts for no more than twice the bounds.
        log_ratio = min(2 * log(HIGHEST_FACTOR), max(2 * log(LOWEST_FACTOR), log(observed_ms) - log(predicted_ms)))
        key = correction_key(engine, tag)
        for name in (engine, key):
            ratio = self._ratios.get(name)
            if ratio is None:
                ratio = self._ratios[name] = _LogRatio(now_s)
            ratio.add(log_ratio, now_s)
        factors = dict(self._factors)
        of_engine = self._ratios[engine]
        wide = of_engine.total / (of_engine.weight + PRIOR_SAMPLES)
        factors[engine] = _bounded(wide)
        for name, ratio in self._ratios.items():
            if name.startswith(f"{engine}:"):
                factors[name] = _bounded((ratio.total + PRIOR_SAMPLES * wide) / (ratio.weight + PRIOR_SAMPLES))
        self._factors = factors


def _bounded(log_factor: float) -> float:
    return min(HIGHEST_FACTOR, max(LOWEST_FACTOR, exp(log_factor)))
