"""Where to cut time into windows. Pure.

A counter steps every 100 ms and is looked at every 50 ms, so nobody knows a step's moment better than half a look.
Cut where activity begins or ends, and joules land in the wrong window; cut where the same engines were active for a
while before and after (or none was), and the error is the same on both sides and cancels.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence

from app.energy.attribution import Placed
from app.energy.samplers.base import Point

_SAME_SPAN_S = 0.01
"""Shorter pauses between two steps of an engine are no end of its activity."""
_MARGIN_S = 0.01
"""Added to a point's blur: the clocks' and reports' own."""
_STEADY_S = 0.5
_LONGEST_S = 2.0
_LONGEST_BLURS = 4


def spans(placed: Iterable[Placed]) -> dict[str, list[tuple[float, float]]]:
    """When each engine was active, in order, with short pauses closed."""
    merged: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for engine, piece in sorted(placed, key=lambda item: item.slice.start_s):
        own = merged[engine]
        if own and piece.start_s - own[-1][1] <= _SAME_SPAN_S:
            own[-1] = (own[-1][0], max(own[-1][1], piece.end_s))
        else:
            own.append((piece.start_s, piece.end_s))
    return merged


def edges(active: dict[str, list[tuple[float, float]]]) -> list[float]:
    """The moments at which an engine began or ended, sorted."""
    return sorted(moment for own in active.values() for span in own for moment in span)


def reach_s(point: Point) -> float:
    """How far from its time stamp the point's true moment may be."""
    return point.blur_s + _MARGIN_S


def cut(start_s: float, points: Sequence[Point], changes: Sequence[float]) -> int | None:
    """The index of the point that ends the window begun at `start_s`, or None to wait for more points.

    All `points` must lie where activity is known. The first quiet one ends the window, or the last quiet one before
    anything changes (shorter windows of the same activity tell no more and cost more). When none comes in time, the
    one farthest from any change does.
    """
    distances: list[float] = []
    quiet: int | None = None
    steady_until_s = min(_next_change_s(start_s, changes), start_s + _STEADY_S)
    for index, point in enumerate(points):
        near = _distance_s(point.at_s, changes)
        if near > reach_s(point):
            if point.at_s > steady_until_s:
                return index if quiet is None else quiet
            quiet = index
        distances.append(near)
    if quiet is not None:
        return quiet
    if points and points[-1].at_s - start_s >= max(_LONGEST_S, _LONGEST_BLURS * points[-1].blur_s):
        return max(range(len(points)), key=lambda index: (distances[index], index))
    return None


def _next_change_s(moment_s: float, changes: Sequence[float]) -> float:
    index = bisect_left(changes, moment_s)
    return changes[index] if index < len(changes) else float("inf")


def active_at(moment_s: float, around_s: float, active: dict[str, list[tuple[float, float]]]) -> set[str] | None:
    """The engines active throughout `moment_s ± around_s`; None when one begins or ends in it."""
    found: set[str] = set()
    for engine, own in active.items():
        for begin_s, end_s in own:
            if begin_s <= moment_s - around_s and moment_s + around_s <= end_s:
                found.add(engine)
            elif begin_s < moment_s + around_s and moment_s - around_s < end_s:
                return None
    return found


def _distance_s(moment_s: float, changes: Sequence[float]) -> float:
    index = bisect_left(changes, moment_s)
    before = moment_s - changes[index - 1] if index else float("inf")
    after = changes[index] - moment_s if index < len(changes) else float("inf")
    return min(before, after)
