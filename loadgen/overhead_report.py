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
    scenario: str
    pick: Callable[[Trial], float]
    statistic: Statistic = ratio_of_pairs
    target: float | None = None
    at_least: bool = True


METRICS = (
    Metric("tokens/s, 1 stream", "single", lambda trial: trial.tokens_per_s, target=0.95),
    Metric("tokens/s, 8 streams", "concurrent", lambda trial: trial.tokens_per_s, target=0.9),
    Metric("TTFT added, 1 stream (ms)", "single", lambda trial: trial.ttft_ms, difference_of_pairs, 20.0, False),
    Metric("TTFT added, 8 streams (ms)", "concurrent", lambda trial: trial.ttft_ms, difference_of_pairs),
    Metric("P95 between frames, 1 stream", "single", lambda trial: trial.frame_gap_p95_ms, target=1.15, at_least=False),
    Metric(
        "P95 between frames, 8 streams", "concurrent", lambda trial: trial.frame_gap_p95_ms, target=1.15, at_least=False
    ),
    Metric("frames per token, 1 stream", "single", lambda trial: trial.frames_per_token),
    Metric("frames per token, 8 streams", "concurrent", lambda trial: trial.frames_per_token),
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
    for metric in METRICS:
        app, first, second = (rounds.values(metric.scenario, series, metric.pick) for series in (APP, BARE, CONTROL))
        if not app:
            continue
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
