"""What the oracle looks at: every mode measured on each workload or request class, and what policies chose there."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadgen.best_mode import Measured
from loadgen.compared_choices import Choices, choices_of, class_table, memory_by_mode
from loadgen.comparison import LIGHT, SATURATING, STATIC, Row


class ResultUnreadable(Exception):
    """The file is missing or is no result of `sweep` or `compare`; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class OracleTable:
    """Cells by name, each with the modes that were measured beside the reference.

    chosen: requests by (cell, mode), by policy; of a sweep none.
    """

    reference: str
    cells: Mapping[str, Mapping[str, Measured]]
    chosen: Mapping[str, Choices] = field(default_factory=dict)

    @property
    def complete_modes(self) -> list[str]:
        """Modes that every cell has: only these can be compared as a policy."""
        in_each = [set(by_mode) for by_mode in self.cells.values()]
        return sorted(set.intersection(*in_each)) if in_each else []

    def only(self, modes: list[str]) -> "OracleTable":
        """Without the modes that are not named, such as those that failed the quality gate, and their choices."""
        kept = {*modes, self.reference}
        return OracleTable(
            self.reference,
            {cell: {mode: row for mode, row in of.items() if mode in kept} for cell, of in self.cells.items()},
            {
                policy: {place: count for place, count in choices.items() if place[1] in kept}
                for policy, choices in self.chosen.items()
            },
        )


def read_table(path: Path) -> OracleTable:
    """The table of a `sweep.json` or a `compare.json`. Raises ResultUnreadable."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        table = _comparison(found) if found.get("command") == "compare" else _sweep(found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ResultUnreadable(f"{path} is no result of sweep or compare: {type(error).__name__}: {error}") from error
    if not table.cells:
        raise ResultUnreadable(f"{path} has no cell with its reference mode {table.reference!r}")
    return table


def _sweep(found: Mapping[str, Any]) -> OracleTable:
    """By workload and concurrency.

    A mode's latency is its ratio to the reference times the reference's median: so all cells of a row rest on rounds
    that both were measured in, and drift between rounds does not decide. Its energy too, where it was measured.
    """
    reference, rows = str(found["reference"]), found["rows"]
    references = {_cell(row): row for row in rows if row["mode"] == reference}
    cells: dict[str, dict[str, Measured]] = {}
    for row in rows:
        if (base := references.get(_cell(row))) is None:
            continue
        latency_ms = _beside(row["latency"], base["latency"])
        if latency_ms is not None:
            cells.setdefault(_cell(row), {})[str(row["mode"])] = _measured(latency_ms, row, base)
    return OracleTable(reference, cells)


def _comparison(found: Mapping[str, Any]) -> OracleTable:
    """By request class and load; the reference is fp16, or the first fixed mode where that was not compared."""
    statics = [str(name).removeprefix(STATIC) for name in found["policies"] if str(name).startswith(STATIC)]
    reference = "fp16" if "fp16" in statics or not statics else statics[0]
    rows = [Row.read(item) for item in found["requests"]]
    memory_mb = memory_by_mode(found.get("engines"))
    cells: dict[str, Mapping[str, Measured]] = {}
    chosen: dict[str, dict[tuple[str, str], int]] = {}
    for rate in (LIGHT, SATURATING):
        table = {name: of for name, of in class_table(rows, rate, memory_mb).items() if reference in of}
        cells |= {f"{name}, {rate} load": of for name, of in table.items()}
        for policy, choices in choices_of(rows, rate, table).items():
            placed = {(f"{name}, {rate} load", mode): count for (name, mode), count in choices.items()}
            chosen.setdefault(policy, {}).update(placed)
    return OracleTable(reference, cells, chosen)


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
