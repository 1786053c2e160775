import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from loadgen.best_mode import Constraints
from loadgen.null_server import make_app
from loadgen.oracle import not_judged
from loadgen.oracle_table import read_table
from loadgen.records import Outcome, RequestRecord
from loadgen.report.results import read_results
from loadgen.sweep_interference import ROUNDS
from loadgen.sweep_plan import QUANTITIES, Cell, Results, Stopping, TrialResult, TrialSpoilt, next_round, read_trial
from tests.loadgen.conftest import finished, lines_in, serve, write_weights
from tests.loadgen.fake_modes import FakeApplication, FakeEngine

SS, LL = Cell("ss", 1), Cell("ll", 8)
MODES = ["fp16", "int8", "gptq"]


def trial(latency_ms: float, ttft_ms: float | None = None) -> TrialResult:
    return TrialResult(latency_ms, ttft_ms, None, 1000 / latency_ms)


def test_only_trials_of_one_round_are_compared() -> None:
    results = Results("fp16")
    for number, drift in enumerate((1.0, 2.0, 4.0)):
        results.add(SS, "fp16", number, trial(100 * drift))
        results.add(SS, "int8", number, trial(50 * drift, 10.0))
    results.add(SS, "int8", 7, trial(9999.0))
    found = results.ratio(SS, "int8", "latency")
    assert found is not None
    assert (found.estimate, found.pairs) == (pytest.approx(0.5), 3)
    assert results.ratio(SS, "int8", "ttft") is None, "the reference has none to compare with"
    assert results.ratio(SS, "gptq", "latency") is None
    assert results.ratio(LL, "int8", "latency") is None


def test_a_round_holds_what_is_not_done_and_always_the_reference() -> None:
    results, stopping = Results("fp16"), Stopping(tolerance=0.05, min_rounds=3, max_rounds=5)
    first = dict(next_round(results, [SS, LL], MODES, stopping, 0, seed=1))
    assert {cell: sorted(order) for cell, order in first.items()} == {SS: sorted(MODES), LL: sorted(MODES)}
    for number in range(3):
        for cell in (SS, LL):
            results.add(cell, "fp16", number, trial(100.0))
            results.add(cell, "int8", number, trial(50.0))
            results.add(cell, "gptq", number, trial(80.0 if cell == SS else 40.0 + 30 * number))
    later = dict(next_round(results, [SS, LL], MODES, stopping, 3, seed=1))
    assert {cell: sorted(order) for cell, order in later.items()} == {LL: ["fp16", "gptq"]}
    assert list(next_round(results, [SS, LL], MODES, stopping, 5, seed=1)) == []


def test_the_order_changes_from_round_to_round() -> None:
    results, stopping = Results("fp16"), Stopping()
    orders = {tuple(dict(next_round(results, [SS], MODES, stopping, number, seed=1))[SS]) for number in range(20)}
    assert len(orders) == 6


def test_a_trial_is_spoilt_by_any_failure() -> None:
    good = RequestRecord(total_ms=100.0, ttft_ms=20.0, frame_ms=[20.0, 30.0], output_tokens=2)
    assert read_trial([good, good], 0.1) == TrialResult(100.0, 20.0, 10.0, 40.0)
    uncounted = replace(good, output_tokens=None)
    assert read_trial([good, uncounted], 0.1) == TrialResult(100.0, 20.0, None, None), "unknown is not 0"
    with pytest.raises(TrialSpoilt, match="stalled: silence"):
        read_trial([good, RequestRecord(outcome=Outcome.STALLED, error="silence")], 1.0)
    with pytest.raises(TrialSpoilt, match="no request"):
        read_trial([], 1.0)


def test_what_is_looked_up_later_is_a_ratio_too_and_unknown_is_left_out() -> None:
    results = Results("fp16")
    for number, drift in enumerate((1.0, 3.0)):
        results.add(SS, "fp16", number, replace(trial(100.0), j_per_token=2.0 * drift, bandwidth_share=0.4))
        results.add(SS, "gptq", number, replace(trial(100.0), j_per_token=1.0 * drift if number else None))
    energy = results.ratio(SS, "gptq", "j_per_token")
    assert energy is not None
    assert (energy.estimate, energy.pairs) == (pytest.approx(0.5), 1)
    assert results.ratio(SS, "gptq", "bandwidth_share") is None
    assert results.values(SS, "fp16", QUANTITIES["bandwidth_share"]) == [0.4, 0.4]


async def application() -> str:
    """A null server with three modes, of which one has failed."""
    app = make_app(tokens_per_s=2000.0)

    async def modes(request: web.Request) -> web.Response:
        states = {"fp16": "ready", "gptq": "ready", "awq": "failed"}
        return web.json_response({"data": [{"id": name, "state": state} for name, state in states.items()]})

    app.router.add_get("/v1/modes", modes)
    return str((await serve(app)).make_url(""))


@contextmanager
def sweep(url: str, model_folder: Path, out: Path, *more: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "loadgen", "sweep", "--base-url", url, "--out", str(out)]
    command += ["--tokenizer", str(model_folder), "--workload", "ss", *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        yield process
        process.kill()


async def test_the_command_end_to_end(model_folder: Path, tmp_path: Path) -> None:
    url = await application()
    with sweep(url, model_folder, tmp_path, "--max-rounds", "2", "--no-interference") as process:
        words = await finished(process)
    assert process.returncode == 0, words
    found = json.loads((tmp_path / "sweep.json").read_text())
    assert found["interference"] is None
    measured = {(row["workload"], row["concurrency"], row["mode"]) for row in found["rows"]}
    assert measured == {("ss", streams, mode) for streams in (1, 8) for mode in ("fp16", "gptq")}
    assert all(row["latency"]["ratio"]["pairs"] == 2 for row in found["rows"])
    for row in found["rows"]:
        assert row["j_per_token"] == row["bandwidth_share"] == {"median": None, "ratio": None}
        assert row["peak_memory_bytes"] is None
    assert "The server told no energy." in " ".join(words.split())


async def test_interrupted_it_keeps_what_it_has(model_folder: Path, tmp_path: Path) -> None:
    url = await application()
    with sweep(url, model_folder, tmp_path, "--tolerance", "0.001", "--max-rounds", "9999") as process:
        await lines_in(tmp_path / "requests.jsonl", 60)
        # A round is over by then, so a kill that nobody can answer would leave results as well.
        assert json.loads((tmp_path / "sweep.json").read_text())["rows"]
        process.send_signal(signal.SIGINT)
        words = await finished(process)
    assert process.returncode == 130, words
    found = json.loads((tmp_path / "sweep.json").read_text())
    assert found["ended"] == "interrupted"
    assert found["rows"]


async def test_a_server_without_modes_is_swept_by_its_models(model_folder: Path, null_url: str, tmp_path: Path) -> None:
    more = ("--reference", "null", "--mode", "null", "--mode", "other", "--concurrency", "1", "--max-rounds", "2")
    with sweep(null_url, model_folder, tmp_path, *more) as process:
        words = await finished(process)
    assert process.returncode == 0, words
    found = json.loads((tmp_path / "sweep.json").read_text())
    assert {row["mode"]: row["rounds"] for row in found["rows"]} == {"null": 2, "other": 2}
    with sweep(null_url, model_folder, tmp_path) as process:
        words = await finished(process)
    assert process.returncode == 2
    assert "'fp16' is not among: null; name one with --reference" in " ".join(words.split())


async def test_a_missing_reference_is_named(model_folder: Path, tmp_path: Path) -> None:
    url = await application()
    with sweep(url, model_folder, tmp_path, "--reference", "bf16") as process:
        words = await finished(process)
    assert process.returncode == 2
    assert "'bf16' is not among: fp16, gptq" in " ".join(words.split())


def fast_engines(folder: Path) -> list[FakeEngine]:
    """Two modes on one engine, a lossy one whose steps take twice as long, and one that speculates without success."""
    engines = [
        FakeEngine("fp16", modes=("fp16", "prefix_caching"), joules_per_token=2.0, model=str(folder)),
        FakeEngine("int8", "int8", False, ("int8",), joules_per_token=1.0, model=str(folder)),
        FakeEngine("speculative", modes=("speculative",), accepted=0),
    ]
    for engine in engines:
        engine.prefill_ms, engine.step_ms = (2.0, 0.01), (8.0 if engine.name == "int8" else 4.0, 0.0)
    return engines


async def test_energy_memory_likeness_limit_and_interference(model_folder: Path, tmp_path: Path) -> None:
    write_weights(tmp_path / "weights" / "model.safetensors", ("model.layers.0.weight", 10**6))
    server = FakeApplication(fast_engines(tmp_path / "weights"), energy=True)
    url = str((await serve(server.app())).make_url(""))
    out = tmp_path / "out"
    with sweep(url, model_folder, out, "--max-rounds", "2", "--concurrency", "1") as process:
        words = " ".join((await finished(process, 180)).split())
    assert process.returncode == 0, words
    found = json.loads((out / "sweep.json").read_text())
    rows = {row["mode"]: row for row in found["rows"]}
    assert set(rows) == {"fp16", "prefix_caching", "int8", "speculative"}

    fp16, caching, int8, speculative = (rows[name] for name in ("fp16", "prefix_caching", "int8", "speculative"))
    # The fake's joules are of decoded tokens, one fewer than 32, and of the prompt: nearly 2 and 1 a token.
    assert fp16["j_per_token"]["median"] == pytest.approx(2.0, abs=0.1)
    assert int8["j_per_token"]["ratio"]["estimate"] == pytest.approx(0.5, abs=0.05)
    assert speculative["j_per_token"] == {"median": None, "ratio": None}, "its engine tells none, which is not 0"
    assert found["energy"] == {"method": "modelled", "scope": "box"}
    assert "no meter measured them" in words

    assert (fp16["peak_memory_bytes"], caching["peak_memory_bytes"], int8["peak_memory_bytes"]) == (1004, 1004, 1004)
    assert speculative["peak_memory_bytes"] == 1011

    assert fp16["same_text"] == {"median": None, "mean": None}, "the reference is not compared with itself"
    assert caching["same_text"]["mean"]["estimate"] == caching["rouge_l"]["mean"]["estimate"] == 1.0
    assert int8["same_text"]["mean"]["estimate"] == 0.0
    assert int8["rouge_l"]["mean"]["estimate"] == pytest.approx(31 / 32)

    assert fp16["limit_steps_per_s"] == int8["limit_steps_per_s"] > 0
    reached = 1000 / fp16["between_tokens"]["median"] / fp16["limit_steps_per_s"]
    assert fp16["bandwidth_share"]["median"] == pytest.approx(reached, rel=0.1)
    assert int8["bandwidth_share"]["ratio"]["estimate"] == pytest.approx(0.5, abs=0.2)
    assert (speculative["limit_steps_per_s"], speculative["bandwidth_share"]["median"]) == (None, None)
    assert "weights' bytes are not known here: speculative." in words

    slower = {(row["engine"], row["beside"]): row["times_slower"] for row in found["interference"]["rows"]}
    names = {"fp16", "int8", "speculative"}
    assert set(slower) == {(one, other) for one in names for other in names - {one}}
    # Sleeps are never too short, and too long on a busy machine.
    assert 1.3 < slower["fp16", "int8"]["estimate"] < 2.5
    assert slower["fp16", "int8"]["pairs"] == ROUNDS

    (screening,) = read_results(out).screenings
    drawn = {effect.mode: effect.energy_ratio for effect in screening.effects}
    assert drawn["int8"] is not None, "the report draws the energy of a sweep"
    assert drawn["speculative"] is None
    table = read_table(out / "sweep.json")
    assert table.cells["ss x 1"]["int8"].rouge_fp16 == pytest.approx(31 / 32)
    assert not_judged(table, Constraints()) == {"energy": {"speculative": ["ss x 1"]}}


async def test_interference_does_not_outlast_the_budget(model_folder: Path, tmp_path: Path) -> None:
    url = str((await serve(FakeApplication(fast_engines(tmp_path)).app())).make_url(""))
    more = ("--max-rounds", "1", "--concurrency", "1", "--mode", "fp16", "--mode", "int8", "--budget-s", "1")
    with sweep(url, model_folder, tmp_path, *more) as process:
        words = await finished(process)
    assert process.returncode == 0, words
    found = json.loads((tmp_path / "sweep.json").read_text())
    assert found["rows"], "the first round is made whole"
    assert found["interference"] == {"ended": "the budget of time ended", "rows": [], "failures": []}


async def test_memory_pressure_is_watched_in_each_trial(model_folder: Path, tmp_path: Path) -> None:
    fp16, int8, _ = engines = fast_engines(tmp_path)
    fp16.kv_use, int8.kv_use = 0.97, 0.31
    url = str((await serve(FakeApplication(engines).app())).make_url(""))
    more = ("--workload", "memory_pressure", "--concurrency", "1", "--max-rounds", "1", "--no-interference")
    with sweep(url, model_folder, tmp_path, *more) as process:
        words = " ".join((await finished(process)).split())
    assert process.returncode == 0, words
    found = json.loads((tmp_path / "sweep.json").read_text())
    uses = {(row["workload"], row["mode"]): row["kv_use_peak"] for row in found["rows"]}
    assert {use for (workload, _), use in uses.items() if workload == "ss"} == {None}, "nothing was to be short there"
    pressed = {mode: use for (workload, mode), use in uses.items() if workload == "memory_pressure"}
    assert pressed == {"fp16": 0.97, "prefix_caching": 0.97, "int8": 0.31, "speculative": None}
    assert "KV cache was: int8 x 1 (31 %), speculative x 1 (unknown); pressure begins at" in words
    assert "kv_cache_memory_bytes" in words
    assert found["balloon"] is None


async def test_a_balloon_that_cannot_be_is_refused_before_the_sweep(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with sweep(await application(), model_folder, tmp_path, "--balloon-share", "0.3") as process:
        words = " ".join((await finished(process)).split())
    assert process.returncode == 2, words
    assert "no CUDA device on this machine" in words or "needs PyTorch" in words
    assert (tmp_path / "requests.jsonl").read_text() == ""
