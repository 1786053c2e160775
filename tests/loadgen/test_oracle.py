import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loadgen.__main__ import make_app
from loadgen.best_mode import Constraint, Constraints
from loadgen.oracle import SweepUnreadable, best_modes, not_judged, only, policy_scores, read_sweep


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


def full(workload: str, mode: str, latency: float, energy: float | None, mib: float, rouge: float | None) -> Any:
    """A row with everything that a sweep measures; latency and energy as ratios."""
    interval = None if energy is None else {"estimate": energy, "low": energy, "high": energy, "pairs": 3}
    return row(workload, mode, 100.0, latency) | {
        "j_per_token": {"median": 4.0, "ratio": interval},
        "peak_memory_bytes": mib * 2**20,
        "rouge_l": {"median": rouge, "mean": None if rouge is None else {"estimate": rouge}},
    }


@pytest.fixture
def full_json(tmp_path: Path) -> Path:
    path = tmp_path / "full.json"
    rows = [
        full("ss", "fp16", 1.0, 1.0, 1000, None),
        full("ss", "hungry", 0.5, 1.1, 900, 1.0),
        full("ss", "fat", 0.6, 0.9, 1030, 1.0),
        full("ss", "wrong", 0.7, 0.9, 900, 0.79),
        full("ss", "good", 0.9, 0.9, 900, 0.81),
        full("ll", "fp16", 1.0, 1.0, 1000, None),
        full("ll", "hungry", 0.5, None, 900, 1.0),
        full("ll", "good", 0.9, 0.9, 900, None),
    ]
    path.write_text(json.dumps({"reference": "fp16", "rows": rows}))
    return path


def test_what_a_sweep_measured_constrains(full_json: Path) -> None:
    table, constraints = read_sweep(full_json), Constraints()
    assert table.cells["ss x 1"]["hungry"].energy_j_per_token == pytest.approx(4.4)
    assert best_modes(table, constraints) == {"ss x 1": "good", "ll x 1": "hungry"}
    assert not_judged(table, constraints) == {
        Constraint.ENERGY: {"hungry": ["ll x 1"]},
        Constraint.QUALITY: {"good": ["ll x 1"]},
    }
    always = policy_scores(table, constraints)["always hungry"]
    assert (always.unsafe, always.energy_ratio) == (1, None)


def test_an_earlier_sweep_has_latencies_only(sweep_json: Path) -> None:
    table = read_sweep(sweep_json)
    assert table.cells["ss x 1"]["gptq"].energy_j_per_token is None
    missing = not_judged(table, Constraints())
    assert set(missing) == set(Constraint)
    assert all(set(modes) == {"gptq", "int8"} for modes in missing.values())


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
    found = json.loads(out.read_text())
    assert found["best"]["ss x 1"] == "gptq"
    assert found["not_judged"]["energy"]["int8"] == ["ss x 1", "ll x 1"]
    words = " ".join(result.output.split())
    for kind in ("energy", "memory", "quality"):
        assert f"The limit of {kind} was not applied: the sweep did not measure it." in words
    result = CliRunner().invoke(make_app(), ["oracle", str(tmp_path / "missing")])
    assert result.exit_code == 2


def test_the_command_says_what_held_faster_modes_back(full_json: Path) -> None:
    result = CliRunner().invoke(make_app(), ["oracle", str(full_json)])
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.replace("│", " ").split())
    assert "hungry: energy" in words
    assert "fat: memory" in words
    assert "wrong: quality" in words
    assert "The limit of energy was not applied to hungry in 1 of 2 cells: not measured there." in words
    assert "The limit of memory" not in words
