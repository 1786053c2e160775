"""The overhead's figures: what is compared, against which target, and what the interval allows to say."""

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import Any

from rich.table import Table

from loadgen.overhead_trials import APP, BARE, CONTROL, Rounds, Trial
from loadgen.statistics import Interval, Statistic, difference_of_pairs, paired_bootstrap, ratio_of_pairs, summarise


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of the comparison. target: None only states the figure."""

    name: str
    streams: int
    pick: Callable[[Trial], float]
    statistic: Statistic = ratio_of_pairs
    target: float | None = None
    at_least: bool = True


_THROUGHPUT_TARGETS = {1: 0.95, 8: 0.9}
_ADDED_TTFT_TARGETS_MS = {1: 20.0}
_FRAME_GAP_TARGET = 1.15


def metrics_of(streams: int) -> tuple[Metric, ...]:
    """What is compared with so many streams at once."""
    with_them = f"{streams} stream{'s' if streams > 1 else ''}"
    return (
        Metric(
            f"tokens/s, {with_them}", streams, lambda trial: trial.tokens_per_s, target=_THROUGHPUT_TARGETS.get(streams)
        ),
        Metric(
            f"TTFT added, {with_them} (ms)",
            streams,
            lambda trial: trial.ttft_ms,
            difference_of_pairs,
            _ADDED_TTFT_TARGETS_MS.get(streams),
            at_least=False,
        ),
        Metric(
            f"P95 between frames, {with_them}",
            streams,
            lambda trial: trial.frame_gap_p95_ms,
            target=_FRAME_GAP_TARGET,
            at_least=False,
        ),
        Metric(f"frames per token, {with_them}", streams, lambda trial: trial.frames_per_token),
    )


@dataclass(frozen=True, slots=True)
class Comparison:
    """A metric's outcome: medians of both sides, the application against bare, and bare against itself."""

    metric: Metric
    app: float
    bare: float
    against_bare: Interval
    control: Interval

    @property
    def verdict(self) -> str:
        """`met` or `missed` by the estimate; `within noise` when the interval holds the target too."""
        target = self.metric.target
        if target is None:
            return ""
        found = self.against_bare
        met = found.estimate >= target if self.metric.at_least else found.estimate <= target
        words = "met" if met else "missed"
        return f"{words}, within noise" if found.low <= target <= found.high else words

    def as_json(self) -> dict[str, Any]:
        return {
            "metric": self.metric.name,
            "app_median": self.app,
            "bare_median": self.bare,
            "against_bare": self.against_bare._asdict(),
            "control": self.control._asdict(),
            "target": self.metric.target,
            "target_is": None if self.metric.target is None else "at least" if self.metric.at_least else "at most",
            "verdict": self.verdict,
        }


def compare(rounds: Rounds) -> list[Comparison]:
    """One comparison per metric that has at least one complete round.

    Bare is the geometric mean of its two series in the same round, so that drift within a round cancels.
    """
    found = []
    for metric in (metric for streams in sorted({key[0] for key in rounds.trials}) for metric in metrics_of(streams)):
        app, first, second = (rounds.values(metric.streams, series, metric.pick) for series in (APP, BARE, CONTROL))
        bare = [sqrt(a * b) for a, b in zip(first, second, strict=True)]
        found.append(
            Comparison(
                metric,
                _median(app),
                _median(bare),
                paired_bootstrap(app, bare, metric.statistic),
                paired_bootstrap(second, first, metric.statistic),
            )
        )
    return found


def _median(values: list[float]) -> float:
    summary = summarise(values)
    assert summary is not None
    return summary.p50


def table_of(comparisons: list[Comparison], rounds: int) -> Table:
    """For people. The interval is a 95 % bootstrap over rounds."""
    table = Table(title=f"This application against vLLM's own server, {rounds} interleaved rounds")
    for name in ("", "app", "bare", "app against bare [95 %]", "bare against itself [95 %]", "target", ""):
        table.add_column(name, justify="left" if name == "" else "right")
    for item in comparisons:
        target = item.metric.target
        bound = "" if target is None else f"{'≥' if item.metric.at_least else '≤'} {target:g}"
        table.add_row(
            item.metric.name,
            f"{item.app:.2f}",
            f"{item.bare:.2f}",
            item.against_bare.words(),
            item.control.words(),
            bound,
            item.verdict,
        )
    return table
