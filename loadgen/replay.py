"""`replay paper`: the paper's figures from its measured rows, then beside what was published.

`replay ledger` is in `replay_ledger.py`.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from loadgen import replay_ledger
from loadgen.best_mode import Score
from loadgen.console import results_console
from loadgen.paper.cost import ABOUT_COST, cost_choices
from loadgen.paper.figures import (
    Compared,
    against_graphs,
    compare,
    computed,
    policies_605,
    score_choices,
    static_modes,
    table_oracle,
)
from loadgen.paper.rules import rule_choices
from loadgen.paper.tables import PaperTables, TablesDamaged, load_published, load_tables
from loadgen.records import OutputUnwritable
from loadgen.servers import write_json


def _figures_table(rows: list[Compared]) -> Table:
    table = Table(title="Figures of arXiv 2605.23057, computed from its per-family rows")
    table.add_column("figure")
    for name in ("computed", "published", "difference"):
        table.add_column(name, justify="right")
    for row in rows:
        value = "" if row.computed is None else f"{row.computed:.4g}" if row.computed < 1000 else f"{row.computed:.0f}"
        table.add_row(row.name, value, row.published or "", row.verdict)
    return table


def _scores_table(heading: str, scores: Mapping[str, Score]) -> Table:
    table = Table(title=heading)
    table.add_column("")
    for name in (
        "speed-up",
        "energy ratio",
        "latency capture",
        "energy capture",
        "as the oracle",
        "unsafe",
        "of which",
    ):
        table.add_column(name, justify="right")
    for name, item in scores.items():
        kinds = ", ".join(f"{count} {kind}" for kind, count in item.broken.items() if count)
        table.add_row(
            name,
            f"{item.speedup:.3f}",
            _or_unknown(item.energy_ratio),
            f"{100 * item.latency_capture:.1f} %",
            "unknown" if item.energy_capture is None else f"{100 * item.energy_capture:.1f} %",
            f"{100 * item.oracle_match:.0f} %",
            f"{item.unsafe} of {item.requests}",
            kinds,
        )
    return table


def _or_unknown(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def policy_choices(tables: PaperTables) -> dict[str, dict[str, str]]:
    """Choices by family of every policy that is scored on the table. Raises TablesDamaged as `cost_choices`."""
    return {
        **cost_choices(tables),
        **rule_choices(tables),
        "what the 2.10x run executed": {family: row.mode for family, row in tables.online.items()},
        "the oracle of that run": {family: row.mode for family, row in tables.oracle.items()},
        "oracle of this table": table_oracle(tables),
    }


def register(app: typer.Typer) -> None:
    """Adds `replay`."""
    replay = typer.Typer(help="Recompute decisions and figures from what was recorded.", no_args_is_help=True)
    app.add_typer(replay, name="replay")
    replay.callback()(_together)
    replay_ledger.register(replay)

    @replay.command()
    def paper(
        tables_folder: Annotated[Path | None, typer.Option("--tables", help="Other tables of the same form.")] = None,
        out: Annotated[Path | None, typer.Option(help="Write the figures as JSON.")] = None,
    ) -> None:
        """Compute the paper's figures from its rows, then compare with what it prints; score policies on its table."""
        console = results_console()
        try:
            tables = load_tables(tables_folder)
            choices = policy_choices(tables)
        except TablesDamaged as error:
            console.print(f"replay: {error}", style="red", markup=False)
            raise typer.Exit(2) from error
        found = computed(tables)
        rows = compare(found, load_published(tables_folder))
        console.print(_figures_table(rows))
        console.print("The oracle's 605 labels: 58 are known, so its row cannot be computed from the tables.")
        graphs = against_graphs(tables)
        console.print(f"The synthetic speed-up against FP16 with CUDA graphs, instead of eager FP16: {graphs:.2f}")
        groups = {
            "The authors' policies on 605 requests, without their overhead": policies_605(tables, with_overhead=False),
            "One mode for all synthetic families": static_modes(tables, tables.synthetic),
            "One mode for all families": static_modes(tables, tables.families),
            "Choices by family": {name: score_choices(tables, made) for name, made in choices.items()},
        }
        for heading, scores in groups.items():
            console.print(_scores_table(heading, scores))
        console.print(ABOUT_COST, markup=False)
        if out is not None:
            _write(out, rows, graphs, groups, console)


def _together() -> None:
    """Recompute decisions and figures from what was recorded."""


def _write(
    out: Path, rows: list[Compared], graphs: float, groups: Mapping[str, Mapping[str, Score]], console: Console
) -> None:
    result: dict[str, Any] = {
        "command": "replay paper",
        "figures": [dataclasses.asdict(row) | {"verdict": row.verdict} for row in rows],
        "synthetic speed-up against FP16 with graphs": graphs,
        "scores": {
            heading: {name: dataclasses.asdict(item) for name, item in scores.items()}
            for heading, scores in groups.items()
        },
        "about cost": ABOUT_COST,
    }
    try:
        write_json(out, result)
    except OutputUnwritable as error:
        console.print(f"replay: {error}", style="red", markup=False)
        raise typer.Exit(2) from error
