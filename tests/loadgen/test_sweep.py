import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp import web

from loadgen.null_server import make_app
from loadgen.records import Outcome, RequestRecord
from loadgen.sweep_plan import Cell, Results, Stopping, TrialResult, TrialSpoilt, next_round, read_trial
from tests.loadgen.conftest import finished, lines_in, serve

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
    with pytest.raises(TrialSpoilt, match="stalled: silence"):
        read_trial([good, RequestRecord(outcome=Outcome.STALLED, error="silence")], 1.0)
    with pytest.raises(TrialSpoilt, match="no request"):
        read_trial([], 1.0)


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
    with sweep(url, model_folder, tmp_path, "--max-rounds", "2", "--min-rounds", "2") as process:
        words = await finished(process)
    assert process.returncode == 0, words
    found = json.loads((tmp_path / "sweep.json").read_text())
    measured = {(row["workload"], row["concurrency"], row["mode"]) for row in found["rows"]}
    assert measured == {("ss", streams, mode) for streams in (1, 8) for mode in ("fp16", "gptq")}
    assert all(row["latency"]["ratio"]["pairs"] == 2 for row in found["rows"])


async def test_interrupted_it_keeps_what_it_has(model_folder: Path, tmp_path: Path) -> None:
    url = await application()
    with sweep(url, model_folder, tmp_path, "--tolerance", "0.001", "--max-rounds", "9999") as process:
        await lines_in(tmp_path / "requests.jsonl", 60)
        process.send_signal(signal.SIGINT)
        words = await finished(process)
    assert process.returncode == 130, words
    found = json.loads((tmp_path / "sweep.json").read_text())
    assert found["ended"] == "interrupted"
    assert found["rows"]


async def test_a_missing_reference_is_named(model_folder: Path, tmp_path: Path) -> None:
    url = await application()
    with sweep(url, model_folder, tmp_path, "--reference", "bf16") as process:
        words = await finished(process)
    assert process.returncode == 2
    assert "'bf16' is not among: fp16, gptq" in " ".join(words.split())
