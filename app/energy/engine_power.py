"""How much power each engine draws while it is busy, learned from what was measured.

When two engines overlap, the device tells only their sum. What each draws is seen when it runs alone, or follows from
windows that mix them differently: a least-squares fit of joules above idle to busy seconds. The fit only weighs
engines against each other; the joules they share are the measured ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from app.energy.attribution import PowerEstimate

_HALF_LIFE_S = 600.0
"""Busy seconds after which an observation counts half: batch sizes and clocks drift."""
_MIXED_WEIGHT = 0.1
"""A mixed window counts less: engines slow one another, so that their powers need not add up."""
_PRIOR_S2 = 0.001
"""Strength of the belief that all engines draw alike (or as they did in an earlier run or a profile), as the (busy
seconds)² of evidence that outweigh it."""
_KNOWN_S2 = 0.01
"""An engine's power is known from this much evidence that is its own, not shared with a companion."""
_SWEEPS = 20


class EnginePower:
    """Watts above idle while busy, by engine."""

    def __init__(self, watts: Mapping[str, float] | None = None) -> None:
        self._products: dict[tuple[str, str], float] = defaultdict(float)
        self._responses: dict[str, float] = defaultdict(float)
        self._watts: dict[str, float] = {}
        self._prior_w: dict[str, float] = {}
        self.suggest(watts or {})

    def suggest(self, watts: Mapping[str, float]) -> None:
        """What an earlier run or a profile knew of engines; of one that was seen since, what was seen counts."""
        for engine, value in watts.items():
            if engine in self._responses:
                continue
            self._prior_w[engine] = value
            # As much evidence as makes it known, so that new evidence soon outweighs it.
            self._products[engine, engine] = 2 * _KNOWN_S2
            self._responses[engine] = 2 * _KNOWN_S2 * value

    def observe(self, busy_s: Mapping[str, float], above_idle_j: float) -> None:
        """A window (or a power reading times its interval) with these busy times drew this much above idle."""
        active = {engine: busy for engine, busy in busy_s.items() if busy > 0}
        if not active:
            return
        weight = 1.0 if len(active) == 1 else _MIXED_WEIGHT
        for engine, busy in active.items():
            keep = 0.5 ** (busy / _HALF_LIFE_S)
            for pair in [pair for pair in self._products if pair[0] == engine]:
                self._products[pair] *= keep
            self._responses[engine] *= keep
            self._responses[engine] += weight * busy * above_idle_j
            for other, other_busy in active.items():
                self._products[engine, other] += weight * busy * other_busy

    def estimate(self, engines: Iterable[str]) -> PowerEstimate:
        """The best guess for those of `engines` that were seen, and which of them are more than a guess."""
        self._fit()
        watts = {engine: self._watts[engine] for engine in engines if engine in self._watts}
        known = {engine for engine, value in watts.items() if value > 0 and self._own_s2(engine) >= _KNOWN_S2}
        return PowerEstimate(watts, frozenset(known))

    def known_watts(self) -> dict[str, float]:
        """Every engine whose power is known, for the next meter to begin with."""
        estimate = self.estimate(self._responses)
        return {engine: estimate.watts[engine] for engine in sorted(estimate.known)}

    def _own_s2(self, engine: str) -> float:
        """Evidence left when what a companion explains as well is taken away (a Schur complement with each)."""
        own = self._products.get((engine, engine), 0.0)
        left = own
        for (first, other), product in self._products.items():
            if first == engine and other != engine and (theirs := self._products[other, other]) > 0:
                left = min(left, own - product * self._products[other, engine] / theirs)
        return left

    def _fit(self) -> None:
        """Coordinate descent keeps every power at 0 or more; a few sweeps from the last solution are enough."""
        engines = list(self._responses)
        evidence = sum(self._products[engine, engine] for engine in engines)
        if evidence <= 0:
            return
        total_j, total_s = 0.0, 0.0
        for engine in engines:
            total_j += self._responses[engine]
            total_s += sum(self._products.get((engine, other), 0.0) for other in engines)
        mean_w = max(total_j / total_s, 0.0)
        for _ in range(_SWEEPS):
            for engine in engines:
                explained = sum(
                    self._products.get((engine, other), 0.0) * self._watts.get(other, mean_w)
                    for other in engines
                    if other != engine
                )
                top = self._responses[engine] - explained + _PRIOR_S2 * self._prior_w.get(engine, mean_w)
                self._watts[engine] = max(top / (self._products[engine, engine] + _PRIOR_S2), 0.0)
