"""The device's idle power, calibrated from times without any activity and from nothing else.

It does not look at windows in which an engine worked, and the baseline of a window is the one known before it. So
`measured - idle - credited` is a check of the accounts and not their definition.
"""

from __future__ import annotations

from collections import deque

_CELL_S = 1.0
_CELLS = 120
_NEAR_FLOOR = 1.1
"""Cells above this multiple of the floor were not idle: an engine that loads, or someone else's work."""
_FLOOR_QUANTILE = 0.1
_AFTER_ACTIVITY_S = 0.5
"""Clocks and voltage stay up for a while after the last step."""


class IdleBaseline:
    """Idle watts over the last two minutes of idle time; None until one second of it was seen."""

    def __init__(self, idle_w: float | None = None) -> None:
        self._carried_w = idle_w
        self._cells: deque[tuple[float, float]] = deque(maxlen=_CELLS)
        self._energy_j = 0.0
        self._length_s = 0.0
        self._active_until_s = float("-inf")

    def active(self, until_s: float) -> None:
        """An engine was active up to this moment."""
        self._active_until_s = max(self._active_until_s, until_s)

    def observe(self, start_s: float, end_s: float, measured_j: float) -> None:
        """A window in which no engine was active."""
        if start_s < self._active_until_s + _AFTER_ACTIVITY_S:
            return
        self._energy_j += measured_j
        self._length_s += end_s - start_s
        if self._length_s >= _CELL_S:
            self._cells.append((self._energy_j, self._length_s))
            self._energy_j = self._length_s = 0.0

    @property
    def idle_w(self) -> float | None:
        """Watts, or None while uncalibrated. A value carried over from an earlier run holds until it is renewed."""
        if not self._cells:
            return self._carried_w
        powers = sorted(energy_j / length_s for energy_j, length_s in self._cells)
        limit_w = powers[int(_FLOOR_QUANTILE * (len(powers) - 1))] * _NEAR_FLOOR
        # Sums and not a median: the blur at the border of two adjacent cells cancels.
        near = [cell for cell in self._cells if cell[0] <= limit_w * cell[1]]
        return sum(energy_j for energy_j, _ in near) / sum(length_s for _, length_s in near)
