"""`oracle`: from a sweep, the best mode of every cell under the constraints, and how near each fixed mode comes."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from loadgen.best_mode import Constraint, Constraints, Measured, Score, best_mode, safe_modes, score
from loadgen.servers import write_json


class SweepUnreadable(Exception):
    """The file is missing or is no result of `sweep`; the message says what is wrong with it."""


@dataclasses.dataclass(frozen=True, slots=True)
class SweepTable:
    """A sweep's cells by name, each with the modes that were measured beside the reference."""

    reference: str
    cells: dict[str, dict[str, Measured]]

    @property
    def complete_modes(self) -> list[str]:
        """Modes that every cell has: only these can be compared as a policy."""
        in_each = [set(by_mode) for by_mode in self.cells.values()]
        return sorted(set.intersection(*in_each)) if in_each else []


def read_sweep(path: Path) -> SweepTable:
    """The table of a `sweep.json`. Raises SweepUnreadable.

    A mode's latency is its ratio to the reference times the reference's median: so all cells of a row rest on rounds
    that both were measured in, and drift between rounds does not decide. Its energy too, where it was measured.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        reference, rows = str(found["reference"]), found["rows"]
        references = {_cell(row): row for row in rows if row["mode"] == reference}
        cells: dict[str, dict[str, Measured]] = {}
        for row in rows:
            if (base := references.get(_cell(row))) is None:
                continue
            latency_ms = _beside(row["latency"], base["latency"])
            if latency_ms is not None:
                cells.setdefault(_cell(row), {})[str(row["mode"])] = _measured(latency_ms, row, base)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SweepUnreadable(f"{path} is no result of sweep: {type(error).__name__}: {error}") from error
    if not cells:
        raise SweepUnreadable(f"{path} has no cell with its reference mode {reference!r}")
    return SweepTable(reference, cells)


def _cell(row: dict[str, Any]) -> str:
    return f"{row['workload']} x {row['concurrency']}"


def _measured(latency_ms: float, row: Mapping[str, Any], base: Mapping[str, Any]) -> Measured:
    """Earlier sweeps measured latencies only."""
    likeness, peak_bytes = (row.get("rouge_l") or {}).get("mean"), row.get("peak_memory_bytes")
    return Measured(
        latency_ms,
        energy_j_per_token=_beside(row.get("j_per_token"), base.get("j_per_token")),
        memory_mb=None if peak_bytes is None else float(peak_bytes) / 1e6,
        rouge_fp16=None if likeness is None else float(likeness["estimate"]),
    )


def _beside(quantity: Mapping[str, Any] | None, base: Mapping[str, Any] | None) -> float | None:
    """A mode's ratio times the reference's median; None where either was not measured."""
    ratio, middle = (quantity or {}).get("ratio"), (base or {}).get("median")
    return None if ratio is None or middle is None else float(ratio["estimate"]) * float(middle)


def best_modes(table: SweepTable, constraints: Constraints) -> dict[str, str]:
    """The best mode by cell."""
    return {cell: best_mode(by_mode, table.reference, constraints) for cell, by_mode in table.cells.items()}


def not_judged(table: SweepTable, constraints: Constraints) -> dict[Constraint, dict[str, list[str]]]:
    """By constraint, the modes that it could not hold back for want of a measurement, each with the cells of that."""
    found: dict[Constraint, dict[str, list[str]]] = {}
    for cell, by_mode in table.cells.items():
        reference = by_mode[table.reference]
        for name, mode in by_mode.items():
            for kind in set(Constraint) - constraints.judged(mode, reference):
                if name != table.reference:
                    found.setdefault(kind, {}).setdefault(name, []).append(cell)
    return dict(sorted(found.items()))


def _words(kind: Constraint, missing: Mapping[str, list[str]], table: SweepTable) -> str:
    whole = sum(len(by_mode) - 1 for by_mode in table.cells.values())
    if sum(map(len, missing.values())) == whole:
        return f"The limit of {kind} was not applied: the sweep did not measure it."
    parts = (f"{mode} in {len(cells)} of {len(table.cells)} cells" for mode, cells in sorted(missing.items()))
    return f"The limit of {kind} was not applied to {', '.join(parts)}: not measured there."


def policy_scores(table: SweepTable, constraints: Constraints) -> dict[str, Score]:
    """The oracle, and each mode used for everything; every cell counts once."""
    once = dict.fromkeys(table.cells, 1)
    choices = {"oracle": best_modes(table, constraints)}
    choices |= {f"always {mode}": dict.fromkeys(table.cells, mode) for mode in table.complete_modes}
    return {name: score(made, table.cells, once, table.reference, constraints) for name, made in choices.items()}


def register(app: typer.Typer) -> None:
    """Adds `oracle`."""

    @app.command()
    def oracle(
        sweep_json: Annotated[Path, typer.Argument(help="The result of `sweep`.")] = Path("results/sweep/sweep.json"),
        allow: Annotated[list[str] | None, typer.Option(help="Only these modes and the reference.")] = None,
        out: Annotated[Path | None, typer.Option(help="Write the choices and scores as JSON.")] = None,
    ) -> None:
        """The best mode of each cell of a sweep, and what a fixed mode reaches of it."""
        console = Console()
        try:
            table = read_sweep(sweep_json)
        except SweepUnreadable as error:
            console.print(f"oracle: {error}", style="red", markup=False)
            raise typer.Exit(2) from error
        if allow:
            table = only(table, allow)
        constraints = Constraints()
        best, scores = best_modes(table, constraints), policy_scores(table, constraints)
        missing = not_judged(table, constraints)
        console.print(_best_table(table, best, constraints))
        console.print(_score_table(scores))
        for kind, modes in missing.items():
            console.print(_words(kind, modes, table), style="yellow", markup=False)
        if out is not None:
            try:
                out.parent.mkdir(parents=True, exist_ok=True)
                write_json(
                    out,
                    {
                        "command": "oracle",
                        "reference": table.reference,
                        "best": best,
                        "not_judged": missing,
                        "scores": {name: dataclasses.asdict(item) for name, item in scores.items()},
                    },
                )
            except OSError as error:
                console.print(f"cannot write {out}: {error.strerror or error}", style="red", markup=False)
                raise typer.Exit(2) from error


def only(table: SweepTable, modes: list[str]) -> SweepTable:
    """The table without the modes that are not named, such as those that failed the quality gate."""
    kept = {*modes, table.reference}
    return SweepTable(
        table.reference,
        {cell: {mode: row for mode, row in by_mode.items() if mode in kept} for cell, by_mode in table.cells.items()},
    )


def _best_table(table: SweepTable, best: dict[str, str], constraints: Constraints) -> Table:
    shown = Table(title="Best mode by cell")
    for name in ("cell", "best", "speed-up", "second", "speed-up", "faster, but breaks"):
        shown.add_column(name)
    for cell, by_mode in table.cells.items():
        reference = by_mode[table.reference]
        second = next(iter(safe_modes(by_mode, table.reference, constraints)[1:]), "")
        speeds = [
            f"{reference.latency_ms / by_mode[mode].latency_ms:.3f}" if mode else "" for mode in (best[cell], second)
        ]
        faster = [
            f"{name}: {', '.join(sorted(constraints.broken_by(mode, reference)))}"
            for name, mode in by_mode.items()
            if mode.latency_ms < by_mode[best[cell]].latency_ms
        ]
        shown.add_row(cell, best[cell], speeds[0], second, speeds[1], "\n".join(faster))
    return shown


def _score_table(scores: dict[str, Score]) -> Table:
    shown = Table(title="Every cell once")
    for name in ("", "mean speed-up", "energy ratio", "of the oracle", "the oracle's choice", "breaks a limit"):
        shown.add_column(name, justify="left" if name == "" else "right")
    for name, item in scores.items():
        shown.add_row(
            name,
            f"{item.speedup:.3f}",
            "unknown" if item.energy_ratio is None else f"{item.energy_ratio:.3f}",
            f"{100 * item.latency_capture:.1f} %",
            f"{100 * item.oracle_match:.0f} %",
            str(item.unsafe),
        )
    return shown
