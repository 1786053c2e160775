"""One device over time: its points and its engines' activity come in, settled windows go out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from app.energy.activity import Slice
from app.energy.attribution import Placed, Settlement, TokenWeights, Window, settle
from app.energy.baseline import IdleBaseline
from app.energy.engine_power import EnginePower
from app.energy.samplers.base import Point, Sampler
from app.energy.windows import active_at, cut, edges, reach_s, spans

_KEEP_S = 1.5
"""Settled activity is kept a little, because a cut looks at what was before it."""
_LEAST_S = 0.001
_LESSON_S = 1.0
_INSTANT_AROUND_S = 0.02
"""An instant power reading says something of the engines active this long before and after it."""


class Track:
    """Owns all of one device's accounting. One thread uses it."""

    def __init__(
        self,
        sampler: Sampler,
        weights: TokenWeights,
        baseline: IdleBaseline | None = None,
        power: EnginePower | None = None,
        resume: Point | None = None,
    ) -> None:
        self.sampler = sampler
        self.baseline = baseline or IdleBaseline()
        self.power = power or EnginePower()
        self.unmeasured_s = 0.0
        """Time whose energy is unknown: before a counter reset, while a device was lost."""
        self.late_busy_s = 0.0
        """Busy time reported after its window was settled: its joules went to the others, or to the residual."""
        self.last_power_w: float | None = None
        """The last look's instant power, where the device offers it."""
        self._weights = weights
        self._measured: dict[str, TokenWeights] = {}
        self._start = resume
        """Where the next window begins; None before the first point."""
        self._resuming = resume is not None
        self._points: deque[tuple[Point, bool]] = deque()
        self._instants: deque[tuple[float, float]] = deque()
        self._placed: list[Placed] = []
        self._lesson_s: dict[str, float] = {}
        self._lesson_j = 0.0

    @property
    def settled(self) -> Point | None:
        """The end of the last settled window."""
        return self._start

    def weigh(self, tokens: Mapping[str, TokenWeights], watts: Mapping[str, float]) -> None:
        """Joules per token and watts above idle as a profile measured them, by engine; those of before are forgotten.

        Watts only begin what is learned here.
        """
        self._measured = dict(tokens)
        self.power.suggest(watts)

    def add(self, engine: str, slices: Iterable[Slice]) -> None:
        """An engine's activity on this device. What lies in settled time is counted as late."""
        for piece in slices:
            if self._start is not None and piece.start_s < self._start.at_s and not self._resuming:
                length_s = piece.end_s - piece.start_s
                late_s = min(piece.end_s, self._start.at_s) - piece.start_s
                busy_s = length_s if piece.busy_s is None else piece.busy_s
                self.late_busy_s += busy_s * late_s / length_s if length_s > 0 else 0.0
            self._placed.append(Placed(engine, piece))

    def look(self, now_s: float) -> str | None:
        """Sample the device; returns the sampler's event, if any."""
        sample = self.sampler.sample(now_s)
        if sample.point is not None:
            self._take(sample.point, sample.unbroken)
        self.last_power_w = sample.power_w
        if sample.power_w is not None:
            self._instants.append((sample.at_s, sample.power_w))
        return sample.event

    def _take(self, point: Point, unbroken: bool) -> None:
        if self._start is None:
            self._start = point
            return
        if self._resuming:
            # The counter went on while there was no meter, unless it reads less than it did then.
            self._resuming = False
            unbroken = point.energy_j >= self._start.energy_j and point.at_s > self._start.at_s
        last = self._points[-1][0] if self._points else self._start
        if point.at_s <= last.at_s:
            # Estimates of two adjacent steps may cross; a window has a length.
            point = point._replace(at_s=last.at_s + _LEAST_S)
        self._points.append((point, unbroken))

    def settle(self, known_until_s: float) -> list[Settlement]:
        """Settle all windows that end where activity is known."""
        if not self._points or self._points[0][0].at_s > known_until_s:
            return []
        active = spans(self._placed)
        changes = edges(active)
        settled: list[Settlement] = []
        while (end := self._next_end(known_until_s, changes)) is not None:
            assert self._start is not None
            settled.append(self._settle_to(end, active))
            self._start = end
        self._forget()
        return settled

    def _next_end(self, known_until_s: float, changes: list[float]) -> Point | None:
        """The end of the next window, its points taken off the queue; skips what is unmeasured."""
        while self._points:
            whole = self._whole(known_until_s)
            if whole is None:
                return None
            points, closed = whole
            if not points:
                # A break right after the start: nothing is known of the time in between.
                assert self._start is not None
                after, _ = self._points.popleft()
                self.unmeasured_s += after.at_s - self._start.at_s
                self._start = after
                continue
            assert self._start is not None
            index = cut(self._start.at_s, points, changes)
            if index is None and closed:
                index = len(points) - 1
            if index is None:
                return None
            for _ in range(index + 1):
                self._points.popleft()
            return points[index]
        return None

    def _whole(self, known_until_s: float) -> tuple[list[Point], bool] | None:
        """The points up to the next break whose surroundings are known, and whether a break follows them."""
        points: list[Point] = []
        for point, unbroken in self._points:
            if point.at_s + reach_s(point) > known_until_s:
                return (points, False) if points else None
            if not unbroken:
                return points, True
            points.append(point)
        return points, False

    def _settle_to(self, end: Point, active: dict[str, list[tuple[float, float]]]) -> Settlement:
        start = self._start
        assert start is not None
        window = Window(start.at_s, end.at_s, end.energy_j - start.energy_j, end.energy_j)
        idle_w = self.baseline.idle_w
        near = [item for item in self._placed if item.slice.end_s >= start.at_s and item.slice.start_s <= end.at_s]
        engines = {item.engine for item in near}
        self._learn_from_instants(window, idle_w, active)
        cpu_s = {engine: used - start.cpu_s.get(engine, used) for engine, used in end.cpu_s.items()}
        power = self.power.estimate(engines) if len(engines) > 1 else None
        settlement = settle(window, near, idle_w, self._weights, power, cpu_s, self._measured)
        if near:
            self.baseline.active(max(item.slice.end_s for item in near))
        if settlement.idle_j is not None:
            self._learn(settlement.busy_s, window.measured_j - settlement.idle_j)
        if not settlement.busy_s:
            self.baseline.observe(window.start_s, window.end_s, window.measured_j)
        return settlement

    def _learn(self, busy_s: Mapping[str, float], above_idle_j: float) -> None:
        """Collect windows of the same engines before learning from them.

        The blur at their borders cancels in the sum. In single windows it would sit in the busy times, where a
        least-squares fit takes it for a smaller power (by 4 % at windows of 100 ms and looks every 50 ms).
        """
        if self._lesson_s.keys() != busy_s.keys() or sum(self._lesson_s.values()) >= _LESSON_S:
            self.power.observe(self._lesson_s, self._lesson_j)
            self._lesson_s, self._lesson_j = {}, 0.0
        for engine, busy in busy_s.items():
            self._lesson_s[engine] = self._lesson_s.get(engine, 0.0) + busy
        self._lesson_j += above_idle_j

    def _learn_from_instants(
        self, window: Window, idle_w: float | None, active: dict[str, list[tuple[float, float]]]
    ) -> None:
        """Power readings tell engines apart within a counter's step; how much there is to share, the counter says."""
        while self._instants and self._instants[0][0] <= window.end_s:
            at_s, power_w = self._instants.popleft()
            if idle_w is None or at_s < window.start_s:
                continue
            engines = active_at(at_s, _INSTANT_AROUND_S, active)
            if engines:
                period_s = self.sampler.period_s
                self.power.observe(dict.fromkeys(engines, period_s), (power_w - idle_w) * period_s)

    def _forget(self) -> None:
        if self._start is not None:
            horizon_s = self._start.at_s - _KEEP_S
            self._placed = [item for item in self._placed if item.slice.end_s >= horizon_s]

    def state(self) -> dict[str, Any]:
        """What this device's figures rest on, as JSON."""
        info = self.sampler.info
        return {
            "device": info.device,
            "name": info.name,
            "method": info.method.value,
            "scope": info.scope,
            "capabilities": dict(info.capabilities),
            "notes": list(info.notes),
            "idle_w": self.baseline.idle_w,
            "engine_watts": self.power.known_watts(),
            "unmeasured_s": self.unmeasured_s,
            "late_busy_s": self.late_busy_s,
        }
