import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loadgen.comparison_run import runs_of
from tests.loadgen.conftest import finished, lines_in, serve
from tests.loadgen.fake_modes import FakeApplication, four_engines


@contextmanager
def compare(url: str, model_folder: Path, out: Path, *more: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "loadgen", "compare", "--base-url", url, "--out", str(out)]
    command += ["--tokenizer", str(model_folder), "--rate-light", "4", "--rate-saturating", "20"]
    with subprocess.Popen([*command, *more], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        yield process
        process.kill()


def test_policies_alternate_within_blocks_that_share_a_trace() -> None:
    blocks = runs_of(("cost", "rules", "static:fp16"), 3, seed=1)
    assert len(blocks) == 6
    assert all(len({(run.rate, run.round) for run in block}) == 1 for block in blocks)
    assert all({run.policy for run in block} == {"cost", "rules", "static:fp16"} for block in blocks)
    assert len({tuple(run.policy for run in block) for block in blocks}) > 1


async def test_the_command_end_to_end(model_folder: Path, tmp_path: Path) -> None:
    application = FakeApplication(four_engines())
    url = str((await serve(application.app())).make_url(""))
    more = ("--policies", "cost,static:int8,static:speculative", "--requests-light", "6", "--requests-saturating", "6")
    with compare(url, model_folder, tmp_path, *more, "--rounds", "1", "--bare-url", url) as process:
        words = await finished(process)
    assert process.returncode == 0, words
    found = json.loads((tmp_path / "compare.json").read_text())
    assert found["policies"] == ["cost", "static:int8", "static:speculative", "bare"]
    assert Counter(row["policy"] for row in found["requests"]) == dict.fromkeys(found["policies"], 12)
    first = found["requests"][0]
    assert {"policy", "class", "tag", "mode", "rate", "round", "latency_ms", "ttft_ms", "energy_j"} <= first.keys()
    assert {"output_tokens", "started_s", "status", "index"} <= first.keys()
    assert found["summary"]["light"]["compared_requests"] == 6
    assert {row["mode"] for row in found["requests"] if row["policy"] == "static:int8"} == {"int8"}
    rows = [json.loads(line) for line in (tmp_path / "training.jsonl").read_text().splitlines()]
    assert len(rows) == 12
    assert all(set(row["modes"]) == {"int8", "speculative"} and row["features"] for row in rows)
    assert application.resets == 8
    assert "Light load: cost takes" in " ".join(words.split())


async def test_an_interrupted_comparison_keeps_its_results(model_folder: Path, tmp_path: Path) -> None:
    url = str((await serve(FakeApplication(four_engines()).app())).make_url(""))
    with compare(url, model_folder, tmp_path, "--rounds", "50") as process:
        await lines_in(tmp_path / "requests.jsonl", 40)
        process.send_signal(signal.SIGINT)
        words = await finished(process)
    assert process.returncode == 130, words
    found = json.loads((tmp_path / "compare.json").read_text())
    assert found["ended"] == "interrupted"
    assert len(found["requests"]) >= 36


async def test_a_server_that_ignores_the_policy_is_found_out_before_the_measurement(
    model_folder: Path, tmp_path: Path
) -> None:
    url = str((await serve(FakeApplication(four_engines(), ignores_policies=True).app())).make_url(""))
    with compare(url, model_folder, tmp_path, "--policies", "cost,static:int8") as process:
        words = await finished(process)
    assert process.returncode == 2
    assert "static:int8: the server used fp16 instead" in " ".join(words.split())


async def test_the_budget_ends_between_blocks(model_folder: Path, tmp_path: Path) -> None:
    url = str((await serve(FakeApplication(four_engines()).app())).make_url(""))
    with compare(
        url, model_folder, tmp_path, "--policies", "cost,static:fp16", "--requests-light", "4", "--budget-s", "3"
    ) as process:
        words = await finished(process)
    assert process.returncode == 0, words
    found = json.loads((tmp_path / "compare.json").read_text())
    assert found["ended"] == "the budget of time ended"
    assert {row["rate"] for row in found["requests"]} == {"light"}
