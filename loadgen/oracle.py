"""`oracle`: the best mode of every workload or class under the constraints, and how near each policy comes to it."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from loadgen.best_mode import Constraint, Constraints, Score, best_mode, safe_modes, score
from loadgen.compared_choices import score_of_choices
from loadgen.console import results_console
from loadgen.oracle_table import OracleTable, ResultUnreadable, read_table
from loadgen.records import OutputUnwritable
from loadgen.servers import write_json


def best_modes(table: OracleTable, constraints: Constraints) -> dict[str, str]:
    """The best mode by cell."""
    return {cell: best_mode(by_mode, table.reference, constraints) for cell, by_mode in table.cells.items()}


def not_judged(table: OracleTable, constraints: Constraints) -> dict[Constraint, dict[str, list[str]]]:
    """By constraint, the modes that it could not hold back for want of a measurement, each with the cells of that."""
    found: dict[Constraint, dict[str, list[str]]] = {}
    for cell, by_mode in table.cells.items():
        reference = by_mode[table.reference]
        for name, mode in by_mode.items():
            for kind in set(Constraint) - constraints.judged(mode, reference):
                if name != table.reference:
                    found.setdefault(kind, {}).setdefault(name, []).append(cell)
    return dict(sorted(found.items()))


def _words(kind: Constraint, missing: Mapping[str, list[str]], table: OracleTable) -> str:
    whole = sum(len(by_mode) - 1 for by_mode in table.cells.values())
    if sum(map(len, missing.values())) == whole:
        return f"The limit of {kind} was not applied: it was not measured."
    parts = (f"{mode} in {len(cells)} of {len(table.cells)} cells" for mode, cells in sorted(missing.items()))
    return f"The limit of {kind} was not applied to {', '.join(parts)}: not measured there."


def policy_scores(table: OracleTable, constraints: Constraints) -> dict[str, Score]:
    """The oracle and each mode used for everything, every cell once; of a comparison also every policy that chose.

    A policy's requests count as their modes were measured in their cell.
    """
    once = dict.fromkeys(table.cells, 1)
    choices = {"oracle": best_modes(table, constraints)}
    choices |= {f"always {mode}": dict.fromkeys(table.cells, mode) for mode in table.complete_modes}
    scores = {name: score(made, table.cells, once, table.reference, constraints) for name, made in choices.items()}
    return scores | {
        policy: score_of_choices(chosen, table.cells, table.reference, constraints)
        for policy, chosen in table.chosen.items()
        if chosen
    }


def register(app: typer.Typer) -> None:
    """Adds `oracle`."""

    @app.command()
    def oracle(
        result: Annotated[
            Path, typer.Argument(help="`sweep.json`, or `compare.json` for classes and the policies that chose.")
        ] = Path("results/sweep/sweep.json"),
        allow: Annotated[list[str] | None, typer.Option(help="Only these modes and the reference.")] = None,
        out: Annotated[Path | None, typer.Option(help="Write the choices and scores as JSON.")] = None,
    ) -> None:
        """The best mode of each workload or class, and what fixed modes and policies reach of it."""
        console = results_console()
        try:
            table = read_table(result)
        except ResultUnreadable as error:
            console.print(f"oracle: {error}", style="red", markup=False)
            raise typer.Exit(2) from error
        if allow:
            table = table.only(allow)
        constraints = Constraints()
        best, scores = best_modes(table, constraints), policy_scores(table, constraints)
        missing = not_judged(table, constraints)
        console.print(_best_table(table, best, constraints))
        console.print(_score_table(scores))
        for kind, modes in missing.items():
            console.print(_words(kind, modes, table), style="yellow", markup=False)
        if out is not None:
            try:
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
            except OutputUnwritable as error:
                console.print(f"oracle: {error}", style="red", markup=False)
                raise typer.Exit(2) from error


def _best_table(table: OracleTable, best: dict[str, str], constraints: Constraints) -> Table:
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


def _broken(item: Score) -> str:
    """How many choices break a limit, by kind; one may break several."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in item.broken.items() if count)
    return f"{item.unsafe}: {kinds}" if kinds else "0"


def _score_table(scores: dict[str, Score]) -> Table:
    shown = Table(title="Against the oracle: fixed modes in every cell once, policies by the requests that they sent")
    figures = ("requests", "speed-up", "energy ratio", "latency capture", "energy capture", "as the oracle")
    for name in ("", *figures, "breaks a limit"):
        shown.add_column(name, justify="left" if name in ("", "breaks a limit") else "right")
    for name, item in scores.items():
        shown.add_row(
            name,
            str(item.requests),
            f"{item.speedup:.3f}",
            "unknown" if item.energy_ratio is None else f"{item.energy_ratio:.3f}",
            f"{100 * item.latency_capture:.1f} %",
            "unknown" if item.energy_capture is None else f"{100 * item.energy_capture:.1f} %",
            f"{100 * item.oracle_match:.0f} %",
            _broken(item),
        )
    return shown
