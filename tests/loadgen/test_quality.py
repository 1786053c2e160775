import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from pydantic import TypeAdapter

from app.routing.eligibility import QualityGate
from app.routing.mode_info import ModeInfo
from app.routing.profile import GateOutcome, QualityEvidence, parse_profile
from app.routing.settings import RoutingSettings
from app.routing.tags import Tag
from loadgen.benchmarks import (
    BenchmarkUnreadable,
    Marking,
    Question,
    last_number,
    most_probable,
    number_right,
    read_questions,
)
from loadgen.lm_eval_samples import SamplesUnreadable, Source, pair_samples
from loadgen.profile_answer import features_of
from loadgen.questioning import scopes_of
from loadgen.recipe import RequestKind
from tests.loadgen.caching_modes import CachingApplication
from tests.loadgen.conftest import API_KEY, finished, keyed, lines_in, serve


def choice(index: int, **more: Any) -> dict[str, Any]:
    return {
        "id": f"c{index}",
        "prompt": f"Which of these is number {index}?\nA. one\nB. two",
        "reference": "A",
        "valid_labels": ["A", "B"],
        "benchmark_suite": "choices",
        "evaluation_mode": "multiple_choice_accuracy",
    } | more


def number(index: int) -> dict[str, Any]:
    return {
        "id": f"n{index}",
        "prompt": f"What is {index} and 1?",
        "reference": str(index + 1),
        "evaluation_mode": "final_answer_exact_match",
    }


def free(index: int) -> dict[str, Any]:
    return {
        "id": f"t{index}",
        "prompt": f"Tell me of {index}.",
        "reference": "a word",
        "evaluation_mode": "external_judge",
    }


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_reads_draws_and_names_questions(tmp_path: Path) -> None:
    files = [
        write(tmp_path / "c.jsonl", [choice(index) for index in range(9)]),
        write(tmp_path / "n.jsonl", [number(1)]),
    ]
    found = read_questions(files, limit=3)
    assert [question.suite for question in found] == ["choices"] * 3 + ["n"]
    assert found == read_questions(files, limit=3)
    assert found[0].chance == 0.5
    assert found[0].tag is Tag.MULTIPLE_CHOICE
    assert found[3].tag is Tag.MATHEMATICS


@pytest.mark.parametrize(
    "line, why",
    [
        ("{", "line 2"),
        ("[]", "line 2"),
        ('{"id": 1}', "evaluation_mode"),
        (json.dumps(choice(1, reference="Z")), "valid_labels"),
        (json.dumps(number(1) | {"reference": "none"}), "no number"),
        (json.dumps(number(1) | {"evaluation_mode": "odd"}), "odd"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, why: str) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps(number(1)) + "\n" + line + "\n")
    with pytest.raises(BenchmarkUnreadable, match=why):
        read_questions([path])


def test_a_missing_an_empty_and_a_binary_file(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("missing", "empty", "binary"):
        with pytest.raises(BenchmarkUnreadable, match=name):
            read_questions([tmp_path / name])


@pytest.mark.parametrize(
    "text, wanted",
    [("it is 1,234.", 1234), ("#### -7", -7), ("3 then 4.50", 4.5), ("none", None), ("$12.", 12), ("10,", 10)],
)
def test_last_number(text: str, wanted: float | None) -> None:
    assert last_number(text) == wanted


def test_number_right_and_the_most_probable_label() -> None:
    question = Question("", "", "", Marking.NUMBER, "1200")
    assert number_right(question, "So the answer is 1,200.0")
    assert not number_right(question, "I do not know")
    assert most_probable(("A", "B"), {" A": -2.0, "B": -1.0, "A": -3.0, "The": -0.1}) == "B"
    assert most_probable(("A", "B"), {"The": -0.1}) is None


def test_scopes_are_suite_tag_and_class() -> None:
    question = Question("", "gsm8k", "", Marking.NUMBER, "1")
    assert scopes_of(question, None, 256) == ("gsm8k", "mathematics")
    assert scopes_of(question, 100, 256) == ("gsm8k", "mathematics", "decode_heavy")


def top(**logprobs: float) -> dict[str, Any]:
    return {"choices": [{"text": "A", "logprobs": {"top_logprobs": [logprobs]}}], "usage": {"prompt_tokens": 20}}


async def _complete(request: web.Request) -> web.Response:
    """`fp16` and `same` are right, `worse` is wrong on every second question and strays, `dead` answers 500."""
    body = await request.json()
    mode = body["model"].partition(":")[2]
    if mode == "dead":
        return web.json_response({"error": {"message": "the engine died"}}, status=500)
    if "prompt_logprobs" in body:
        seen = {"1": {"logprob": -2.0 if mode == "worse" else -0.1}, "2": {"logprob": -2.5}}
        return web.json_response({"choices": [{"prompt_logprobs": [None, seen, seen]}]})
    wrong = mode == "worse" and int(body["prompt"].split("number ")[1].split("?")[0]) % 2
    return web.json_response(top(A=-2.0, B=-1.0) if wrong else top(A=-1.0, B=-2.0))


async def _chat(request: web.Request) -> web.Response:
    body = await request.json()
    if body["model"].endswith(":dead"):
        return web.Response(text="<html>")
    words = body["messages"][0]["content"]
    text = f"{int(words.split()[2]) + 1}" if words.startswith("What is") else "a word"
    if body["model"].endswith(":worse"):
        text = "0 other"
    return web.json_response({"choices": [{"message": {"content": text}}], "usage": {"prompt_tokens": 9}})


async def _modes(request: web.Request) -> web.Response:
    rows = [{"id": "fp16", "state": "ready", "lossless": True}]
    rows += [{"id": name, "state": "ready", "lossless": False} for name in ("same", "worse")]
    return web.json_response({"data": [*rows, {"id": "late", "state": "starting", "lossless": False}]})


async def _models(request: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "m"}]})


@pytest.fixture
async def url() -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/completions", _complete)
    app.router.add_post("/v1/chat/completions", _chat)
    app.router.add_get("/v1/modes", _modes)
    app.router.add_get("/v1/models", _models)
    server = await serve(app)
    yield str(server.make_url("")).rstrip("/")
    await server.close()


def command(*more: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "loadgen", "quality", *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"COLUMNS": "160"},
    )


@pytest.mark.timeout(120)
async def test_the_command_judges_modes(url: str, tmp_path: Path) -> None:
    pytest.importorskip("rouge_score")
    files = [
        write(tmp_path / "c.jsonl", [choice(index) for index in range(300)]),
        write(tmp_path / "n.jsonl", [number(index) for index in range(30)]),
        write(tmp_path / "t.jsonl", [free(index) for index in range(3)]),
    ]
    out = tmp_path / "out"
    process = command(*map(str, files), "--base-url", url, "--texts", "20", "--out", str(out), "--concurrency", "8")
    words = await finished(process)
    assert process.returncode == 0, words
    found = TypeAdapter(list[QualityEvidence]).validate_json((out / "quality.json").read_bytes())
    by_key = {(item.mode, item.scope): item for item in found}
    assert len(by_key) == len(found)
    assert {item.mode for item in found} == {"same", "worse"}
    same = by_key["same", "multiple_choice"]
    assert (same.outcome, same.metric, same.samples) == (GateOutcome.PASS, "accuracy_points", 300)
    worse = by_key["worse", "multiple_choice"]
    assert (worse.outcome, worse.delta) == (GateOutcome.FAIL, pytest.approx(-50))
    # 30 questions say nothing of accuracy; 20 texts that read alike do.
    assert by_key["same", "mathematics"].metric == "kl_nats_per_token"
    assert by_key["same", "none"].outcome is GateOutcome.PASS
    assert by_key["worse", "none"].outcome is GateOutcome.FAIL
    summary = json.loads((out / "summary.json").read_text())
    assert summary["complete"]
    assert summary["likeness"]["same"]["same greedy text"]["mean"] == 1
    assert summary["likeness"]["worse"]["ROUGE-L to the right answer, change"]["mean"] == pytest.approx(-1)
    lines = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    assert len(lines) == 333 * 3
    assert not any("text" in line or "prompt" in line for line in lines)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("corrupts", "outcome"), [((), "pass"), (("int8_prefix_caching",), "fail")])
async def test_a_mode_that_reuses_prefixes_must_answer_from_its_cache(
    tmp_path: Path, corrupts: tuple[str, ...], outcome: str
) -> None:
    server = await serve(keyed(CachingApplication(corrupts=frozenset(corrupts)).app()))
    more = ("--texts", "20", "--out", str(tmp_path), "--api-key", API_KEY)
    process = command("--base-url", str(server.make_url("")), *more)
    words = await finished(process)
    await server.close()
    assert process.returncode == 0, words
    found = TypeAdapter(list[QualityEvidence]).validate_json((tmp_path / "quality.json").read_bytes())
    by_key = {(item.mode, item.metric): item.outcome for item in found if item.scope == "none"}
    assert by_key["int8_prefix_caching", "kl_nats_per_token"] == "pass"
    assert by_key["int8_prefix_caching", "generated_kl_nats_per_token"] == outcome
    assert ("int8", "generated_kl_nats_per_token") not in by_key
    curve = {"prefill_ms": [(1, 1.0), (2, 2.0)], "step_ms": [(1, 1.0)]}
    content = {"schema_version": 1, "version": "v", "model": "m", "hardware": "h", "modes": {"int8": curve}}
    content["quality"] = [item.model_dump(mode="json") for item in found]
    profile = parse_profile(content, model="m", hardware="h")
    mode = ModeInfo("int8_prefix_caching", "int8", "int8", lossless=False)
    gate = QualityGate([mode], profile.quality, RoutingSettings())
    features = features_of(RequestKind(kind="story", prompt_tokens=100, output_tokens=50))
    assert bool(gate.refused(features)) == (outcome == "fail")


@pytest.mark.timeout(60)
async def test_a_fault_while_modes_are_listed_lets_no_mode_pass_by_its_texts(tmp_path: Path) -> None:
    application = CachingApplication(corrupts=frozenset({"int8_prefix_caching"}))
    statuses = [503]

    @web.middleware
    async def busy_once(request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path == "/v1/modes" and statuses:
            return web.json_response({"error": {"message": "busy"}}, status=statuses.pop())
        response: web.StreamResponse = await handler(request)
        return response

    app = application.app()
    app.middlewares.append(busy_once)
    server = await serve(app)
    # With these named the command has no other need of the list.
    more = ("--model", "m", "--mode", "int8_prefix_caching", "--texts", "20", "--out", str(tmp_path))
    process = command("--base-url", str(server.make_url("")), *more)
    words = await finished(process)
    assert statuses == []
    assert process.returncode == 2, words
    assert "/v1/modes: HTTP 503: busy" in words
    assert not (tmp_path / "quality.json").exists()
    process = command("--base-url", str(server.make_url("")), *more)
    words = await finished(process)
    await server.close()
    assert process.returncode == 0, words
    found = TypeAdapter(list[QualityEvidence]).validate_json((tmp_path / "quality.json").read_bytes())
    assert {item.metric: item.outcome.value for item in found}["generated_kl_nats_per_token"] == "fail"


@pytest.mark.timeout(60)
async def test_a_server_without_modes_is_judged_by_its_models(tmp_path: Path) -> None:
    asked: set[str] = set()

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        asked.add(body["model"])
        row = {"1": {"logprob": -0.1}, "2": {"logprob": -2.5}}
        return web.json_response({"choices": [{"prompt_logprobs": [None, row, row]}]})

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    app.router.add_get("/v1/models", _models)
    server = await serve(app)
    process = command(
        *("--base-url", str(server.make_url("/v1")), "--reference", "whole", "--mode", "rounded"),
        *("--texts", "20", "--out", str(tmp_path)),
    )
    words = await finished(process)
    await server.close()
    assert process.returncode == 0, words
    assert asked == {"whole", "rounded"}
    (found,) = TypeAdapter(list[QualityEvidence]).validate_json((tmp_path / "quality.json").read_bytes())
    assert (found.mode, found.outcome) == ("rounded", "pass")
    assert "It is a lower bound" in words


@pytest.mark.timeout(60)
async def test_a_mode_that_fails_makes_no_pairs(url: str, tmp_path: Path) -> None:
    file, out = write(tmp_path / "c.jsonl", [choice(index) for index in range(4)]), tmp_path / "out"
    process = command(str(file), "--base-url", url, "--mode", "dead", "--texts", "0", "--out", str(out))
    words = await finished(process)
    assert process.returncode == 0
    assert "the engine died" in words
    assert json.loads((out / "quality.json").read_text()) == []


@pytest.mark.timeout(60)
async def test_errors_are_said_plainly(url: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    question = write(tmp_path / "c.jsonl", [choice(1)])
    for arguments, why in (
        (["--base-url", "http://127.0.0.1:9", "--texts", "1", "--out", str(tmp_path / "o")], "127.0.0.1:9"),
        ([str(tmp_path / "none.jsonl"), "--base-url", url], "cannot read"),
        ([str(question), "--base-url", url, "--texts", "0", "--out", str(tmp_path / "file" / "o")], "cannot write"),
        (["--samples", "odd"], "MODE:SCOPE=FILE"),
        (["--base-url", url, "--mode", "dead", "--texts", "1", "--out", str(tmp_path / "o")], "the engine died"),
    ):
        process = command(*arguments)
        words = await finished(process)
        assert process.returncode == 2, words
        assert why in " ".join(words.split())
        assert "Traceback" not in words


@pytest.mark.timeout(60)
async def test_an_interruption_keeps_what_was_answered(tmp_path: Path) -> None:
    async def slow(request: web.Request) -> web.Response:
        import asyncio

        await asyncio.sleep(0.05)
        return await _complete(request)

    app = web.Application()
    app.router.add_post("/v1/completions", slow)
    app.router.add_get("/v1/models", _models)
    server = await serve(app)
    file, out = write(tmp_path / "c.jsonl", [choice(index) for index in range(1000)]), tmp_path / "out"
    process = command(
        str(file), "--base-url", str(server.make_url("")), "--mode", "same", "--texts", "0", "--out", str(out)
    )
    await lines_in(out / "answers.jsonl", 6)
    process.send_signal(signal.SIGINT)
    words = await finished(process)
    await server.close()
    assert process.returncode == 130, words
    summary = json.loads((out / "summary.json").read_text())
    assert not summary["complete"]
    assert summary["measured"][0]["samples"] >= 3


def sample(index: int, right: bool, name: str = "acc", **more: Any) -> dict[str, Any]:
    return {"doc_id": index, "arguments": {"a": 1, "b": 2, "c": 3, "d": 4}, name: float(right)} | more


def test_lm_eval_samples_are_paired_by_document(tmp_path: Path) -> None:
    reference = write(tmp_path / "r.jsonl", [sample(index, True) for index in range(4)])
    mode = write(tmp_path / "m.jsonl", [sample(index, index > 1) for index in range(1, 6)])
    found = pair_samples([Source("fp16", "any", reference), Source("gptq", "any", mode)], "fp16")
    assert [(pair.reference_right, pair.mode_right, pair.chance) for pair in found["gptq", "any"]] == [
        (True, False, 0.25),
        (True, True, 0.25),
        (True, True, 0.25),
    ]


def test_the_flexible_filter_of_lm_eval_is_taken(tmp_path: Path) -> None:
    rows = [
        sample(0, right, "exact_match", filter=name)
        for name, right in (("strict-match", False), ("flexible-extract", True))
    ]
    file = write(tmp_path / "r.jsonl", rows)
    found = pair_samples([Source("fp16", "any", file), Source("gptq", "any", file)], "fp16")
    assert [(pair.reference_right, pair.chance) for pair in found["gptq", "any"]] == [(True, 0.05)]


@pytest.mark.parametrize(
    ("more", "chance"),
    [
        # A letter that was written out of three.
        ({"exact_match": 1.0, "arguments": {"gen_args_0": {}}, "doc": {"valid_labels": ["A", "B", "C"]}}, 1 / 3),
        # Likelihoods of two choices, each scored twice for its mutual information.
        ({"acc": 1.0, "acc_mutual_info": 1.0}, 1 / 2),
        # One continuation, most probable or not: nothing to guess among.
        ({"acc": 1.0, "arguments": {"gen_args_0": {"arg_0": "a", "arg_1": " b"}}}, 0.05),
        ({"acc": 1.0, "filtered_resps": [["-1.0", "True"], ["-2.0", "False"]]}, 1 / 4),
    ],
)
def test_the_chance_of_a_guess_is_read_from_each_kind_of_sample(
    tmp_path: Path, more: dict[str, Any], chance: float
) -> None:
    row = sample(0, True)
    del row["acc"]
    file = write(tmp_path / "s.jsonl", [row | more])
    found = pair_samples([Source("fp16", "any", file), Source("gptq", "any", file)], "fp16")
    assert [(pair.reference_right, pair.chance) for pair in found["gptq", "any"]] == [(True, pytest.approx(chance))]


def test_unusable_samples_are_named(tmp_path: Path) -> None:
    good = write(tmp_path / "good.jsonl", [sample(0, True)])
    other = write(tmp_path / "other.jsonl", [sample(7, True)])
    bad = write(tmp_path / "bad.jsonl", [{"doc_id": 1}])
    for sources, why in (
        ([Source("gptq", "any", good)], "no samples of fp16"),
        ([Source("fp16", "any", other), Source("gptq", "any", good)], "in common"),
        ([Source("fp16", "any", bad)], "line 1"),
        ([Source("fp16", "any", tmp_path / "none")], "cannot read"),
    ):
        with pytest.raises(SamplesUnreadable, match=why):
            pair_samples(sources, "fp16")
