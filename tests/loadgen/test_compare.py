import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp import web
from rich.console import Console

from loadgen.client import OpenAIClient
from loadgen.compare import keeps_energy, tables_of
from loadgen.comparison import LIGHT, rate_summary
from loadgen.comparison_run import MISSED_IN_A_ROW, runs_of, settled_joules
from loadgen.records import RequestRecord
from tests.loadgen.conftest import finished, lines_in, serve
from tests.loadgen.fake_modes import FakeApplication, four_engines
from tests.loadgen.test_comparison import row


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


@pytest.mark.parametrize("unsettled", [{0}, {3, 4}, {9}, {1, 3, 5, 7, 9}])
async def test_a_request_without_energy_leaves_the_others_theirs(unsettled: set[int]) -> None:
    asked: list[int] = []
    found = await joules_of_ten(asked, unsettled)
    assert found == {index: float(index) for index in range(10) if index not in unsettled}
    assert len(asked) == 10 + len(unsettled), "those without are asked once more at the end"


async def test_what_is_settled_late_is_found_at_the_end() -> None:
    assert await joules_of_ten([], {8, 9}, late=True) == {index: float(index) for index in range(10)}


async def test_a_server_without_energy_is_soon_left_alone() -> None:
    asked: list[int] = []
    assert await joules_of_ten(asked, set(range(2, 10))) == {0: 0.0, 1: 1.0}
    assert len(asked) == 2 + MISSED_IN_A_ROW


async def joules_of_ten(asked: list[int], unsettled: set[int], *, late: bool = False) -> dict[int, float]:
    """What is found of ten requests, of which some have no record; `late`: not when first asked for."""

    async def record(request: web.Request) -> web.Response:
        index = int(request.match_info["id"])
        asked.append(index)
        if index in unsettled and not (late and asked.count(index) > 1):
            return web.json_response({"error": {"message": "unknown"}}, status=404)
        return web.json_response({"energy": {"energy_j": float(index), "status": "final"}})

    app = web.Application()
    app.router.add_get("/v1/requests/{id}", record)
    url = str((await serve(app)).make_url(""))
    records = [RequestRecord(index=index, workload="w", request_id=str(index)) for index in range(10)]
    async with OpenAIClient(url) as client:
        return await settled_joules(client, records)


@pytest.mark.parametrize(("recorded_at", "kept"), [(1, True), (3, True), (10**6, False)])
async def test_a_record_is_looked_for_until_it_is_written(recorded_at: int, kept: bool) -> None:
    looks: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"choices": [{"message": {"content": "a"}}]}, headers={"x-request-id": "r7"})

    async def record(request: web.Request) -> web.Response:
        looks.append(request.match_info["id"])
        if len(looks) < recorded_at:
            return web.json_response({"error": {"message": "unknown"}}, status=404)
        return web.json_response({"energy": {"energy_j": None, "status": "partial"}})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    app.router.add_get("/v1/requests/{id}", record)
    async with OpenAIClient(str((await serve(app)).make_url(""))) as client:
        assert await keeps_energy(client, "tiny") is kept
    assert set(looks) == {"r7"}


def test_the_tables_show_ratios_with_intervals_in_120_columns() -> None:
    slow, statics = 12345.0, ("static:int8_continuous_batching", "static:gptq_prefix_caching")
    rows = [
        row(policy, index, slow * (1 + place / 10 + (index + place) % 5), energy_j=None if index % 3 else 12.345)
        for place, policy in enumerate((*statics, "cost", "rules_published", "rules"))
        for index in range(30)
    ]
    found = rate_summary(rows, LIGHT, statics)
    assert found is not None
    with (console := Console(width=120, record=True)).capture() as shown:
        for table in tables_of(LIGHT, 0.5, found):
            console.print(table)
    text = shown.get()
    assert "…" not in text, text
    lines = [line for line in text.splitlines() if line.startswith("│ cost ")]
    figures, to_best, to_rules = (line.split("│")[2:-1] for line in lines)
    assert (figures[3].strip(), len(to_best), len(to_rules)) == ("12.35 (10 of 30)", 4, 3)
    for cell in (*to_best[:2], to_best[3], *to_rules[:2]):
        assert cell.count("[") == cell.count(", ") == 1, lines
    assert "mean latency by class" in text


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


async def test_a_trained_policy_is_compared_beside_the_others(model_folder: Path, tmp_path: Path) -> None:
    application = FakeApplication(four_engines(), chooses={"learned": "int8", "cost": "speculative"})
    url = str((await serve(application.app())).make_url(""))
    more = ("--policies", "learned,cost,static:fp16,static:int8", "--requests-light", "4", "--requests-saturating", "4")
    with compare(url, model_folder, tmp_path, *more, "--rounds", "1") as process:
        words = " ".join((await finished(process)).split())
    assert process.returncode == 0, words
    found = json.loads((tmp_path / "compare.json").read_text())
    assert found["policies"] == ["learned", "cost", "static:fp16", "static:int8"]
    assert {row["mode"] for row in found["requests"] if row["policy"] == "learned"} == {"int8"}
    assert application.policies.count("learned") == 1 + 4 + 4, "a look at the server, and the two runs"
    light = found["summary"]["light"]
    assert light["policies"]["learned"]["requests"] == light["compared_requests"] == 4
    assert light["policies"]["learned"]["modes"] == {"int8": 4}
    best = light["best_static"]
    assert light["against_best_static"]["learned"]["mean_ratio"]["pairs"] == 4
    assert f"Light load: learned takes {light['policies']['learned']['mean_ms']:.0f} ms" in words
    assert f"{best}, the best single mode" in words
    rows = [json.loads(line) for line in (tmp_path / "training.jsonl").read_text().splitlines()]
    assert all(set(row["modes"]) == {"fp16", "int8"} for row in rows), "routers learn from fixed modes alone"


async def test_a_policy_that_another_stands_in_for_is_not_compared(model_folder: Path, tmp_path: Path) -> None:
    application = FakeApplication(four_engines(), stand_ins={"learned": "rules"})
    url = str((await serve(application.app())).make_url(""))
    with compare(url, model_folder, tmp_path, "--policies", "learned,static:fp16") as process:
        words = " ".join((await finished(process)).split())
    assert process.returncode == 2, words
    assert "learned: the server decided by rules" in words


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
