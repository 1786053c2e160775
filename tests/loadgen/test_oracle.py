import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loadgen.__main__ import make_app
from loadgen.best_mode import Constraints
from loadgen.oracle import SweepUnreadable, best_modes, only, policy_scores, read_sweep


def row(workload: str, mode: str, median: float, ratio: float | None) -> dict[str, Any]:
    interval = None if ratio is None else {"estimate": ratio, "low": ratio, "high": ratio, "pairs": 3}
    return {
        "workload": workload,
        "concurrency": 1,
        "mode": mode,
        "latency": {"median": median, "ratio": interval},
    }


@pytest.fixture
def sweep_json(tmp_path: Path) -> Path:
    path = tmp_path / "sweep.json"
    rows = [
        row("ss", "fp16", 100.0, 1.0),
        row("ss", "gptq", 999.0, 0.5),  # a median from other rounds must not count
        row("ss", "int8", 80.0, 0.8),
        row("ll", "fp16", 200.0, 1.0),
        row("ll", "gptq", 260.0, 1.25),
        row("ll", "int8", 180.0, 0.8),
        row("ll", "awq", 1.0, None),
    ]
    path.write_text(json.dumps({"reference": "fp16", "rows": rows}))
    return path


def test_the_best_mode_of_each_cell_and_what_fixed_modes_reach(sweep_json: Path) -> None:
    table = read_sweep(sweep_json)
    assert best_modes(table, Constraints()) == {"ss x 1": "gptq", "ll x 1": "int8"}
    scores = policy_scores(table, Constraints())
    assert set(scores) == {"oracle", "always fp16", "always gptq", "always int8"}
    assert scores["oracle"].speedup == pytest.approx((2 + 1.25) / 2)
    assert scores["always gptq"].speedup == pytest.approx((2 + 0.8) / 2)
    assert scores["always int8"].latency_capture == pytest.approx((50 / 80 + 1) / 2)


def test_modes_can_be_left_out(sweep_json: Path) -> None:
    table = only(read_sweep(sweep_json), ["int8"])
    assert best_modes(table, Constraints()) == {"ss x 1": "int8", "ll x 1": "int8"}


def test_what_is_no_sweep_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for text in ("{", "[]", '{"reference": "fp16", "rows": [{}]}', '{"reference": "fp16", "rows": []}'):
        path.write_text(text)
        with pytest.raises(SweepUnreadable, match=r"x\.json"):
            read_sweep(path)
    with pytest.raises(SweepUnreadable):
        read_sweep(tmp_path / "missing")


def test_the_command(sweep_json: Path, tmp_path: Path) -> None:
    out = tmp_path / "oracle.json"
    result = CliRunner().invoke(make_app(), ["oracle", str(sweep_json), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert json.loads(out.read_text())["best"]["ss x 1"] == "gptq"
    result = CliRunner().invoke(make_app(), ["oracle", str(tmp_path / "missing")])
    assert result.exit_code == 2
