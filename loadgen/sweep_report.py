"""What a sweep found: rows for `sweep.json`, and tables for people."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from loadgen.balloon import ENDED_EARLY, Balloon
from loadgen.decode_limit import DecodeLimit
from loadgen.energy_by_mode import MODELLED
from loadgen.energy_facts import EnergySource
from loadgen.kv_use import WORKLOAD, pressure_words_of_each
from loadgen.quality_gate import mean_interval
from loadgen.statistics import Interval, summarise
from loadgen.sweep_interference import Interference
from loadgen.sweep_plan import LIKENESS, QUANTITIES, Results

Row = dict[str, Any]
UNKNOWN = "unknown"
_MIB = 2**20


@dataclass(slots=True)
class Found:
    """Results so far, kept outside of the coroutine, so that an interruption loses nothing.

    engine_of: the engine that carries each mode, where the server tells it. states: of engines, from `GET /v1/modes`.
    """

    results: Results
    modes: list[str] = field(default_factory=list)
    ended: str = "interrupted"
    energy: EnergySource | None = None
    engine_of: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, DecodeLimit] = field(default_factory=dict)
    """By mode."""
    states: Sequence[Mapping[str, Any]] | None = None
    interference: Interference | None = None
    balloon: Balloon | None = None
    balloon_held: bool | None = None
    """Whether it still held its memory when the last round ended."""

    @property
    def failures(self) -> list[str]:
        return self.results.failures + (self.interference.failures if self.interference else [])

    def peak_memory_bytes(self, mode: str) -> int | None:
        """The most that the mode's engine held since it started, whatever it was asked."""
        for state in self.states or ():
            if state.get("name") == self.engine_of.get(mode):
                peak = state.get("peak_memory_bytes")
                return int(peak) if isinstance(peak, int | float) and peak > 0 else None
        return None


def summary_of(found: Found, rows: Sequence[Row], options: Mapping[str, Any]) -> dict[str, Any]:
    """The content of `sweep.json`."""
    energy = found.energy
    return {
        "command": "sweep",
        "reference": found.results.reference,
        "ended": found.ended,
        "options": {key: str(value) for key, value in options.items() if key != "api_key"},
        "rows": list(rows),
        "energy": {"method": energy and energy.method, "scope": energy and energy.scope},
        "decode_limits": {mode: limit.as_json() for mode, limit in found.limits.items()},
        "interference": None if found.interference is None else found.interference.as_json(),
        "balloon": found.balloon and found.balloon.as_json(found.balloon_held),
        "failures": found.failures,
        "engines": found.states,
    }


def rows_of(found: Found) -> list[Row]:
    """One row per cell and mode: medians of the trials, with ratios to the reference or means, and their intervals."""
    results = found.results
    rows = []
    for cell, by_mode in sorted(results.trials.items()):
        for mode, trials in by_mode.items():
            row: Row = {"workload": cell.workload, "concurrency": cell.concurrency, "mode": mode, "rounds": len(trials)}
            for name, of in QUANTITIES.items():
                ratio = results.ratio(cell, mode, name)
                row[name] = _median(results.values(cell, mode, of)) | {"ratio": ratio and ratio._asdict()}
            for name, of in LIKENESS.items():
                values = results.values(cell, mode, of)
                row[name] = _median(values) | {"mean": mean_interval(values)._asdict() if values else None}
            limit = found.limits.get(mode)
            row["limit_steps_per_s"] = limit.steps_per_s if limit and cell.concurrency == 1 else None
            row["peak_memory_bytes"] = found.peak_memory_bytes(mode)
            row["kv_use_peak"] = max(results.values(cell, mode, lambda trial: trial.kv_use), default=None)
            rows.append(row)
    return rows


def _median(values: Sequence[float]) -> Row:
    middle = summarise(values)
    return {"median": None if middle is None else middle.p50}


def tables_of(found: Found, rows: Sequence[Row]) -> list[Table]:
    """Several, each narrow enough for a terminal; those without a figure are left out."""
    reference = found.results.reference

    def beside(name: str, unit: str = "") -> Callable[[Row], str]:
        def words(row: Row) -> str:
            own = row["mode"] == reference
            return _figure(row[name]["median"], 1, ".4g", unit) if own else _ratio(row[name]) or UNKNOWN

        return words

    tables = [
        _table(
            f"Times of {reference} (medians), and of others as ratios to it in the same rounds [95 %]",
            rows,
            {
                "latency": beside("latency", " ms"),
                "TTFT": beside("ttft", " ms"),
                "between tokens": beside("between_tokens", " ms"),
                "rounds": lambda row: str(row["rounds"]),
            },
        ),
        _table(
            f"Throughput, energy above idle and memory, likewise to {reference} [95 %]",
            rows,
            {
                "tokens/s": beside("tokens_per_s"),
                "J/token": lambda row: _figure(row["j_per_token"]["median"]),
                "J/token ratio": lambda row: _ratio(row["j_per_token"]) or UNKNOWN,
                "peak MiB": lambda row: _figure(row["peak_memory_bytes"], 1 / _MIB, ".0f"),
                **({"fullest KV": _kv_use} if any(row["kv_use_peak"] is not None for row in rows) else {}),
            },
        ),
    ]
    if alike := [row for row in rows if row["same_text"]["mean"]]:
        columns = {
            "ROUGE-L": lambda row: _mean(row["rouge_l"]) or UNKNOWN,
            "the very same": lambda row: _mean(row["same_text"]),
        }
        tables.append(_table(f"Greedy text beside {reference}'s for the same prompts, mean [95 %]", alike, columns))
    if bounded := [row for row in rows if row["limit_steps_per_s"]]:
        tables.append(_limit_table(found, bounded))
    if found.interference is not None and found.interference.seen:
        tables.append(found.interference.table())
    return tables


def _kv_use(row: Row) -> str:
    return "" if row["workload"] != WORKLOAD else _figure(row["kv_use_peak"], 100, ".0f", " %")


def _limit_table(found: Found, rows: Sequence[Row]) -> Table:
    def bandwidth(row: Row) -> str:
        measured = found.limits[row["mode"]].bandwidth
        return _figure(measured and measured.bytes_per_s, 1e-9)

    return _table(
        "Decoding of one stream against the time that reading the weights takes",
        rows,
        {
            "MiB a step": lambda row: _figure(found.limits[row["mode"]].bytes_per_step, 1 / _MIB, ".0f"),
            "GB/s": bandwidth,
            "limit, steps/s": lambda row: _figure(row["limit_steps_per_s"]),
            "reached": lambda row: _figure(row["bandwidth_share"]["median"], 100, ".0f", " %"),
            "ratio": lambda row: _ratio(row["bandwidth_share"]),
        },
    )


def _table(title: str, rows: Sequence[Row], columns: Mapping[str, Callable[[Row], str]]) -> Table:
    table = Table(title=title)
    for name in ("cell", "mode"):
        table.add_column(name)
    for name in columns:
        table.add_column(name, justify="right")
    for place, row in enumerate(rows):
        cell = f"{row['workload']} x {row['concurrency']}"
        last = place + 1 == len(rows) or rows[place + 1]["workload"] != row["workload"]
        table.add_row(cell, row["mode"], *(words(row) for words in columns.values()), end_section=last)
    return table


def _ratio(quantity: Row) -> str:
    return Interval(**quantity["ratio"]).words(".2f") if quantity["ratio"] else ""


def _mean(quantity: Row) -> str:
    return Interval(**quantity["mean"]).words(".2f") if quantity["mean"] else ""


def _figure(value: float | None, scale: float = 1.0, form: str = ".3g", unit: str = "") -> str:
    return UNKNOWN if value is None else f"{scale * value:{form}}{unit}"


def warnings_of(found: Found, rows: Sequence[Row]) -> list[str]:
    """What keeps the figures from being what was asked for."""
    words = [ENDED_EARLY] if found.balloon_held is False else []
    pressed = {f"{row['mode']} x {row['concurrency']}": row for row in rows if row["workload"] == WORKLOAD}
    if (kv := pressure_words_of_each({name: row["kv_use_peak"] for name, row in pressed.items()})) is not None:
        words.append(f"{WORKLOAD}: {kv}")
    return words


def words_of(found: Found, rows: Sequence[Row]) -> list[str]:
    """What the tables do not say of themselves."""
    sentences = [f"ended: {found.ended}"]
    if found.energy is None or found.energy.method is None:
        sentences.append("The server told no energy.")
    elif MODELLED in found.energy.method:
        sentences.append("These joules come from a model of the device's power, no meter measured them.")
    if rows and all(row["same_text"]["mean"] is None for row in rows):
        sentences.append("No texts were compared: each mode had prompts of its own, or there was only one mode.")
    if any(row["same_text"]["mean"] and row["rouge_l"]["mean"] is None for row in rows):
        sentences.append("ROUGE-L is unknown: rouge-score is not installed.")
    if unknown := [mode for mode in found.modes if mode in found.limits and not found.limits[mode].steps_per_s]:
        sentences.append(f"No memory limit, since their weights' bytes are not known here: {', '.join(unknown)}.")
    if found.interference is not None:
        sentences.append(f"interference ended: {found.interference.ended}")
    return sentences
