import json
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from app.routing.decision import Outcome
from app.routing.policies.learned import LearnedPolicy
from loadgen import exported_model
from loadgen.__main__ import make_app
from loadgen.best_mode import Constraints
from loadgen.exported_model import write_model
from loadgen.learners import fit
from loadgen.paper.tables import load_tables
from loadgen.training_data import paper_dataset

pytest.importorskip("sklearn")
pytest.importorskip("skl2onnx")

_SPENT_US = 150.0


def test_the_whole_decision_is_timed_and_not_the_model_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decided: list[Outcome] = []
    decide = LearnedPolicy.decide

    def slower(policy: LearnedPolicy, *given: Any) -> Outcome:
        end_ns = time.perf_counter_ns() + _SPENT_US * 1000
        decided.append(decide(policy, *given))
        while time.perf_counter_ns() < end_ns:
            pass
        return decided[-1]

    data = paper_dataset(load_tables())
    fitted = fit("tree", data, data.features(), Constraints())
    monkeypatch.setattr(LearnedPolicy, "decide", slower)
    found = write_model(tmp_path / "tree.onnx", fitted, data, model="m", hardware="h")
    assert found.p50_us >= _SPENT_US
    assert found.too_slow
    assert {outcome.policy for outcome in decided} == {"learned"}
    assert all("lowest score of tree-" in outcome.reason for outcome in decided), "the model was asked each time"


@pytest.mark.parametrize(("limit_us", "slow"), [(1e-3, True), (1e9, False)])
def test_a_model_that_is_too_slow_is_exported_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_us: float, slow: bool
) -> None:
    monkeypatch.setattr(exported_model, "DECISION_MAX_US", limit_us)
    result = CliRunner().invoke(make_app(), ["train", "--learner", "tree", "--no-confusion", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert ("(too slow)" in result.output) == slow
    found = json.loads((tmp_path / "train.json").read_text())["exported"]["tree"]
    assert (found["too_slow"], found["limit_us"]) == (slow, limit_us)
    assert Path(found["path"]).stat().st_size == found["bytes"]
