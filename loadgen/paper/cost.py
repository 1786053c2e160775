"""The policy `cost` on the paper's families: a profile fitted to the table's rows, and what is chosen with it.

The profile is built as calibration would build it: per mode one prefill curve and one step time, and the outcome of the
paper's quality test. The policy sees a request as the controller would show it, alone on an idle server.
"""

from collections.abc import Callable, Mapping
from statistics import mean
from typing import Any

import numpy as np

from app.routing.classes import prompt_shape
from app.routing.decision import Decision
from app.routing.features import RequestFeatures, measure
from app.routing.mode_info import ModeInfo
from app.routing.output_length import OutputLengthPredictor
from app.routing.policies import make_policy
from app.routing.profile import GateOutcome, Profile, ProfileRefused, parse_profile
from app.routing.settings import RoutingSettings
from app.routing.snapshot import EngineView, Snapshot
from app.routing.tags import Tag
from loadgen.best_mode import Constraint, Constraints
from loadgen.paper.rules import PAPER_NAMES
from loadgen.paper.tables import FP16, PAPER_HARDWARE, PAPER_MODEL, Family, PaperTables, TablesDamaged

ABOUT_COST = (
    "`cost` reads a profile made of this table's own rows: per mode a prefill curve by prompt length, one step time "
    "and their joules (from families of equal prompts and different outputs; the shared prefix is not fitted), what "
    "speculation accepts in mathematics, and per kind of request whether the paper's limits on quality hold; with "
    "benchmarks named, per benchmark. So it is scored on rows that it was fitted to: what it misses, the model of "
    "costs loses. `learned` is not scored here: `train` without a file does so, on families that it was not trained on."
)

MODES = tuple(
    # One engine each, since the authors ran one mode at a time.
    ModeInfo(name, name, weights, lossless, prefix_reuse=reuse, speculative=name == "speculative")
    for name, weights, lossless, reuse in (
        ("fp16", "fp16", True, False),
        ("prefix_caching", "fp16", True, True),
        ("speculative", "fp16", True, False),
        ("int8", "int8", False, False),
        ("gptq", "gptq", False, False),
        ("gptq_prefix_caching", "gptq", False, True),
    )
)
"""Continuous batching is left out: its rows are of four requests at once, and not to be compared one by one."""

_LIMITS = Constraints()
_SETTINGS = RoutingSettings(max_energy_ratio=_LIMITS.energy_ratio_max, max_memory_ratio=_LIMITS.memory_ratio_max)
_TEXTS = {
    Tag.NONE: "Tell me about the history of Rome.",
    Tag.MULTIPLE_CHOICE: "Which is right?\nA) one\nB) two\nC) three\nD) four\nAnswer:",
    Tag.MATHEMATICS: "Natalia sold 48 clips in April and half as many in May. How many clips did she sell? "
    "Step by step.",
}
_SHARED_SHARE = 7 / 8
"""Which part of a chat prompt is shared is assumed."""
_PRESSING_KV_USE = 0.9

Families = Mapping[str, Family]
Quantity = Callable[[str], float]
"""A mode's cost of one request of a family: ms or J."""


def cost_choices(tables: PaperTables) -> dict[str, dict[str, str]]:
    """Modes by family that `cost` chooses, in the tables' words. Raises TablesDamaged for rows that fit no profile.

    Once it sees the requests alone; once the client names each benchmark, and quality is known by that name.
    """
    return {
        name: {family: PAPER_NAMES[mode] for family, mode in decided("cost", tables, named=named).items()}
        for name, named in (("cost", False), ("cost, benchmarks named", True))
    }


def decided(policy: str, tables: PaperTables, *, named: bool = False) -> dict[str, str]:
    """Modes by family that the policy of this name chooses with the fitted profile. Raises as `cost_choices`."""
    decide = make_policy(policy, MODES, _SETTINGS, fitted_profile(tables, named=named)).decide
    found = {}
    for family in tables.families:
        outcome = decide(*shown(tables, family, named=named))
        if not isinstance(outcome, Decision):
            raise TablesDamaged(f"{policy} finds no mode for {family}")
        if PAPER_NAMES[outcome.mode] not in tables.dense()[family]:
            raise TablesDamaged(f"{policy} chooses {outcome.mode} on {family}, where it was not measured")
        found[family] = outcome.mode
    return found


def output_tokens(tables: PaperTables, name: str) -> int:
    """As FP16 wrote them: benchmarks end earlier than they may. Raises TablesDamaged."""
    measured = tables.dense()[name].get(FP16)
    if measured is None or measured.tokens_per_s is None:
        raise TablesDamaged(f"{name}: the tokens/s of {FP16} are missing")
    return max(1, round(measured.tokens_per_s * measured.latency_ms / 1000))


def shown(tables: PaperTables, name: str, *, named: bool = False) -> tuple[RequestFeatures, Snapshot]:
    """A request of the family and the idle engines, as the controller would see both. Raises TablesDamaged."""
    family = tables.families[name]
    tag, output = family.tag, output_tokens(tables, name)
    predictor = OutputLengthPredictor()
    for _ in range(3):
        predictor.observe(tag, prompt_shape(family.prompt_tokens), None, output, 0.0)
    kv_use = _PRESSING_KV_USE if family.memory_pressure else 0.0
    snapshot = Snapshot(engines={mode.engine: EngineView(engine=mode.engine, kv_use=kv_use) for mode in MODES})
    shared = round(_SHARED_SHARE * family.prompt_tokens) if family.shared_prefix else 0
    features = measure(
        text=_TEXTS[tag],
        prompt_tokens=family.prompt_tokens,
        snapshot=snapshot,
        predictor=predictor,
        settings=_SETTINGS,
        label=name if named else None,
        seen_tokens=shared,
        cached_tokens={mode.name: shared for mode in MODES if mode.prefix_reuse} if shared else None,
    )
    return features, snapshot


def fitted_profile(tables: PaperTables, *, named: bool = False) -> Profile:
    """The profile of the table's rows. named: a benchmark's quality counts for its name, not for its tag.

    Raises TablesDamaged when the rows are too few to fit one.
    """
    content = {
        "schema_version": 1,
        "version": "fitted to the paper's table",
        "model": PAPER_MODEL,
        "hardware": PAPER_HARDWARE,
        "modes": {mode.name: _mode_profile(tables, mode) for mode in MODES},
        "quality": _quality(tables, named),
    }
    try:
        return parse_profile(content, model=PAPER_MODEL, hardware=PAPER_HARDWARE)
    except ProfileRefused as refused:
        raise TablesDamaged(f"no profile can be fitted to the rows: {refused}") from refused


def _mode_profile(tables: PaperTables, mode: ModeInfo) -> dict[str, Any]:
    theirs = PAPER_NAMES[mode.name]
    # Not every mode was measured on every family.
    rows = {name: by_mode[theirs] for name, by_mode in tables.dense().items() if theirs in by_mode}
    families = {name: tables.families[name] for name in rows}
    outputs = {name: output_tokens(tables, name) for name in rows}

    def latency_ms(name: str) -> float:
        return rows[name].latency_ms

    def joules(name: str) -> float:
        return (rows[name].energy_j_per_token or 0.0) * outputs[name]

    step_ms = _per_token(families, outputs, latency_ms)
    prefill_ms = _prefill(families, outputs, latency_ms, step_ms)
    memory_mb = [row.memory_mb for row in rows.values() if row.memory_mb is not None]
    content: dict[str, Any] = {
        "prefill_ms": prefill_ms,
        "step_ms": [(1, step_ms)],
        "peak_memory_bytes": mean(memory_mb) * 1e6 if memory_mb else None,
    }
    if all(row.energy_j_per_token is not None for row in rows.values()):
        step_j = _per_token(families, outputs, joules)
        content |= {"prefill_j": _prefill(families, outputs, joules, step_j), "decode_j_per_token": [(1, step_j)]}
    mathematics = [name for name, family in families.items() if family.mathematics and outputs[name] > 1]
    if mode.speculative and mathematics:
        lengths, firsts_ms = [tokens for tokens, _ in prefill_ms], [first_ms for _, first_ms in prefill_ms]
        accepted = []
        for name in mathematics:
            first_ms = float(np.interp(families[name].prompt_tokens, lengths, firsts_ms))
            accepted.append(step_ms * (outputs[name] - 1) / (latency_ms(name) - first_ms) - 1)
        content["speculation"] = {"accepted_per_step": {Tag.MATHEMATICS.value: max(0.0, mean(accepted))}}
    return content


def _per_token(families: Families, outputs: Mapping[str, int], cost: Quantity) -> float:
    """What one more token costs: families of equal prompts and different outputs differ by nothing else."""
    slopes = []
    for names in _by_prompt(families, lambda family: family.tag is Tag.NONE and not family.memory_pressure):
        short, long = min(names, key=outputs.__getitem__), max(names, key=outputs.__getitem__)
        if outputs[long] > outputs[short]:
            slopes.append((cost(long) - cost(short)) / (outputs[long] - outputs[short]))
    if not slopes:
        raise TablesDamaged("no two families have equal prompts and different outputs: no step can be fitted")
    return mean(slopes)


def _prefill(families: Families, outputs: Mapping[str, int], cost: Quantity, step: float) -> list[tuple[int, float]]:
    """By prompt tokens, from what is left of a request without its steps.

    Mathematics is not fitted: of its long outputs little is left, and that would be the error of the step.
    """
    return [
        (
            families[names[0]].prompt_tokens,
            max(0.0, mean(cost(name) - step * (outputs[name] - 1) for name in names)),
        )
        for names in _by_prompt(families, lambda family: not family.mathematics)
    ]


def _by_prompt(families: Families, wanted: Callable[[Family], bool]) -> list[list[str]]:
    """Families that share no prefix, together by their prompts' length, shortest first."""
    found: dict[int, list[str]] = {}
    for name, family in families.items():
        if wanted(family) and not family.shared_prefix:
            found.setdefault(family.prompt_tokens, []).append(name)
    return [found[tokens] for tokens in sorted(found)]


def _quality(tables: PaperTables, named: bool) -> list[dict[str, str]]:
    """The paper's quality test of the modes that may lose some. Of several rows in a scope a failed one decides."""
    evidence = []
    for name, by_mode in tables.dense().items():
        tag = tables.families[name].tag
        for mode in MODES:
            if not mode.lossless and (row := by_mode.get(PAPER_NAMES[mode.name])) is not None:
                broken = _LIMITS.broken_by(row, by_mode[FP16])
                evidence.append(
                    {
                        "mode": mode.name,
                        "scope": name if named and tag is not Tag.NONE else tag.value,
                        "outcome": GateOutcome.FAIL if Constraint.QUALITY in broken else GateOutcome.PASS,
                        "metric": "accuracy or ROUGE-L",
                    }
                )
    return evidence
