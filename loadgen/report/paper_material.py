"""The paper's own measurements as material: an example of every section that its tables allow."""

from collections import Counter

from loadgen.paper.figures import policies_605
from loadgen.paper.rules import PAPER_NAMES
from loadgen.paper.tables import FP16, PaperTables
from loadgen.report.material import (
    ACCURACY,
    Accuracy,
    Comparison,
    Controlled,
    Effect,
    Estimate,
    Family,
    Material,
    PolicyRow,
    Screening,
)

_OURS = {theirs: ours for ours, theirs in PAPER_NAMES.items()}
_SOURCE = "arXiv 2605.23057"
_QUESTIONS = 100
"""Of each benchmark."""
_SHORT = {
    "short_prompt_short_output": "short/short",
    "short_prompt_long_output": "short/long",
    "long_prompt_short_output": "long/short",
    "long_prompt_long_output": "long/long",
    "shared_prefix_chat": "shared prefix",
    "memory_pressure_long_context": "memory pressure",
}


def paper_material(tables: PaperTables) -> Material:
    """Latencies and energies are one measurement each, without an interval; accuracies have Wilson's."""
    return Material(
        title=f"ModeSwitch-LLM ({_SOURCE}), drawn from its measured rows",
        screenings=[_screening(tables)],
        controlled=[_controlled(tables)],
        comparisons=[_comparison(tables)],
        accuracies=[(_SOURCE, _accuracies(tables))],
    )


def _mode(name: str) -> str:
    return _OURS.get(name, name)


def _family(name: str) -> str:
    return _SHORT.get(name, name.removesuffix("_eval").replace("_", "-"))


def _screening(tables: PaperTables) -> Screening:
    effects = []
    for family, by_mode in tables.dense().items():
        reference = by_mode[FP16]
        for mode, measured in by_mode.items():
            ours, base = measured.energy_j_per_token, reference.energy_j_per_token
            energy = None if ours is None or not base else Estimate(ours / base)
            speedup = Estimate(reference.latency_ms / measured.latency_ms)
            effects.append(Effect(_family(family), _mode(mode), speedup, energy))
    return Screening(_SOURCE, _mode(FP16), effects)


def _controlled(tables: PaperTables) -> Controlled:
    families = [
        Family(
            _family(family),
            Estimate(row.speedup, n=1),
            Estimate(row.energy_ratio, n=1),
            Counter({_mode(row.mode): 1}),
        )
        for family, row in tables.online.items()
    ]
    return Controlled(_SOURCE, "rules_published", "online run", _mode(FP16), families)


def _comparison(tables: PaperTables) -> Comparison:
    rows = [
        PolicyRow(
            name,
            score.requests,
            Estimate(score.speedup),
            None if score.energy_ratio is None else Estimate(score.energy_ratio),
            score.latency_capture,
            score.oracle_match,
            score.unsafe,
            overhead_ms=tables.overheads_ms[name],
        )
        for name, score in policies_605(tables).items()
    ]
    return Comparison(_SOURCE, "the paper's set", _mode(FP16), rows)


def _accuracies(tables: PaperTables) -> list[Accuracy]:
    return [
        Accuracy(_mode(mode), _family(family), ACCURACY, Estimate.percent(measured.accuracy_pct, _QUESTIONS))
        for family, by_mode in tables.dense().items()
        for mode, measured in by_mode.items()
        if measured.accuracy_pct is not None
    ]
