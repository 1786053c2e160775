"""Routers that learn: the paper's three, which imitate the oracle, and one that predicts what each mode costs.

Source of the three: ModeSwitch-LLM (arXiv 2605.23057), section "Learned routers". scikit-learn is imported when one is
fitted, since the command list imports this package.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.controller.trained_model import FORMAT_VERSION, INPUT, OUTPUT, Kind, safe_costs
from app.routing.policies.learned import FEATURE_NAMES
from loadgen.best_mode import Constraints
from loadgen.statistics import Interval, grouped_bootstrap
from loadgen.training_data import Dataset, twins

Floats = NDArray[np.float32]

_NOT_MEASURED = 10.0
"""A mode that was not measured on a request is taken for so many times its worst mode: never the choice there."""


class NothingToLearn(Exception):
    """One mode is best everywhere, or there are too few groups to split; the message says which."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A trained router. `estimator` maps (rows, features) to what `kind` says, by columns in the order of `modes`."""

    learner: str
    kind: Kind
    estimator: Any
    modes: tuple[str, ...]
    reference: str

    def scores(self, rows: Floats) -> list[list[float]]:
        """One score per mode and row, lower is better: what the exported file must give too."""
        if self.kind == "probability":
            return [[-float(value) for value in row] for row in self.estimator.predict_proba(rows)]
        found = np.asarray(self.estimator.predict(rows)).reshape(len(rows), -1)
        if self.kind == "cost":
            return [[float(value) for value in row] for row in found]
        return [safe_costs([float(value) for value in row], self.modes.index(self.reference)) for row in found]

    def choices(self, rows: Floats, allowed: Sequence[Mapping[str, object]]) -> list[str]:
        """The best mode of each row among `allowed`, as the policy chooses among the eligible."""
        chosen = []
        for scores, modes in zip(self.scores(rows), allowed, strict=True):
            ranked = sorted(zip(scores, self.modes, strict=True))
            chosen.append(next((mode for _, mode in ranked if mode in modes), self.reference))
        return chosen


def _tree() -> Any:
    from sklearn.tree import DecisionTreeClassifier

    return DecisionTreeClassifier(max_depth=5, min_samples_leaf=3, random_state=0)


def _forest() -> Any:
    from sklearn.ensemble import RandomForestClassifier

    return RandomForestClassifier(n_estimators=300, max_depth=10, random_state=0)


def _logistic() -> Any:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))


def _cost() -> Any:
    from sklearn.ensemble import RandomForestRegressor

    return RandomForestRegressor(n_estimators=100, max_depth=8, min_samples_leaf=2, random_state=0)


CLASSIFIERS: Mapping[str, Callable[[], Any]] = {"tree": _tree, "forest": _forest, "logistic": _logistic}
"""Sizes of the paper: depth 5 and leaf 3; 300 trees of depth 10."""

COST = "cost"
LEARNERS = (*CLASSIFIERS, COST)


def fit(learner: str, data: Dataset, rows: Floats, constraints: Constraints) -> Fitted:
    """Fits one of `LEARNERS` on `rows`, which are `data.features()`. Raises NothingToLearn."""
    if learner == COST:
        return _fit_cost(data, rows)
    labels = data.labels(constraints)
    if len(set(labels)) < 2:
        raise NothingToLearn(f"{labels[0]} is the best mode of every request: use the policy static:{labels[0]}")
    estimator = CLASSIFIERS[learner]()
    estimator.fit(rows, labels, **_weights(estimator, data.weights()))
    return Fitted(learner, "probability", estimator, tuple(map(str, estimator.classes_)), data.reference)


def _weights(estimator: Any, weights: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    """A pipeline wants its last step named."""
    return {f"{estimator.steps[-1][0]}__sample_weight" if hasattr(estimator, "steps") else "sample_weight": weights}


def _fit_cost(data: Dataset, rows: Floats) -> Fitted:
    latencies = [_targets(data, example, "latency_ms") for example in range(len(data.examples))]
    energies = [_targets(data, example, "energy_j_per_token") for example in range(len(data.examples))]
    # With energies of some requests only, the others would teach that every mode is equal.
    with_energy = all(row is not None for row in energies)
    targets = [
        [*(latency or ()), *(energy or () if with_energy else ())]
        for latency, energy in zip(latencies, energies, strict=True)
    ]
    estimator = _cost()
    estimator.fit(rows, np.array(targets), sample_weight=data.weights())
    return Fitted(COST, "cost_energy" if with_energy else "cost", estimator, data.modes, data.reference)


def _targets(data: Dataset, index: int, quantity: str) -> list[float] | None:
    """Logarithms by mode of the data set; None where a mode that ran has no such figure."""
    measured = data.examples[index].modes
    values = {mode: getattr(found, quantity) for mode, found in measured.items()}
    if any(value is None or value <= 0 for value in values.values()):
        return None
    missing = _NOT_MEASURED * max(values.values())
    return [log(values.get(mode, missing)) for mode in data.modes]


@dataclass(frozen=True, slots=True)
class Held:
    """A router on requests of groups that it did not see in training. Ratios are weighted by requests.

    latency_capture: mean of oracle latency / chosen latency, above 1 where constraints were broken to be faster.
    confusion: requests by (oracle's mode, chosen mode). twin_share: of test rows with a twin in training.
    speedup_interval: of `speedup`. energy_ratio: mean of chosen J / the reference's, over the requests whose modes all
    have joules, so that it is of the same requests for every policy; None without any. Both resample prompt groups.
    """

    learner: str
    requests: float
    match: float
    latency_capture: float
    speedup: float
    unsafe: float
    twin_share: float
    confusion: Mapping[tuple[str, str], float]
    speedup_interval: Interval
    energy_ratio: Interval | None


def cross_validate(learner: str, data: Dataset, constraints: Constraints, *, live: bool = True, folds: int = 5) -> Held:
    """Splits by group, so that no prompt is on both sides. Raises NothingToLearn for fewer than two groups.

    A fold whose training rows have one best mode gets that mode: so a learner is judged on every request.
    """
    from sklearn.model_selection import GroupKFold

    groups = len(set(data.groups))
    if groups < 2:
        raise NothingToLearn("all requests are of one group: nothing can be held out")
    rows = data.features(live=live)
    chosen: dict[int, str] = {}
    twin_count = 0
    for train, test in GroupKFold(min(folds, groups)).split(rows, groups=data.groups):
        part = Dataset([data.examples[index] for index in train], data.reference)
        allowed = [data.examples[index].modes for index in test]
        try:
            made = fit(learner, part, rows[train], constraints).choices(rows[test], allowed)
        except NothingToLearn:
            only = part.labels(constraints)[0]
            made = [only if only in modes else data.reference for modes in allowed]
        chosen.update(zip(map(int, test), made, strict=True))
        twin_count += twins(rows[train].tolist(), rows[test].tolist())
    choices = [chosen[index] for index in range(len(data.examples))]
    return judge(learner, data, choices, constraints, twin_count / len(choices))


def judge(
    learner: str, data: Dataset, choices: Sequence[str], constraints: Constraints, twin_share: float = 0.0
) -> Held:
    """Scores one choice per example."""
    labels, total = data.labels(constraints), float(data.weights().sum())
    confusion: dict[tuple[str, str], float] = {}
    match = capture = unsafe = 0.0
    for example, best, choice in zip(data.examples, labels, choices, strict=True):
        share, reference = example.weight / total, example.modes[data.reference]
        confusion[best, choice] = confusion.get((best, choice), 0.0) + example.weight
        match += share * (best == choice)
        capture += share * example.modes[best].latency_ms / example.modes[choice].latency_ms
        unsafe += share * (choice != data.reference and bool(constraints.broken_by(example.modes[choice], reference)))
    speedups = grouped_bootstrap(
        [
            example.modes[data.reference].latency_ms / example.modes[choice].latency_ms
            for example, choice in zip(data.examples, choices, strict=True)
        ],
        [example.weight for example in data.examples],
        data.groups,
    )
    energies = _energy_ratio(data, choices)
    return Held(learner, total, match, capture, speedups.estimate, unsafe, twin_share, confusion, speedups, energies)


def _energy_ratio(data: Dataset, choices: Sequence[str]) -> Interval | None:
    ratios, weights, groups = [], [], []
    for example, choice in zip(data.examples, choices, strict=True):
        joules = {mode: measured.energy_j_per_token for mode, measured in example.modes.items()}
        chosen, reference = joules[choice], joules[data.reference]
        if None not in joules.values() and chosen is not None and reference:
            ratios.append(chosen / reference)
            weights.append(example.weight)
            groups.append(example.group)
    return grouped_bootstrap(ratios, weights, groups) if ratios else None


def static_choices(data: Dataset, constraints: Constraints) -> dict[str, Held]:
    """Every mode used for everything (the reference where it was not measured), and the oracle."""
    found = {"oracle": judge("oracle", data, data.labels(constraints), constraints)}
    for mode in data.modes:
        choices = [mode if mode in example.modes else data.reference for example in data.examples]
        found[f"always {mode}"] = judge(f"always {mode}", data, choices, constraints)
    return found


def export(fitted: Fitted, *, version: str, model: str, hardware: str) -> bytes:
    """The ONNX file of a router, with what `OnnxPredictor` checks in its metadata."""
    from skl2onnx import convert_sklearn
    from skl2onnx.common.data_types import FloatTensorType
    from skl2onnx.helpers.onnx_helper import select_model_inputs_outputs

    classifier = fitted.kind == "probability"
    converted = convert_sklearn(
        fitted.estimator,
        initial_types=[(INPUT, FloatTensorType([None, len(FEATURE_NAMES)]))],
        options={id(fitted.estimator): {"zipmap": False}} if classifier else None,
        target_opset={"": 17, "ai.onnx.ml": 3},
        final_types=None if classifier else [(OUTPUT, FloatTensorType([None, None]))],
    )
    if classifier:
        # Without the label, whose text output costs more than the probabilities themselves.
        converted = select_model_inputs_outputs(converted, outputs=["probabilities"])
        for node in converted.graph.node:
            node.output[:] = [OUTPUT if name == "probabilities" else name for name in node.output]
        converted.graph.output[0].name = OUTPUT
    about = {
        "format": FORMAT_VERSION,
        "version": version,
        "kind": fitted.kind,
        "learner": fitted.learner,
        "model": model,
        "hardware": hardware,
        "feature_names": json.dumps(FEATURE_NAMES),
        "modes": json.dumps(fitted.modes),
        "reference": fitted.reference,
    }
    for key, value in about.items():
        entry = converted.metadata_props.add()
        entry.key, entry.value = key, value
    content: bytes = converted.SerializeToString()
    return content
