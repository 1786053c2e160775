"""A trained router as the controller will have it: written, read back, compared with the estimator, and timed."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace
from rich.table import Table

from app.controller.trained_model import OnnxPredictor
from app.routing.features import NO_WISHES
from app.routing.mode_info import ModeInfo
from app.routing.policies.learned import LearnedPolicy
from app.routing.settings import RoutingSettings
from app.routing.snapshot import EngineView, Snapshot
from loadgen.decision_bench import percentiles
from loadgen.learners import Fitted, export
from loadgen.training_data import Dataset

DECISION_MAX_US = 100.0
_TIMED_DECISIONS = 3000
_COMPARED_ROWS = 500


class Exported(NamedTuple):
    """A written model: how long `learned` takes to decide by it, and how often its first mode is the estimator's."""

    path: Path
    bytes: int
    p50_us: float
    p99_us: float
    agreement: float

    @property
    def too_slow(self) -> bool:
        return self.p50_us > DECISION_MAX_US

    def as_json(self) -> dict[str, Any]:
        """For `train.json`."""
        return self._asdict() | {"path": str(self.path), "too_slow": self.too_slow, "limit_us": DECISION_MAX_US}


def write_model(path: Path, fitted: Fitted, data: Dataset, *, model: str, hardware: str) -> Exported:
    """Exports, reads back as the controller does, times and compares. Raises OSError and PredictorRefused."""
    rows = data.features()
    version = f"{fitted.learner}-{hashlib.sha256(rows.tobytes() + repr(data.examples).encode()).hexdigest()[:12]}"
    content = export(fitted, version=version, model=model, hardware=hardware)
    part = path.with_suffix(".part")
    part.write_bytes(content)
    part.replace(path)
    predictor = OnnxPredictor(path)
    compared = rows[:_COMPARED_ROWS]
    same = [
        _first(predictor.scores(row), predictor.modes) == _first(scores, fitted.modes)
        for row, scores in zip(compared.tolist(), fitted.scores(compared), strict=True)
    ]
    # Every mode on an idle engine of its own: all are eligible, so that the model is asked for each request.
    modes = [ModeInfo(name, name, "", lossless=True) for name in data.modes]
    policy = LearnedPolicy(predictor, modes, RoutingSettings(), None, model=model, hardware=hardware)
    snapshot = Snapshot(engines={name: EngineView(engine=name) for name in data.modes})
    requests = [replace(example.features, wishes=NO_WISHES) for example in data.examples]
    taken = percentiles(lambda n: policy.decide(requests[n % len(requests)], snapshot), _TIMED_DECISIONS)
    return Exported(path, len(content), taken["p50_us"], taken["p99_us"], sum(same) / len(same))


def _first(scores: Sequence[float], modes: Sequence[str]) -> str:
    return min(zip(scores, modes, strict=True))[1]


def exported_table(found: Mapping[str, Exported]) -> Table:
    """Written models by learner."""
    table = Table(title=f"Exported models; a decision may take {DECISION_MAX_US:g} us")
    table.add_column("")
    for name in ("p50 us", "p99 us", "KiB", "same choice as scikit-learn"):
        table.add_column(name, justify="right")
    for name, item in found.items():
        table.add_row(
            name,
            f"{item.p50_us:.1f}{' (too slow)' if item.too_slow else ''}",
            f"{item.p99_us:.1f}",
            f"{item.bytes / 1024:.0f}",
            f"{100 * item.agreement:.1f} %",
        )
    return table
