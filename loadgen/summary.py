"""A run in figures. Errors, deliberate ends and successes are counted apart; latencies are of successes only."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from loadgen.energy_by_mode import Spent, j_per_token
from loadgen.records import DELIBERATE, ERRORS, Outcome, RequestRecord
from loadgen.statistics import Summary, summarise, total


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must hold to count as goodput; None is no limit. All in ms."""

    ttft_ms: float | None = None
    between_tokens_ms: float | None = None
    total_ms: float | None = None

    @property
    def stated(self) -> bool:
        return any(limit is not None for limit in (self.ttft_ms, self.between_tokens_ms, self.total_ms))

    def held_by(self, record: RequestRecord) -> bool:
        """False for a request that failed, and where a limit is stated for what was not measured."""
        pairs = (
            (record.ttft_ms, self.ttft_ms),
            (record.between_tokens_ms, self.between_tokens_ms),
            (record.total_ms, self.total_ms),
        )
        return record.outcome is Outcome.OK and all(
            limit is None or (value is not None and value <= limit) for value, limit in pairs
        )


Quantity = Callable[[RequestRecord], float | None]

LATENCIES: dict[str, Quantity] = {
    "ttft_ms": lambda record: record.ttft_ms,
    "between_tokens_ms": lambda record: record.between_tokens_ms,
    "total_ms": lambda record: record.total_ms,
}


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The figures of a set of records; `latencies` has None where nothing was measured.

    output_tokens_per_s, frames_per_token: None as soon as the server told no token count of one success.
    j_per_output_token: joules above idle of the `energy_requests` whose joules are known; None where none is.
    """

    requests: int
    outcomes: dict[str, int]
    wall_s: float
    latencies: dict[str, Summary | None]
    frame_gaps_ms: Summary | None
    late_ms: Summary | None
    output_tokens_per_s: float | None
    requests_per_s: float
    goodput_per_s: float | None
    frames_per_token: float | None
    cached_prompt_share: float | None
    modes: dict[str, int]
    j_per_output_token: float | None
    energy_requests: int

    @property
    def errors(self) -> int:
        return sum(self.outcomes.get(outcome, 0) for outcome in ERRORS)

    def as_json(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "errors": self.errors,
            "outcomes": self.outcomes,
            "wall_s": self.wall_s,
            **{name: _as_json(found) for name, found in self.latencies.items()},
            "frame_gaps_ms": _as_json(self.frame_gaps_ms),
            "late_ms": _as_json(self.late_ms),
            "output_tokens_per_s": self.output_tokens_per_s,
            "requests_per_s": self.requests_per_s,
            "goodput_per_s": self.goodput_per_s,
            "frames_per_token": self.frames_per_token,
            "cached_prompt_share": self.cached_prompt_share,
            "modes": self.modes,
            "j_per_output_token": self.j_per_output_token,
            "energy_requests": self.energy_requests,
        }


def _as_json(found: Summary | None) -> dict[str, float] | None:
    return None if found is None else found._asdict()


def summarise_run(records: Sequence[RequestRecord], wall_s: float, slo: Slo) -> RunSummary:
    """Figures of measured records (warm-up is left out by the caller). wall_s: from the start to the last end."""
    good = [record for record in records if record.outcome is Outcome.OK]
    span_s = wall_s or float("inf")
    # Tokens of requests that were given up or failed half-way were work too, but nobody was served by them.
    tokens = total(record.output_tokens for record in good)
    frames = sum(len(record.frame_ms) for record in good)
    prompt = sum(record.prompt_tokens or 0 for record in good if record.cached_tokens is not None)
    cached = sum(record.cached_tokens or 0 for record in good)
    metered = [record for record in good if record.energy_j is not None and record.output_tokens]
    return RunSummary(
        requests=len(records),
        outcomes=dict(Counter(str(record.outcome) for record in records)),
        wall_s=wall_s,
        latencies={name: summarise(_known(map(of, good))) for name, of in LATENCIES.items()},
        frame_gaps_ms=summarise([gap for record in good for gap in record.frame_gaps_ms]),
        late_ms=summarise(_known(record.late_ms for record in records)),
        output_tokens_per_s=None if tokens is None else tokens / span_s,
        requests_per_s=len(good) / span_s,
        goodput_per_s=sum(map(slo.held_by, records)) / span_s if slo.stated else None,
        frames_per_token=frames / tokens if frames and tokens else None,
        cached_prompt_share=cached / prompt if prompt else None,
        modes=dict(Counter(record.mode for record in good if record.mode is not None)),
        j_per_output_token=j_per_token([Spent(record.energy_j, record.output_tokens) for record in metered]),
        energy_requests=len(metered),
    )


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def counts_line(summary: RunSummary, planned: int) -> str:
    """How many of the planned requests ended how; what was never sent is said too."""
    parts = [f"{summary.outcomes.get(Outcome.OK, 0)} ok", f"{summary.errors} errors"]
    parts += [f"{summary.outcomes[outcome]} {outcome}" for outcome in sorted(DELIBERATE) if outcome in summary.outcomes]
    if planned > summary.requests:
        parts.append(f"{planned - summary.requests} never sent")
    return ", ".join(parts)


_SHOWN = ("n", "mean", "p50", "p95", "p99", "largest")


def table_of(groups: dict[str, RunSummary]) -> Table:
    """Latencies by group, in ms."""
    table = Table(title="Latencies of the successful requests (ms)")
    for name in ("", "", *_SHOWN):
        table.add_column(name, justify="left" if name == "" else "right")
    for group, summary in groups.items():
        rows = {**summary.latencies, "frame_gaps_ms": summary.frame_gaps_ms, "late_ms": summary.late_ms}
        for name, found in rows.items():
            if found is not None:
                figures = (f"{value:.2f}" if isinstance(value, float) else str(value) for value in found)
                table.add_row(group, name.removesuffix("_ms").replace("_", " "), *figures)
        table.add_section()
    return table


def rates_table(groups: dict[str, RunSummary]) -> Table:
    """What was served per second, and for how many joules above idle, by group."""
    table = Table(title="Served")
    table.add_column("")
    for name in ("output tokens/s", "requests/s", "within the limits/s", "J/output token"):
        table.add_column(name, justify="right")
    for group, summary in groups.items():
        goodput, joules = summary.goodput_per_s, summary.j_per_output_token
        tokens_per_s = summary.output_tokens_per_s
        served = summary.outcomes.get(Outcome.OK, 0)
        known = "" if summary.energy_requests == served else f" (of {summary.energy_requests} of {served})"
        table.add_row(
            group,
            "unknown" if tokens_per_s is None else f"{tokens_per_s:.1f}",
            f"{summary.requests_per_s:.2f}",
            "no limits" if goodput is None else f"{goodput:.2f}",
            "unknown" if joules is None else f"{joules:.3f}{known}",
        )
    return table


def engines_table(peak_memory_bytes: Mapping[str, float | None], kv_use: Mapping[str, float]) -> Table:
    """Peak memory since each engine started, and the highest use of its KV cache where it was watched."""
    table = Table(title="Engines")
    table.add_column("")
    for name in ("peak memory, MiB", "fullest KV cache, %"):
        table.add_column(name, justify="right")
    for name, peak in peak_memory_bytes.items():
        table.add_row(
            name,
            "unknown" if peak is None else f"{peak / 2**20:.0f}",
            f"{100 * kv_use[name]:.0f}" if name in kv_use else "not watched",
        )
    return table
