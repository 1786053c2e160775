import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loadgen.__main__ import make_app
from loadgen.best_mode import Constraint, Constraints
from loadgen.comparison import LIGHT, SATURATING, Row
from loadgen.oracle import best_modes, not_judged, policy_scores
from loadgen.oracle_table import ResultUnreadable, read_table


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
    table = read_table(sweep_json)
    assert best_modes(table, Constraints()) == {"ss x 1": "gptq", "ll x 1": "int8"}
    scores = policy_scores(table, Constraints())
    assert set(scores) == {"oracle", "always fp16", "always gptq", "always int8"}
    assert scores["oracle"].speedup == pytest.approx((2 + 1.25) / 2)
    assert scores["always gptq"].speedup == pytest.approx((2 + 0.8) / 2)
    assert scores["always int8"].latency_capture == pytest.approx((50 / 80 + 1) / 2)


def test_modes_can_be_left_out(sweep_json: Path) -> None:
    table = read_table(sweep_json).only(["int8"])
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
    table, constraints = read_table(full_json), Constraints()
    assert table.cells["ss x 1"]["hungry"].energy_j_per_token == pytest.approx(4.4)
    assert best_modes(table, constraints) == {"ss x 1": "good", "ll x 1": "hungry"}
    assert not_judged(table, constraints) == {
        Constraint.ENERGY: {"hungry": ["ll x 1"]},
        Constraint.QUALITY: {"good": ["ll x 1"]},
    }
    always = policy_scores(table, constraints)["always hungry"]
    assert (always.unsafe, always.energy_ratio) == (1, None)


def test_an_earlier_sweep_has_latencies_only(sweep_json: Path) -> None:
    table = read_table(sweep_json)
    assert table.cells["ss x 1"]["gptq"].energy_j_per_token is None
    missing = not_judged(table, Constraints())
    assert set(missing) == set(Constraint)
    assert all(set(modes) == {"gptq", "int8"} for modes in missing.values())


def test_what_is_no_sweep_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for text in ("{", "[]", '{"reference": "fp16", "rows": [{}]}', '{"reference": "fp16", "rows": []}'):
        path.write_text(text)
        with pytest.raises(ResultUnreadable, match=r"x\.json"):
            read_table(path)
    with pytest.raises(ResultUnreadable):
        read_table(tmp_path / "missing")


def test_the_command(sweep_json: Path, tmp_path: Path) -> None:
    out = tmp_path / "oracle.json"
    result = CliRunner().invoke(make_app(), ["oracle", str(sweep_json), "--out", str(out)])
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert found["best"]["ss x 1"] == "gptq"
    assert found["not_judged"]["energy"]["int8"] == ["ss x 1", "ll x 1"]
    words = " ".join(result.output.split())
    for kind in ("energy", "memory", "quality"):
        assert f"The limit of {kind} was not applied: it was not measured." in words
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


ENERGY_J = {"fp16": 40.0, "int8": 30.0, "gptq": 44.0}
LATENCY_MS = {("short", "fp16"): 100.0, ("short", "int8"): 80.0, ("short", "gptq"): 50.0}
LATENCY_MS |= {("long", "fp16"): 200.0, ("long", "int8"): 250.0, ("long", "gptq"): 400.0}


def compared(policy: str, rate: str, index: int, mode: str, **more: Any) -> Row:
    name = "long" if index % 2 else "short"
    latency_ms = LATENCY_MS.get((name, mode), 1.0) * (2 if rate == SATURATING else 1)
    fields = {"ttft_ms": None, "energy_j": ENERGY_J.get(mode), "output_tokens": 10, "started_s": 0.0, **more}
    return Row(policy, name, "none", mode, rate, 0, index, more.pop("status", "ok"), latency_ms, **fields)


def write_comparison(path: Path, rows: list[Row], **more: Any) -> Path:
    policies = list(dict.fromkeys(one.policy for one in rows))
    content = {"command": "compare", "policies": policies, "requests": [one.as_json() for one in rows]}
    path.write_text(json.dumps(content | more))
    return path


@pytest.fixture
def compare_json(tmp_path: Path) -> Path:
    """`cost` sends every short request to gptq and long ones to fp16; one went to a mode that nobody measured."""
    rows = []
    for rate in (LIGHT, SATURATING):
        for index in range(8):
            rows += [compared(f"static:{mode}", rate, index, mode) for mode in ENERGY_J]
            rows.append(compared("cost", rate, index, "fp16" if index % 2 else "gptq"))
            rows.append(compared("rules", rate, index, "int8" if index else "awq"))
    peaks = [{"name": mode, "modes": [mode], "peak_memory_bytes": 10**9} for mode in ENERGY_J]
    return write_comparison(tmp_path / "compare.json", rows, engines=peaks)


def test_a_comparison_scores_every_policy_by_class(compare_json: Path) -> None:
    table, constraints = read_table(compare_json), Constraints()
    assert set(table.cells) == {f"{name}, {rate} load" for name in ("short", "long") for rate in (LIGHT, SATURATING)}
    assert table.cells["short, saturating load"]["int8"].latency_ms == pytest.approx(160.0)
    assert table.cells["short, light load"]["gptq"].energy_j_per_token == pytest.approx(4.4)
    # gptq is the fastest on short requests and takes more energy than fp16 does.
    best = {"short": "int8", "long": "fp16"}
    assert best_modes(table, constraints) == {
        f"{name}, {rate} load": mode for name, mode in best.items() for rate in (LIGHT, SATURATING)
    }
    assert set(not_judged(table, constraints)) == {Constraint.QUALITY}
    scores = policy_scores(table, constraints)
    cost, rules = scores["cost"], scores["rules"]
    assert (cost.requests, cost.unsafe, cost.broken[Constraint.ENERGY], cost.broken[Constraint.MEMORY]) == (16, 8, 8, 0)
    assert cost.oracle_match == pytest.approx(0.5)
    assert cost.latency_capture == pytest.approx((80 / 50 + 1) / 2)
    assert cost.energy_capture == pytest.approx((3.0 / 4.4 + 1) / 2)
    assert (rules.requests, rules.unsafe) == (14, 0), "what no fixed mode was measured for is not scored"
    assert rules.oracle_match == pytest.approx(6 / 14)
    kept = table.only(["int8"]).chosen["cost"]
    assert kept == {("long, light load", "fp16"): 4, ("long, saturating load", "fp16"): 4}


def test_unknown_joules_and_failed_requests_of_a_comparison(tmp_path: Path) -> None:
    rows = [compared("static:fp16", LIGHT, index, "fp16") for index in range(4)]
    rows += [compared("static:int8", LIGHT, index, "int8", energy_j=None if index else 3.0) for index in range(4)]
    table = read_table(write_comparison(tmp_path / "compare.json", rows))
    assert table.cells["short, light load"]["int8"].energy_j_per_token is None
    assert table.cells["short, light load"]["fp16"].memory_mb is None
    assert set(not_judged(table, Constraints())) == set(Constraint)
    with pytest.raises(ResultUnreadable, match="reference mode 'fp16'"):
        read_table(write_comparison(tmp_path / "none.json", [compared("cost", LIGHT, 0, "fp16")]))


def test_the_command_on_a_comparison(compare_json: Path, tmp_path: Path) -> None:
    out = tmp_path / "oracle.json"
    wide = CliRunner(env={"COLUMNS": "150"})
    result = wide.invoke(make_app(), ["oracle", str(compare_json), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert json.loads(out.read_text())["scores"]["cost"]["broken"]["energy"] == 8
    (line,) = [line for line in result.output.splitlines() if line.startswith("│ cost ")]
    assert [cell.strip() for cell in line.split("│")[5:-1]] == ["130.0 %", "84.1 %", "50 %", "8: 8 energy"]
