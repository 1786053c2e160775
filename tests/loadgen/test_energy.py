import json
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from typer.testing import CliRunner

from loadgen.__main__ import make_app
from loadgen.energy_by_mode import Account, Results, Spent, accounts, j_per_token, rows
from tests.loadgen.conftest import API_KEY, finished, keyed, lines_in, serve

JOULES_PER_TOKEN = {"fp16": 4.0, "gptq": 1.0}


def test_one_unknown_request_makes_its_trial_unknown() -> None:
    assert j_per_token([Spent(4.0, 2), Spent(2.0, 1)]) == 2.0
    assert j_per_token([Spent(4.0, 2), Spent(None, 1)]) is None
    assert j_per_token([Spent(4.0, 2), Spent(2.0, None)]) is None
    assert j_per_token([Spent(4.0, 0)]) is None
    assert j_per_token([]) is None


def test_rounds_are_paired_and_unknown_ones_left_out() -> None:
    results = Results()
    for number, drift in enumerate((1.0, 2.0, 4.0)):
        results.add("fp16", number, 8.0 * drift, "nvml_counter", "gpu0")
        results.add("gptq", number, 2.0 * drift if number else None, "nvml_counter", "gpu0")
        results.add("awq", number, None, None, None)
    fp16, gptq, awq = rows(results, "fp16")
    assert fp16.j_per_token is not None
    assert (fp16.j_per_token.estimate, fp16.rounds, fp16.ratio) == (pytest.approx(56 / 3), 3, None)
    assert gptq.ratio is not None
    assert (gptq.ratio.estimate, gptq.ratio.pairs, gptq.rounds, gptq.rounds_tried) == (0.25, 2, 2, 3)
    assert (awq.j_per_token, awq.ratio, awq.method, awq.rounds) == (None, None, None, 0)
    assert awq.as_json()["j_per_token"] is None


def test_a_mode_of_no_joules_has_no_ratio() -> None:
    results = Results()
    results.add("fp16", 0, 0.0, "modelled", "package")
    results.add("gptq", 0, 1.0, "modelled", "package")
    fp16, gptq = rows(results, "fp16")
    assert fp16.j_per_token is not None
    assert fp16.j_per_token.estimate == 0.0
    assert gptq.ratio is None
    assert gptq.modelled


@pytest.mark.parametrize("answer", [{}, {"by": []}, {"by": {"mode": "none"}}, {"by": {"mode": [3, {"energy_j": 1}]}}])
def test_an_account_of_another_form_is_no_account(answer: dict[str, Any]) -> None:
    assert accounts(answer) == {}


def test_an_account_keeps_unknown_unknown() -> None:
    shares = [{"name": "fp16", "j_per_output_token": None}, {"name": None, "j_per_output_token": 1.0}]
    assert accounts({"by": {"mode": shares}, "methods": ["rapl"]}) == {"fp16": Account(None, ("rapl",), ())}


def application(told: dict[str, Any] | None, offered: bool = True) -> web.Application:
    """Two modes that answer two tokens. `told`: the energy object, but for the joules, or none."""

    def energy(model: str) -> dict[str, Any]:
        if told is None:
            return {}
        rate = JOULES_PER_TOKEN[model.partition(":")[2]] if told["status"] == "final" else None
        joules = None if rate is None else 2 * rate
        return {"modeswitch": {"energy": {"joules": joules, "joules_per_output_token": rate, **told}}}

    async def answer(request: web.Request) -> web.StreamResponse:
        wished = "x-modeswitch-include" in request.headers
        if wished and not offered:
            return web.json_response({"error": {"message": "energy unknown"}}, status=400)
        body = await request.json()
        usage = {"usage": {"prompt_tokens": 3, "completion_tokens": 2}} | (energy(body["model"]) if wished else {})
        if not body.get("stream"):
            return web.json_response({"choices": [{"message": {"content": "a b"}}], **usage})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for frame in ({"choices": [{"delta": {"content": "a b"}}]}, {"choices": [], **usage}):
            await response.write(b"data: " + json.dumps(frame).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def account(request: web.Request) -> web.Response:
        assert float(request.query["since"]) < float(request.query["until"])
        shares = [{"name": name, "j_per_output_token": rate + 0.5} for name, rate in JOULES_PER_TOKEN.items()]
        return web.json_response({"by": {"mode": shares}, "methods": ["modelled"], "scopes": ["cpu package"]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    listed = [{"id": name, "state": "ready"} for name in JOULES_PER_TOKEN]
    app.router.add_get("/v1/models", _always({"data": [{"id": "tiny"}]}))
    app.router.add_get("/v1/modes", _always({"data": listed}))
    app.router.add_get("/v1/energy", account)
    return app


def _always(value: Any) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response(value)

    return answer


@contextmanager
def energy(url: str, model_folder: Path, out: Path, *more: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "loadgen", "energy", "--base-url", url, "--out", str(out)]
    command += ["--tokenizer", str(model_folder), "--requests", "2", "--rounds", "3", *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        yield process
        process.kill()


async def run(app: web.Application, model_folder: Path, out: Path, *more: str) -> tuple[int, str, dict[str, Any]]:
    server = await serve(app)
    with energy(str(server.make_url("")), model_folder, out, *more) as process:
        words = await finished(process)
    await server.close()
    assert "Traceback" not in words, words
    found = json.loads((out / "energy.json").read_text()) if (out / "energy.json").exists() else {}
    return process.returncode, " ".join(words.split()), found


async def test_the_command_end_to_end(model_folder: Path, tmp_path: Path) -> None:
    told = {"method": "modelled", "scope": "cpu package", "status": "final"}
    code, words, found = await run(keyed(application(told)), model_folder, tmp_path, "--api-key", API_KEY)
    assert code == 0, words
    assert API_KEY not in (tmp_path / "energy.json").read_text()
    fp16, gptq = found["rows"]
    assert fp16["j_per_token"] == {"estimate": 4.0, "low": 4.0, "high": 4.0, "pairs": 3}
    assert gptq["ratio"] == {"estimate": pytest.approx(0.25), "low": 0.25, "high": 0.25, "pairs": 3}
    assert (gptq["method"], gptq["scope"], gptq["modelled"]) == ("modelled", "cpu package", True)
    assert gptq["account"]["j_per_output_token"] == 1.5
    assert "Modelled: these joules come from a model" in words


@pytest.mark.parametrize(
    ("told", "offered"),
    [
        ({"method": None, "scope": None, "status": "unmeasured"}, True),
        (None, True),
        (None, False),
    ],
)
async def test_what_the_server_does_not_know_is_unknown(
    model_folder: Path, tmp_path: Path, told: dict[str, Any] | None, offered: bool
) -> None:
    code, words, found = await run(application(told, offered), model_folder, tmp_path, "--rounds", "1")
    assert code == 0, words
    assert [row["j_per_token"] for row in found["rows"]] == [None, None]
    assert "unknown" in words
    # The account still has a figure, and it says how it was come by.
    assert found["rows"][0]["modelled"]
    assert "Modelled:" in words


async def test_without_the_key_the_server_says_so(model_folder: Path, tmp_path: Path) -> None:
    code, words, _ = await run(keyed(application(None)), model_folder, tmp_path)
    assert (code, "HTTP 401: no such key" in words) == (2, True)


async def test_a_missing_reference_is_named(model_folder: Path, tmp_path: Path) -> None:
    code, words, _ = await run(application(None), model_folder, tmp_path, "--reference", "bf16")
    assert (code, "'bf16' is not among: fp16, gptq" in words) == (2, True)


async def test_interrupted_it_keeps_what_it_has(model_folder: Path, tmp_path: Path) -> None:
    told = {"method": "rapl", "scope": "cpu package", "status": "final"}
    server = await serve(application(told))
    with energy(str(server.make_url("")), model_folder, tmp_path, "--rounds", "9999") as process:
        await lines_in(tmp_path / "requests.jsonl", 40)
        process.send_signal(signal.SIGINT)
        words = await finished(process)
    await server.close()
    assert process.returncode == 130, words
    found = json.loads((tmp_path / "energy.json").read_text())
    assert found["rows"][0]["j_per_token"]["estimate"] == 4.0


def test_wrong_options_and_no_server(model_folder: Path, tmp_path: Path) -> None:
    for more, words in (
        (("--workload", "nonsense"), "no workload 'nonsense'"),
        (("--base-url", "http://127.0.0.1:9"), "127.0.0.1:9"),
        (("--base-url", "http://127.0.0.1:9", "--mode", "fp16", "--out", "/proc/nowhere"), "cannot write results"),
    ):
        result = CliRunner().invoke(
            make_app(), ["energy", "--tokenizer", str(model_folder), "--out", str(tmp_path), *more]
        )
        assert result.exit_code == 2, result.output
        assert words in " ".join(result.output.replace("│", " ").split())
