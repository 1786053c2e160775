"""Energy modelled from CPU time, for machines without any meter. Labelled as modelled wherever it shows."""

from __future__ import annotations

import re
from collections.abc import Mapping

from app.energy.samplers.base import MeterInfo, MeterUnavailable, Method, Point, Sample
from app.energy.samplers.core_watts import watts_per_core
from app.energy.samplers.process_tree import ProcessTree
from app.processor import processor_name

_PERIOD_S = 0.2
"""Reading a dozen processes costs about half a millisecond, and their clock ticks are 10 ms."""
_QUIET_PERIOD_S = 1.0
_QUIET_CORES = 0.25
"""Below this nothing runs but the idle loops of a few processes, and there is nothing to tell apart in time."""
_BLUR_S = 0.01


class ModelledSampler:
    """CPU seconds of the watched process trees times watts per core.

    Before an engine is watched there is no reading: what is not known is not 0.

    Raises:
        MeterUnavailable: processes cannot be read here, or an override is not a regular expression.
    """

    def __init__(self, overrides: Mapping[str, float] | None = None, model_name: str | None = None) -> None:
        name = model_name or processor_name()
        try:
            self._watts, origin = watts_per_core(name, overrides or {})
        except re.error as error:
            raise MeterUnavailable(f"energy.watts_per_core: {error}") from error
        self._watts /= _threads_per_core()
        self.period_s = _PERIOD_S
        self._last: tuple[float, float] | None = None
        self._trees: dict[str, ProcessTree] = {}
        scope = "CPU time of the engines' processes; idle hardware and memory are not in it"
        notes = (f"{self._watts:.2f} W per logical CPU ({origin})",)
        self._info = MeterInfo("cpu", name, Method.MODELLED, scope, blur_s=_BLUR_S, notes=notes)

    @property
    def info(self) -> MeterInfo:
        return self._info

    def watch(self, engine: str, process_id: int) -> None:
        tree = self._trees.get(engine)
        if tree is None:
            self._trees[engine] = ProcessTree(process_id)
        elif tree.root_id != process_id:
            self._trees[engine] = ProcessTree(process_id, before_s=tree.cpu_s)

    def sample(self, now_s: float) -> Sample:
        if not self._trees:
            return Sample(now_s)
        cpu_s = {engine: tree.read(now_s) for engine, tree in self._trees.items()}
        self._adapt(now_s, sum(cpu_s.values()))
        return Sample(now_s, Point(now_s, sum(cpu_s.values()) * self._watts, _BLUR_S, cpu_s))

    def _adapt(self, now_s: float, total_s: float) -> None:
        """Look less often while nothing runs: looking is most of what an idle meter costs."""
        if self._last is not None and now_s > self._last[0]:
            cores = (total_s - self._last[1]) / (now_s - self._last[0])
            self.period_s = _PERIOD_S if cores >= _QUIET_CORES else _QUIET_PERIOD_S
        self._last = now_s, total_s

    def close(self) -> None:
        """Nothing is held open."""


def _threads_per_core() -> float:
    # CPU time is counted per logical CPU, and two of them may share the watts of one core.
    import psutil

    logical, physical = psutil.cpu_count(), psutil.cpu_count(logical=False)
    return logical / physical if logical and physical else 1.0
