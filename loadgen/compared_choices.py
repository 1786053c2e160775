"""A comparison's policies against the oracle: what they chose, judged by the fixed modes measured beside them.

Pure: a comparison's rows in, a table by class and choices by policy out. Source of the measures: ModeSwitch-LLM
(arXiv 2605.23057), oracle policy.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from loadgen.best_mode import Constraints, Measured, Score, Table, score
from loadgen.comparison import STATIC, Place, Row, common_latencies
from loadgen.energy_by_mode import Spent, j_per_token

Choices = Mapping[tuple[str, str], int]
"""Requests by (class, mode)."""


def memory_by_mode(engines: Iterable[Mapping[str, Any]] | None) -> dict[str, float]:
    """Peak memory in MB of each mode's engine since it started, from engines' states as `GET /v1/modes` shows them."""
    return {
        str(mode): float(state["peak_memory_bytes"]) / 1e6
        for state in engines or ()
        if isinstance(state.get("peak_memory_bytes"), int | float)
        for mode in state.get("modes") or ()
    }


def class_table(rows: Sequence[Row], rate: str, memory_mb: Mapping[str, float]) -> dict[str, dict[str, Measured]]:
    """Each fixed mode by class, over the requests that every policy answered at this rate."""
    latencies = common_latencies(rows, rate)
    spent = {(row.policy, Place(row.round, row.index, row.name)): row for row in rows if row.rate == rate and row.ok}
    table: dict[str, dict[str, Measured]] = {}
    for policy in filter(lambda name: name.startswith(STATIC), latencies):
        mode, places = policy.removeprefix(STATIC), latencies[policy]
        for name in dict.fromkeys(place.name for place in places):
            of_class = [place for place in places if place.name == name]
            answered = [spent[policy, place] for place in of_class]
            table.setdefault(name, {})[mode] = Measured(
                fmean(places[place] for place in of_class),
                j_per_token([Spent(row.energy_j, row.output_tokens) for row in answered]),
                memory_mb.get(mode),
            )
    return table


def choices_of(rows: Iterable[Row], rate: str, table: Table) -> dict[str, Choices]:
    """What every policy that chooses sent where, of the requests whose mode is in the table."""
    found: dict[str, Counter[tuple[str, str]]] = {}
    for row in rows:
        chose = row.rate == rate and row.mode is not None and not row.policy.startswith(STATIC)
        if chose and row.mode in table.get(row.name, {}):
            found.setdefault(row.policy, Counter())[row.name, str(row.mode)] += 1
    return dict(found)


def score_of_choices(choices: Choices, table: Table, reference: str, constraints: Constraints) -> Score:
    """The score of one policy: each of its requests counts as its mode was measured on that class."""
    cells = {f"{name}/{mode}": (name, mode) for name, mode in choices}
    return score(
        {cell: mode for cell, (_, mode) in cells.items()},
        {cell: table[name] for cell, (name, _) in cells.items()},
        {cell: choices[place] for cell, place in cells.items()},
        reference,
        constraints,
    )
