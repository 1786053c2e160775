import json
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from typer.testing import CliRunner

from loadgen.__main__ import make_app as command_line
from loadgen.arrivals import Poisson
from loadgen.client import OpenAIClient
from loadgen.null_server import make_app
from loadgen.prompts import ChatTokenizer, PromptMaker
from loadgen.records import Outcome, RecordWriter, read_records
from loadgen.runner import ClosedLoop, LoadRun, Manner
from loadgen.workloads import WORKLOADS, Mixture
from tests.loadgen.conftest import finished, lines_in, serve


@pytest.fixture(scope="session")
def maker(model_folder: Path) -> PromptMaker:
    return PromptMaker(ChatTokenizer.load(model_folder))


@contextmanager
def run(url: str, out: Path, *more: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "loadgen", "run", "--base-url", url, "--out", str(out), *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        yield process
        process.kill()


def summary_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return found


async def test_conversations_carry_the_answers_on(maker: PromptMaker, tmp_path: Path) -> None:
    seen: list[list[dict[str, str]]] = []

    @web.middleware
    async def note(request: web.Request, handler: Any) -> Any:
        seen.append((await request.json())["messages"])
        return await handler(request)

    app = make_app()
    app.middlewares.append(note)
    server = await serve(app)
    with RecordWriter(tmp_path) as writer:
        async with OpenAIClient(str(server.make_url(""))) as client:
            load = LoadRun(client, [WORKLOADS["multi_turn"].item(maker, 0, 0)], Manner("null"), writer)
            await load.go(ClosedLoop(1))
    await server.close()
    assert [record.turn for record in load.progress.records] == [0, 1, 2, 3]
    assert [len(messages) for messages in seen] == [1, 3, 5, 7]
    assert seen[1][1] == {"role": "assistant", "content": " word" * 64}
    assert seen[3][:5] == seen[2]


async def test_an_open_loop_notes_schedule_and_lateness(maker: PromptMaker, null_url: str, tmp_path: Path) -> None:
    with RecordWriter(tmp_path) as writer:
        async with OpenAIClient(null_url) as client:
            items = Mixture.parse("ss").items(maker, 5, 0)
            load = LoadRun(client, items, Manner("null", exact_output=False), writer)
            await load.go(Poisson(1000.0))
    records = sorted(load.progress.records, key=lambda record: record.index)
    assert [record.scheduled_s for record in records] == sorted(record.scheduled_s or -1 for record in records)
    for record in records:
        assert record.late_ms is not None
        assert record.late_ms >= 0
        assert record.scheduled_s is not None
        assert record.sent_s >= record.scheduled_s - 1e-6
        assert record.prompt_tokens


async def test_the_planned_share_is_given_up(maker: PromptMaker, tmp_path: Path) -> None:
    server = await serve(make_app(tokens_per_s=5000.0))
    with RecordWriter(tmp_path) as writer:
        async with OpenAIClient(str(server.make_url(""))) as client:
            items = Mixture.parse("ss").items(maker, 40, 0)
            load = LoadRun(client, items, Manner("null", cancel_fraction=0.5), writer)
            await load.go(ClosedLoop(4))
    await server.close()
    outcomes = [record.outcome for record in load.progress.records]
    assert set(outcomes) == {Outcome.OK, Outcome.CANCELLED}
    assert 10 <= outcomes.count(Outcome.CANCELLED) <= 30


async def test_the_command_end_to_end(model_folder: Path, null_url: str, tmp_path: Path) -> None:
    more = ("--tokenizer", str(model_folder), "--workload", "ss=1,multiple_choice=1", "--requests", "12")
    with run(null_url, tmp_path, *more, "--slo-total-ms", "60000") as process:
        words = await finished(process)
    assert process.returncode == 0, words
    summary = summary_of(tmp_path)
    assert summary["groups"]["all"]["outcomes"] == {"ok": 12}
    assert set(summary["groups"]) == {"all", "ss", "multiple_choice"}
    assert summary["caches_reset"] is True
    assert summary["manner"]["model"] == "null"
    records = read_records(tmp_path / "requests.jsonl").records
    assert (len(records), sum(record.warmup for record in records)) == (16, 4)


async def test_a_trace_end_to_end(model_folder: Path, null_url: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 1000 + 10 * i, "input_length": 600, "output_length": 4, "hash_ids": [1, i]} for i in range(5)]
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    more = ("--tokenizer", str(model_folder), "--arrival", "trace", "--trace", str(trace), "--warmup", "0")
    with run(null_url, tmp_path / "out", *more) as process:
        words = await finished(process)
    assert process.returncode == 0, words
    records = read_records(tmp_path / "out" / "requests.jsonl").records
    assert sorted(record.scheduled_s or 0.0 for record in records) == pytest.approx([0, 0.01, 0.02, 0.03, 0.04])
    assert {record.workload for record in records} == {"trace"}


def metered(engine: dict[str, Any]) -> web.Application:
    """A null server that tells energy and its engine as this application does."""
    app = make_app()

    async def modes(request: web.Request) -> web.Response:
        return web.json_response({"data": [], "engines": [engine]})

    async def one_request(request: web.Request) -> web.Response:
        energy = {"joules": 8.0, "method": "rapl", "scope": "cpu package", "status": "final"}
        return web.json_response({"energy": energy} if request.match_info["name"] == "r" else {})

    async def name(request: web.Request, response: web.StreamResponse) -> None:
        response.headers["x-request-id"] = "r"

    app.router.add_get("/v1/modes", modes)
    app.router.add_get("/v1/requests/{name}", one_request)
    app.on_response_prepare.append(name)
    return app


@pytest.mark.parametrize(("use", "short"), [(0.97, True), (0.2, False)])
async def test_energy_memory_and_pressure_are_told(model_folder: Path, tmp_path: Path, use: float, short: bool) -> None:
    server = await serve(metered({"name": "fp16", "peak_memory_bytes": 3 * 2**20, "kv_cache_usage": use}))
    more = ("--tokenizer", str(model_folder), "--workload", "memory_pressure", "--requests", "3", "--warmup", "0")
    with run(str(server.make_url("")), tmp_path, *more) as process:
        words = " ".join((await finished(process)).split())
    await server.close()
    assert process.returncode == 0, words
    summary = summary_of(tmp_path)
    assert summary["groups"]["all"]["j_per_output_token"] == 8.0 / WORKLOADS["memory_pressure"].output_tokens
    assert summary["energy"] == {"method": "rapl", "scope": "cpu package"}
    assert summary["peak_memory_bytes"] == {"fp16": 3 * 2**20}
    assert summary["kv_use_peak"] == {"fp16": use}
    assert "Joules above idle by rapl" in words
    assert ("kv_cache_memory_bytes" in words) is not short


async def test_a_balloon_that_cannot_be_is_refused(
    model_folder: Path, null_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with run(null_url, tmp_path, "--tokenizer", str(model_folder), "--balloon-share", "0.3") as process:
        words = await finished(process)
    assert process.returncode == 2, words
    assert "no CUDA device on this machine" in " ".join(words.split()) or "needs PyTorch" in words
    assert (tmp_path / "requests.jsonl").read_text() == ""


# test_client tries all of them.
@pytest.mark.parametrize("fault", ["drop", "stall_midway", "error_frame", "null_choice"])
async def test_a_broken_server_is_counted_and_named(
    model_folder: Path, null_url: str, tmp_path: Path, fault: str
) -> None:
    more = ("--tokenizer", str(model_folder), "--workload", "ss", "--model", fault, "--stall-s", "0.2")
    with run(null_url, tmp_path, *more, "--requests", "3", "--warmup", "0") as process:
        words = await finished(process)
    assert process.returncode == 1, words
    assert "Traceback" not in words
    assert "0 ok, 3 errors" in words
    assert "such as:" in words
    assert summary_of(tmp_path)["groups"]["all"]["errors"] == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
async def test_an_interruption_keeps_what_was_found(model_folder: Path, tmp_path: Path, number: signal.Signals) -> None:
    server = await serve(make_app(tokens_per_s=400.0))
    more = ("--tokenizer", str(model_folder), "--workload", "ss", "--requests", "5000", "--warmup", "0")
    with run(str(server.make_url("")), tmp_path, *more, "--concurrency", "3") as process:
        await lines_in(tmp_path / "requests.jsonl", 10)
        process.send_signal(number)
        words = await finished(process)
    await server.close()
    back = read_records(tmp_path / "requests.jsonl")
    assert len(back.records) >= 10
    assert back.damaged_lines <= 1
    if number is signal.SIGKILL:
        return
    assert process.returncode == 130, words
    assert "Traceback" not in words
    summary = summary_of(tmp_path)
    outcomes = summary["groups"]["all"]["outcomes"]
    assert summary["interrupted"] is True
    assert outcomes["interrupted"] == 3
    assert sum(outcomes.values()) == len(back.records)
    assert "never sent" in words


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--workload", "nonsense"), "no workload"),
        (("--arrival", "sometimes"), "one of closed"),
        (("--arrival", "trace"), "--trace FILE"),
        (("--arrival", "trace", "--trace", "/nowhere.jsonl"), "cannot read the trace"),
        (("--cancel-fraction", "0.5", "--no-stream"), "half-way"),
        (("--out", "/proc/nowhere"), "cannot write results"),
        (("--tokenizer", "/nowhere"), "no usable tokenizer"),
        (("--arrival", "constant", "--rate", "inf"), "inf is no finite number"),
        (("--arrival", "poisson", "--rate", "nan"), "Invalid value for '--rate'"),
        (("--speed", "nan"), "Invalid value for '--speed'"),
        (("--length-scale", "inf"), "inf is no finite number"),
        (("--length-scale", "nan"), "Invalid value for '--length-scale'"),
        (("--slo-ttft-ms=-inf",), "-inf is no finite number"),
        (("--slo-total-ms", "nan"), "nan is no finite number"),
    ],
)
def test_a_wrong_option_is_explained(model_folder: Path, tmp_path: Path, more: tuple[str, ...], words: str) -> None:
    given = ("--model", "null", "--tokenizer", str(model_folder), "--out", str(tmp_path), *more)
    result = CliRunner().invoke(command_line(), ["run", *given])
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.output.replace("│", " ").split())


async def test_results_that_find_no_more_room_are_said_and_kept(
    model_folder: Path, null_url: str, tmp_path: Path
) -> None:
    """A limit on the size of files stands for a full disk."""
    program = """
        import resource, sys
        from loadgen.__main__ import make_app
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        make_app()(sys.argv[1:])
    """
    command = [sys.executable, "-c", textwrap.dedent(program), "run", "--base-url", null_url, "--out", str(tmp_path)]
    command += ["--tokenizer", str(model_folder), "--workload", "ss", "--requests", "50"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        words = await finished(process)
    assert process.returncode == 2, words
    assert "Traceback" not in words
    assert "cannot write results" in " ".join(words.split())
    assert read_records(tmp_path / "requests.jsonl").records


async def test_no_server_and_no_tokenizer(null_url: str, tmp_path: Path) -> None:
    with run("http://127.0.0.1:9", tmp_path) as process:
        said = await finished(process)
    assert (process.returncode, "127.0.0.1:9" in said, "Traceback" in said) == (2, True, False)
    with run(null_url, tmp_path) as process:
        said = await finished(process)
    assert (process.returncode, "--tokenizer FOLDER" in " ".join(said.split())) == (2, True)
