"""What engines cost one another: one stream on each of two at once, against one alone in the same round."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from loadgen.calibration_plan import Engine, Grid, StepTask, Task, Text, TogetherTask, round_order
from loadgen.calibration_trials import Calibrator, TrialFailed
from loadgen.fitting import EngineSamples
from loadgen.statistics import Interval, paired_bootstrap

ROUNDS = 5
BUDGET_SHARE = 0.15
"""Of a sweep's time, kept for these rounds."""
_GRID = Grid((), (1,), 32)


class Beside(NamedTuple):
    """A decode step of `engine` with one stream, alone and while `other` decodes one, in the same round."""

    engine: str
    other: str
    alone_ms: float
    together_ms: float


@dataclass(slots=True)
class Interference:
    """Results so far, round by round."""

    seen: list[Beside] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    ended: str = "interrupted"

    def slowdowns(self) -> dict[tuple[str, str], Interval]:
        """How many times longer the first engine's step takes beside the second's, over rounds."""
        pairs: dict[tuple[str, str], list[Beside]] = {}
        for one in self.seen:
            pairs.setdefault((one.engine, one.other), []).append(one)
        return {
            pair: paired_bootstrap([one.together_ms for one in found], [one.alone_ms for one in found])
            for pair, found in sorted(pairs.items())
        }

    def as_json(self) -> dict[str, Any]:
        rows = [
            {"engine": engine, "beside": other, "times_slower": interval._asdict()}
            for (engine, other), interval in self.slowdowns().items()
        ]
        return {"ended": self.ended, "rows": rows, "failures": self.failures}

    def table(self) -> Table:
        """For people."""
        table = Table(title="One stream beside one on another engine, to it alone [95 %]")
        for name in ("engine", "beside", "times slower", "rounds"):
            table.add_column(name, justify="left" if name in ("engine", "beside") else "right")
        for (engine, other), interval in self.slowdowns().items():
            table.add_row(engine, other, interval.words(".2f"), str(interval.pairs))
        return table


def beside_of_round(samples: Mapping[str, EngineSamples]) -> list[Beside]:
    """What one round's samples tell; a pair without its time alone tells nothing."""
    found = []
    for engine, of in samples.items():
        alone = of.step_ms.get(Text.FREE, {}).get(1)
        if alone:
            found += [Beside(engine, other, alone[0], ms[0]) for other, ms in of.together_ms.items() if ms]
    return found


def interference_round(engines: Sequence[Engine], number: int, seed: int) -> Iterator[StepTask | TogetherTask]:
    """Every engine alone and every pair at once, in random order."""
    for task in round_order(engines, _GRID, number, seed):
        match task:
            case StepTask(text=Text.FREE) | TogetherTask():
                yield task


async def measure_interference(
    calibrator: Calibrator, found: Interference, deadline: float, seed: int, console: Console
) -> None:
    """Up to `ROUNDS` rounds; no task begins after `deadline` (time.perf_counter()). What was seen is kept at once."""
    engines = list(calibrator.engines.values())
    for number in range(ROUNDS):
        calibrator.samples = {name: EngineSamples() for name in calibrator.engines}
        try:
            for task in interference_round(engines, number, seed):
                if time.perf_counter() > deadline:
                    found.ended = "the budget of time ended"
                    return
                with console.status(f"interference, round {number + 1} of {ROUNDS}: {_words(task)}"):
                    try:
                        await calibrator.carry_out(task, _GRID)
                    except TrialFailed as failed:
                        found.failures.append(f"interference, round {number + 1}, {_words(task)}: {failed}")
        finally:
            found.seen += beside_of_round(calibrator.samples)
    found.ended = "the rounds ended"


def _words(task: Task) -> str:
    return f"{task.engine} beside {task.other}" if isinstance(task, TogetherTask) else f"{task.engine} alone"
