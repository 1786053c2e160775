"""The paper's tables 1 to 3 from whatever was measured."""

from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.report.material import Accuracy, Comparison, Estimate, Screening

UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class DataTable:
    """Cells as they are shown; the first column names the row."""

    title: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def fastest_modes(found: Screening) -> DataTable:
    """Table 1: the fastest mode of each workload, with the energy of that mode."""
    rows = []
    for workload in found.workloads:
        best = max((of for of in found.effects if of.workload == workload), key=lambda of: of.speedup.value)
        rows.append([workload, best.mode, best.speedup.words, _words(best.energy_ratio), _count(best.speedup)])
    return DataTable(
        "Fastest mode of each workload",
        f"Ratios to {found.reference} [95 % interval over rounds], from {found.source}. "
        "Nothing is said of quality here: see the table of accuracy.",
        ("workload", "mode", "speed-up (times)", "energy ratio", "rounds"),
        rows,
    )


def _words(value: Estimate | None) -> str:
    return UNKNOWN if value is None else value.words


def _count(value: Estimate) -> str:
    return "1" if value.n is None else str(value.n)


def accuracy(source: str, found: Sequence[Accuracy]) -> DataTable:
    """Table 2: modes by benchmark; a cell has its interval and, where there is a gate, the gate's word."""
    scopes = list(dict.fromkeys(f"{item.scope}, {item.metric}" for item in found))
    cells = {(item.mode, f"{item.scope}, {item.metric}"): item for item in found}
    rows = [
        [mode, *(_accuracy(cells.get((mode, scope))) for scope in scopes)]
        for mode in dict.fromkeys(item.mode for item in found)
    ]
    return DataTable("Quality by mode", f"[95 % interval]; from {source}.", ("mode", *scopes), rows)


def _accuracy(item: Accuracy | None) -> str:
    if item is None:
        return ""
    count = "" if item.value.n is None else f", n={item.value.n}"
    return f"{item.value.words}{count}{f' ({item.outcome})' if item.outcome else ''}"


def policies(found: Comparison) -> DataTable:
    """Table 3: every policy with what it won; columns that nobody has a figure for are left out."""
    columns = {
        "requests": [str(row.requests) for row in found.rows],
        "errors": ["" if row.errors is None else str(row.errors) for row in found.rows],
        "speed-up (times)": ["" if row.speedup is None else row.speedup.words for row in found.rows],
        "energy ratio": ["" if row.energy_ratio is None else row.energy_ratio.words for row in found.rows],
        "of the oracle's speed": [_percent(row.oracle_share) for row in found.rows],
        "as the oracle": [_percent(row.oracle_match) for row in found.rows],
        "breaks a constraint": ["" if row.unsafe is None else str(row.unsafe) for row in found.rows],
        "decision (ms)": ["" if row.overhead_ms is None else f"{row.overhead_ms:.3g}" for row in found.rows],
    }
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    rows = [[row.name, *(cells[place] or UNKNOWN for cells in shown.values())] for place, row in enumerate(found.rows)]
    caption = (
        f"{found.setting}: ratios to {found.reference} [95 % interval over {found.resampled}], from {found.source}."
    )
    return DataTable(f"Policies, {found.setting}", caption, ("policy", *shown), rows)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"
