"""What routers are trained on: requests with their features and what every mode made of them."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from app.modes import CATALOGUE
from app.routing.classes import BatchPressure, classify, output_shape, prefill_score, prompt_shape
from app.routing.eligibility import QualityGate
from app.routing.features import RequestFeatures
from app.routing.mode_info import ModeInfo
from app.routing.policies.learned import FEATURE_NAMES, feature_vector
from app.routing.profile import QualityEvidence
from app.routing.settings import RoutingSettings
from app.routing.tags import Tag
from loadgen.best_mode import Constraint, Constraints, Measured, best_mode
from loadgen.paper.rules import PAPER_NAMES
from loadgen.paper.tables import PaperTables

LIVE_FEATURES = ("batch_size", "seen_tokens", "kv_use")
"""Signals of the running server, which the paper's routers do not see (its batch is fixed by the workload)."""


class TrainingDataUnusable(Exception):
    """The file is missing, malformed or has nothing to learn from; the message says where and what."""


@dataclass(frozen=True, slots=True)
class Example:
    """A request that several modes were measured on. Requests of one `group` are never split.

    weight: how many equal requests it stands for.
    """

    group: str
    features: RequestFeatures
    modes: Mapping[str, Measured]
    weight: float = 1.0

    @property
    def vector(self) -> tuple[float, ...]:
        """What a router sees of it."""
        return tuple(feature_vector(self.features))


@dataclass(frozen=True, slots=True)
class Dataset:
    """Examples that all have the reference mode."""

    examples: Sequence[Example]
    reference: str

    @property
    def modes(self) -> tuple[str, ...]:
        """Every mode that some example has, in order of appearance."""
        return tuple(dict.fromkeys(chain.from_iterable(example.modes for example in self.examples)))

    @property
    def groups(self) -> list[str]:
        return [example.group for example in self.examples]

    def features(self, *, live: bool = True) -> NDArray[np.float32]:
        """Shape (examples, features); without live signals these columns are 0, so that nothing is learned of them."""
        rows = np.array([example.vector for example in self.examples], dtype=np.float32)
        if not live:
            rows[:, [FEATURE_NAMES.index(name) for name in LIVE_FEATURES]] = 0.0
        return rows

    def labels(self, constraints: Constraints) -> list[str]:
        """The oracle's choice for each example."""
        return [best_mode(example.modes, self.reference, constraints) for example in self.examples]

    def weights(self) -> NDArray[np.float64]:
        return np.array([example.weight for example in self.examples], dtype=np.float64)

    def not_judged(self, constraints: Constraints) -> dict[Constraint, float]:
        """By constraint, the requests in which it could not hold back some mode for want of a measurement."""
        found = dict.fromkeys(Constraint, 0.0)
        for example in self.examples:
            reference = example.modes[self.reference]
            others = [mode for name, mode in example.modes.items() if name != self.reference]
            for kind in Constraint:
                if any(kind not in constraints.judged(mode, reference) for mode in others):
                    found[kind] += example.weight
        return {kind: requests for kind, requests in found.items() if requests}

    def allowing(self, modes: Collection[str]) -> "Dataset":
        """Without the modes that are not named. Raises TrainingDataUnusable for one that was never measured."""
        if unknown := sorted(set(modes) - set(self.modes)):
            raise TrainingDataUnusable(
                f"no request was measured with {', '.join(unknown)}; there are {', '.join(self.modes)}"
            )
        return self._keeping([set(modes)] * len(self.examples))

    def passing(self, evidence: Sequence[QualityEvidence]) -> "Dataset":
        """Without the modes that the quality gate keeps from a request, as it would where they serve.

        What the catalogue does not know as lossless needs a pass. Raises TrainingDataUnusable where nothing is left.
        """
        infos = [
            ModeInfo(name, name, "", lossless=name in CATALOGUE and CATALOGUE[name].lossless) for name in self.modes
        ]
        gate = QualityGate(infos, evidence, RoutingSettings(reference_mode=self.reference))
        return self._keeping([example.modes.keys() - gate.refused(example.features) for example in self.examples])

    def _keeping(self, kept: Sequence[Collection[str]]) -> "Dataset":
        """With these modes of each example, and the reference."""
        left = [
            replace(
                example,
                modes={name: mode for name, mode in example.modes.items() if name in names or name == self.reference},
            )
            for example, names in zip(self.examples, kept, strict=True)
        ]
        if all(len(example.modes) == 1 for example in left):
            raise TrainingDataUnusable(f"no mode but {self.reference} may be chosen: there is nothing to learn")
        return Dataset(left, self.reference)


def read_training(path: Path, reference: str) -> Dataset:
    """The rows of a `training.jsonl`. Rows without the reference or with a single mode are left out.

    A row is `{"group", "features", "modes": {mode: {"latency_ms", "energy_j"}}}`; an energy may be null. Energies are
    of the whole request: modes answer the same request, so their ratios are those of J/token.
    Raises TrainingDataUnusable.
    """
    examples: list[Example] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    examples.append(_example(json.loads(line)))
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise TrainingDataUnusable(
                        f"{path}, line {number}, is no training row: {type(error).__name__}: {error} "
                        "(`compare` writes them to training.jsonl)"
                    ) from error
    except OSError as error:
        raise TrainingDataUnusable(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise TrainingDataUnusable(f"{path} is no text: {error}") from error
    kept = [example for example in examples if reference in example.modes and len(example.modes) > 1]
    if not kept:
        raise TrainingDataUnusable(
            f"{path} has no row with the mode {reference} and another one ({len(examples)} rows)"
        )
    return Dataset(kept, reference)


def _example(row: dict[str, Any]) -> Example:
    features = msgspec.convert(row["features"], RequestFeatures)
    return Example(
        str(row["group"]),
        features,
        {str(mode): _measured(found) for mode, found in row["modes"].items()},
    )


def _measured(found: Mapping[str, Any]) -> Measured:
    latency_ms, energy_j = float(found["latency_ms"]), found.get("energy_j")
    if not 0 < latency_ms < inf:
        raise ValueError(f"latency_ms must be above 0, not {latency_ms}")
    if energy_j is not None and not 0 <= float(energy_j) < inf:
        raise ValueError(f"energy_j must be at least 0 or null, not {energy_j}")
    return Measured(latency_ms, None if energy_j is None else float(energy_j))


def paper_dataset(tables: PaperTables) -> Dataset:
    """The paper's 605 requests: 11 different ones, each with the dense run's measurements and its number as weight."""
    ours = {theirs: name for name, theirs in PAPER_NAMES.items()}
    dense = tables.dense()
    examples = [
        Example(
            name,
            paper_features(
                family.prompt_tokens,
                family.expected_output_tokens,
                family.tag,
                shared_prefix=family.shared_prefix,
                memory_pressure=family.memory_pressure,
            ),
            {ours.get(mode, mode): measured for mode, measured in dense[name].items()},
            float(family.requests),
        )
        for name, family in tables.families.items()
    ]
    return Dataset(examples, "fp16")


def paper_features(
    prompt_tokens: int, output_tokens: int, tag: Tag, *, shared_prefix: bool = False, memory_pressure: bool = False
) -> RequestFeatures:
    """The features of a single request on an idle server."""
    score = prefill_score(prompt_tokens, output_tokens, memory_pressure)
    return RequestFeatures(
        prompt_tokens=prompt_tokens,
        expected_output_tokens=output_tokens,
        shared_prefix=shared_prefix,
        memory_pressure=memory_pressure,
        tag=tag,
        prompt_shape=prompt_shape(prompt_tokens),
        output_shape=output_shape(output_tokens),
        prefill_score=score,
        request_class=classify(
            BatchPressure.LOW, shared_prefix, memory_pressure, tag, prompt_tokens, output_tokens, score
        ),
    )


def twins(train: Iterable[Sequence[float]], test: Sequence[Sequence[float]]) -> int:
    """Test rows whose features also occur in the training rows: where many do, a match says little."""
    known = {tuple(row) for row in train}
    return sum(tuple(row) in known for row in test)
