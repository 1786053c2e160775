"""CPU time of a process and its descendants, cheap enough to read several times a second."""

from __future__ import annotations

import psutil

_LOOK_FOR_CHILDREN_EVERY_S = 5.0
"""Listing descendants walks all of /proc; engines rarely start new processes once they run."""
_YOUNG_S = 60.0
_LOOK_OFTEN_EVERY_S = 1.0
"""While an engine starts, its workers appear one after another."""


class ProcessTree:
    """Cumulative CPU seconds. Never decreases: what an ended process used stays counted.

    The first reading is the zero point, so that what ran before the watch is not blamed on it.
    """

    def __init__(self, root_id: int, before_s: float = 0.0) -> None:
        self.root_id = root_id
        self._ended_s = before_s
        self._running_s: dict[psutil.Process, float] = {}
        self._zero_s: dict[psutil.Process, float] = {}
        self._first_look_s: float | None = None
        self._next_look_s = 0.0

    @property
    def cpu_s(self) -> float:
        return self._ended_s + sum(self._running_s.values())

    def read(self, now_s: float) -> float:
        if self._first_look_s is None or now_s >= self._next_look_s:
            self._find_descendants(now_s)
        for process in list(self._running_s):
            used_s = _cpu_time_s(process)
            if used_s is None:
                self._ended_s += self._running_s.pop(process)
                self._zero_s.pop(process)
            else:
                # A kernel may scale the times back by a tick; the sum must not fall.
                self._running_s[process] = max(self._running_s[process], used_s - self._zero_s[process])
        return self.cpu_s

    def _find_descendants(self, now_s: float) -> None:
        first = self._first_look_s is None
        if self._first_look_s is None:
            self._first_look_s = now_s
        young = now_s - self._first_look_s < _YOUNG_S
        self._next_look_s = now_s + (_LOOK_OFTEN_EVERY_S if young else _LOOK_FOR_CHILDREN_EVERY_S)
        try:
            root = psutil.Process(self.root_id)
            found = [root, *root.children(recursive=True)]
        except psutil.Error:
            return
        for process in found:
            if process not in self._running_s and (used_s := _cpu_time_s(process)) is not None:
                self._running_s[process] = 0.0
                # A process that appeared since the last look did all of its work under this watch.
                self._zero_s[process] = used_s if first else 0.0


def _cpu_time_s(process: psutil.Process) -> float | None:
    try:
        if not process.is_running():
            return None
        times = process.cpu_times()
    except psutil.Error:
        return None
    return float(times.user + times.system)
