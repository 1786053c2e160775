"""Reads the measured tables. SOURCES.md beside this file says where each comes from."""

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

from app.routing.tags import Tag
from loadgen.best_mode import Measured

PAPER_MODEL, PAPER_HARDWARE = "meta-llama/Llama-3.1-8B-Instruct", "NVIDIA A100-SXM4-40GB"
FP16 = "fp16_baseline"
DENSE_RUN = "0508"
"""The run with every mode on every family, once, in one go."""

Row = Mapping[str, str]


class TablesDamaged(Exception):
    """A table is missing or a cell is no number; the message names it."""


@dataclass(frozen=True, slots=True)
class OnlineRow:
    """One family of the controller's online run. quality_delta: accuracy points, or ROUGE-L for generated text."""

    mode: str
    speedup: float
    energy_ratio: float
    controller_ms: float
    fp16_ms: float
    quality_delta: float


@dataclass(frozen=True, slots=True)
class OracleRow:
    """One family of the authors' oracle."""

    mode: str
    speedup: float
    energy_reduction_pct: float


@dataclass(frozen=True, slots=True)
class Family:
    """Equal requests among the 605, and which mode each of the authors' policies chose for them."""

    requests: int
    prompt_tokens: int
    expected_output_tokens: int
    shared_prefix: bool
    memory_pressure: bool
    multiple_choice: bool
    mathematics: bool
    choices: Mapping[str, str]

    @property
    def tag(self) -> Tag:
        return Tag.MULTIPLE_CHOICE if self.multiple_choice else Tag.MATHEMATICS if self.mathematics else Tag.NONE


@dataclass(frozen=True, slots=True)
class PaperTables:
    """Everything measured, by family. `fixed` is by (run, mode, workload)."""

    fixed: Mapping[tuple[str, str, str], Measured]
    online: Mapping[str, OnlineRow]
    oracle: Mapping[str, OracleRow]
    families: Mapping[str, Family]
    overheads_ms: Mapping[str, float]

    def dense(self, *, batched: bool = False) -> dict[str, dict[str, Measured]]:
        """Modes by family in the dense run: the modes for single requests, or those that batch.

        They are never in one table: the latency of a mode that batches is that of the whole batch.
        """
        table: dict[str, dict[str, Measured]] = {family: {} for family in self.families}
        for (run, mode, workload), measured in self.fixed.items():
            if run == DENSE_RUN and workload in table and mode.endswith("continuous_batching") == batched:
                table[workload][mode] = measured
        return table

    @property
    def synthetic(self) -> list[str]:
        """Families of generated text; the rest are benchmarks."""
        return [family for family in self.families if not family.endswith("_eval")]

    @property
    def benchmarks(self) -> list[str]:
        return [family for family in self.families if family.endswith("_eval")]


def load_tables(folder: Traversable | None = None) -> PaperTables:
    """The tables of `folder`, by default those that come with this package. Raises TablesDamaged."""
    folder = folder or files(__package__)
    try:
        return PaperTables(
            fixed={(row["run"], row["mode"], row["workload"]): _measured(row) for row in _rows(folder, "fixed_modes")},
            online={row["family"]: _online(row) for row in _rows(folder, "online_0506")},
            oracle={row["family"]: _oracle(row) for row in _rows(folder, "oracle_0506")},
            families={row["family"]: _family(row) for row in _rows(folder, "requests_605")},
            overheads_ms={row["policy"]: float(row["overhead_ms"]) for row in _rows(folder, "overheads")},
        )
    except (KeyError, ValueError) as error:
        raise TablesDamaged(f"{folder}: {type(error).__name__}: {error}") from error


def load_published(folder: Traversable | None = None) -> dict[str, str]:
    """What the paper prints, as printed, by the name of the figure; empty when the file is not there."""
    path = (folder or files(__package__)).joinpath("published.json")
    if not path.is_file():
        return {}
    return {str(name): str(value) for name, value in json.loads(path.read_text())["figures"].items()}


def _rows(folder: Traversable, name: str) -> list[Row]:
    try:
        return list(csv.DictReader(folder.joinpath(f"{name}.csv").read_text().splitlines()))
    except OSError as error:
        raise TablesDamaged(f"{folder}: {name}.csv cannot be read: {error}") from error


def _number(text: str) -> float | None:
    return float(text) if text else None


def _measured(row: Row) -> Measured:
    return Measured(
        latency_ms=float(row["latency_ms"]),
        energy_j_per_token=_number(row["j_per_token"]),
        memory_mb=_number(row["peak_gpu_mb"]),
        accuracy_pct=_number(row["accuracy_pct"]),
        rouge_reference=_number(row["rouge_l_ref"]),
        tokens_per_s=_number(row["tokens_per_s"]),
    )


def _online(row: Row) -> OnlineRow:
    numbers = ("speedup", "energy_ratio", "controller_ms", "fp16_ms", "quality_delta")
    return OnlineRow(row["mode"], *(float(row[name]) for name in numbers))


def _oracle(row: Row) -> OracleRow:
    return OracleRow(row["mode"], float(row["speedup"]), float(row["energy_reduction_pct"]))


def _family(row: Row) -> Family:
    learned = row["logistic_and_tree"]
    return Family(
        requests=int(row["requests"]),
        prompt_tokens=int(row["prompt_tokens"]),
        expected_output_tokens=int(row["expected_output_tokens"]),
        shared_prefix=row["shared_prefix"] == "1",
        memory_pressure=row["memory_pressure"] == "1",
        multiple_choice=row["evaluation_mode"] == "multiple_choice_accuracy",
        mathematics=row["evaluation_mode"] == "final_answer_exact_match",
        choices={"rule": row["rule"], "logistic": learned, "tree": learned, "forest": row["forest"]},
    )
