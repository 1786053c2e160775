"""When a counter stepped, known better than the looks at it. Pure.

A look only tells that the counter stepped at some moment since the look before. But a counter steps at regular
intervals, and looks fall at ever different moments of its period: the one line `step k at phase + k * period` that
passes between all of the last looks is known much better than each of them. Where no line fits, the device is not
regular, and the looks alone count.
"""

from __future__ import annotations

from collections import deque

_REMEMBERED = 64
_FEWEST = 10
_SEARCH_STEPS = 16
_LEAST_BLUR_S = 0.005
"""A regular device still jitters, and so does the look itself."""


class StepClock:
    """Times a counter's steps from looks at it."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float, float]] = deque(maxlen=_REMEMBERED)
        """Number of the step, and the looks it happened between."""
        self._last_s = 0.0

    def reset(self) -> None:
        """The counter began anew; so may its phase have."""
        self._steps.clear()

    def stepped(self, after_s: float, until_s: float) -> tuple[float, float]:
        """A step happened in (after, until]. Returns its likely moment, and how far off that may be."""
        self._steps.append((self._number((after_s + until_s) / 2), after_s, until_s))
        self._last_s, blur_s = self._estimate(after_s, until_s)
        return self._last_s, blur_s

    def _estimate(self, after_s: float, until_s: float) -> tuple[float, float]:
        while len(self._steps) >= _FEWEST:
            low_s, high_s = self._fit()
            if low_s <= high_s:
                return (low_s + high_s) / 2, max((high_s - low_s) / 2, _LEAST_BLUR_S)
            # The phase has moved: the newer half may still lie on a line.
            for _ in range((len(self._steps) + 1) // 2):
                self._steps.popleft()
        return (after_s + until_s) / 2, (until_s - after_s) / 2

    def _number(self, middle_s: float) -> int:
        """A look may have come so late that the counter stepped twice."""
        if not self._steps:
            return 0
        # Two or three looks say too little of the period to count steps by it.
        period_s = self._period_s() if len(self._steps) >= _FEWEST else None
        return self._steps[-1][0] + (max(1, round((middle_s - self._last_s) / period_s)) if period_s else 1)

    def _period_s(self) -> float | None:
        if len(self._steps) < 2:
            return None
        (first, *first_s), (last, *last_s) = self._steps[0], self._steps[-1]
        return (sum(last_s) - sum(first_s)) / 2 / (last - first)

    def _fit(self) -> tuple[float, float]:
        """Bounds of the newest step's moment under the period that leaves most room (the room is concave in it)."""
        newest = self._steps[-1][0]
        ages = [(number - newest, after_s, until_s) for number, after_s, until_s in self._steps]
        middle = self._period_s() or 0.0
        # Both ends of the line lie between looks.
        span = max(until_s - after_s for _, after_s, until_s in ages) / max(-ages[0][0], 1)
        low, high = middle - 2 * span, middle + 2 * span
        for _ in range(_SEARCH_STEPS):
            third = (high - low) / 3
            if _room(ages, low + third) < _room(ages, high - third):
                low += third
            else:
                high -= third
        return _bounds(ages, (low + high) / 2)


def _bounds(ages: list[tuple[int, float, float]], period_s: float) -> tuple[float, float]:
    return (
        max([after_s - age * period_s for age, after_s, _ in ages]),
        min([until_s - age * period_s for age, _, until_s in ages]),
    )


def _room(ages: list[tuple[int, float, float]], period_s: float) -> float:
    low_s, high_s = _bounds(ages, period_s)
    return high_s - low_s
