"""What an engine really runs, what it leaves when the client goes, and what happens when it breaks."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
import yaml

pytestmark = pytest.mark.engine
STORY = "Write a very long story about a dog who travels the world."
COPY = (
    "Repeat this text exactly, twice: the quick brown fox jumps over the lazy dog and runs into the deep green forest."
)


def story(mode, content, max_tokens, **options):
    """A request that produces exactly `max_tokens` tokens."""
    messages = [{"role": "user", "content": content}]
    model = f"smollm2-135m-instruct:{mode}"
    return {"model": model, "messages": messages, "max_tokens": max_tokens, "ignore_eos": True, **options}


def test_every_delta_takes_effect(application):
    effective = {engine["name"]: engine["effective"] for engine in application.overview()["engines"]}
    assert effective["fp16"]["dtype"] == "torch.bfloat16"
    assert effective["fp16"]["quantization"] is None
    assert effective["fp16"]["linear_methods"] == ["UnquantizedEmbeddingMethod", "UnquantizedLinearMethod"]
    assert any("Int8" in name for name in effective["int8"]["linear_methods"])
    assert any("WNA16" in name for name in effective["gptq"]["linear_methods"])
    assert effective["speculative"]["speculation"] == {"method": "ngram", "tokens": 5}
    assert all(effective[name]["speculation"] is None for name in ("fp16", "int8", "gptq"))
    assert {name: effective[name]["enable_prefix_caching"] for name in ("fp16", "int8", "gptq", "speculative")} == {
        "fp16": True,
        "int8": False,
        "gptq": True,
        "speculative": False,
    }


@pytest.mark.parametrize(("mode", "reuses"), [("fp16", False), ("prefix_caching", True), ("gptq", False),
                                              ("gptq_prefix_caching", True)])  # fmt: skip
def test_prefixes_are_reused_in_the_modes_that_say_so(application, mode, reuses):
    engine = mode.removesuffix("_prefix_caching") if mode != "prefix_caching" else "fp16"
    prompt = f"{mode}: " + "All work and no play makes Jack a dull boy. " * 30
    application.chat(mode, prompt, max_tokens=1)
    before = application.engine(engine)["prefix_hits_tokens"]
    application.chat(mode, prompt, max_tokens=1)
    hits = application.engine(engine)["prefix_hits_tokens"] - before
    assert (hits >= 256) if reuses else (hits == 0)


def test_a_reset_forgets_prefixes(application):
    prompt = "To be forgotten. " * 60
    application.chat("prefix_caching", prompt, max_tokens=1)
    assert requests.post(f"{application.url}/admin/reset_prefix_cache", timeout=60).json()["reset"]["fp16"]
    before = application.engine("fp16")["prefix_hits_tokens"]
    application.chat("prefix_caching", prompt, max_tokens=1)
    assert application.engine("fp16")["prefix_hits_tokens"] == before


def test_speculation_accepts_tokens_on_copied_text(application):
    before = application.engine("speculative")
    application.chat("speculative", COPY, max_tokens=64, temperature=0)
    after = application.engine("speculative")
    assert after["draft_tokens"] > before["draft_tokens"]
    assert after["accepted_tokens"] > before["accepted_tokens"]


def test_an_engine_that_cannot_start_says_why_and_the_others_serve(application):
    broken = application.engine("broken")
    assert broken["state"] == "failed"
    assert "KV cache" in broken["reason"]
    assert broken["retry_in_s"] == 3600
    answer = application.chat("broken", "hi", max_tokens=2)
    assert answer.status_code == 503
    assert "KV cache" in answer.json()["error"]["message"]
    assert application.chat("fp16", "hi", max_tokens=2).status_code == 200


def test_four_engines_take_less_than_12_gib(application):
    engines = [engine for engine in application.overview()["engines"] if engine["state"] == "ready"]
    assert len(engines) == 4
    assert sum(engine["resident_bytes"] for engine in engines) < 12 * 2**30
    assert all(engine["peak_memory_bytes"] >= engine["resident_bytes"] for engine in engines)
    assert {engine["memory_method"] for engine in engines} == {"resident_set"}


def test_serve_status_shows_one_deployment_per_engine(application):
    # A local Ray cluster protects its dashboard with a token, which its own commands find when told to look for one.
    status = subprocess.run(
        [str(Path(sys.executable).with_name("serve")), "status", "-a", "http://127.0.0.1:8265"],
        env={**os.environ, "RAY_AUTH_MODE": "token"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    deployments = yaml.safe_load(status.stdout)["applications"]["modeswitch"]["deployments"]
    assert set(deployments) == {"controller", "device", "energy", "fp16", "int8", "gptq", "speculative", "broken"}


@pytest.mark.parametrize("stream", [True, False])
def test_a_closed_connection_aborts_within_a_second(application, stream):
    body = story("fp16", STORY, 4000, stream=stream)
    with requests.Session() as session, contextlib.suppress(requests.ReadTimeout):
        answer = session.post(f"{application.url}/v1/chat/completions", json=body, stream=stream, timeout=(5, 3))
        assert stream, "a story of 4,000 tokens cannot be over yet"
        next(answer.iter_lines())
        answer.close()
    time.sleep(1.0)
    first = application.engine("fp16")
    time.sleep(1.0)
    second = application.engine("fp16")
    assert second["generation_tokens"] == first["generation_tokens"]
    assert (second["running"], second["in_flight"]) == (0, 0)


def test_64_streams_at_once_lose_nothing(application):
    def one(number):
        body = story("fp16", f"Count on from {number}", 24, stream=True, stream_options={"include_usage": True})
        answer = requests.post(f"{application.url}/v1/chat/completions", json=body, stream=True, timeout=300)
        events = [line.removeprefix(b"data: ") for line in answer.iter_lines() if line]
        assert events.pop() == b"[DONE]"
        chunks = [json.loads(event) for event in events]
        text_chunks = [chunk for chunk in chunks if chunk["choices"] and chunk["choices"][0]["delta"].get("content")]
        return chunks[-1]["usage"]["completion_tokens"], len(text_chunks)

    with ThreadPoolExecutor(64) as pool:
        results = list(pool.map(one, range(64)))
    assert [tokens for tokens, _ in results] == [24] * 64
    # A stream stays a stream: nearly a frame per token (a token may be half a character and wait for the next).
    assert sum(chunks for _, chunks in results) > 0.8 * 24 * 64


def test_a_flood_of_long_prompts_kills_no_replica(application):
    before = {engine["name"]: engine["pid"] for engine in application.overview()["engines"]}
    prompt = "A long sentence that says nothing at all, again and again. " * 50

    def one(number):
        mode = ("fp16", "int8", "gptq", "speculative")[number % 4]
        return application.chat(mode, f"{number} {prompt}", max_tokens=2).status_code

    with ThreadPoolExecutor(24) as pool:
        assert set(pool.map(one, range(24))) == {200}
    assert {engine["name"]: engine["pid"] for engine in application.overview()["engines"]} == before


def test_a_killed_engine_ends_its_stream_in_an_error_and_comes_back(application):
    engine = application.engine("int8")
    body = story("int8", STORY, 2000, stream=True)
    answer = requests.post(f"{application.url}/v1/chat/completions", json=body, stream=True, timeout=120)
    lines = (line for line in answer.iter_lines() if line)
    next(lines)
    for pid in engine["process_ids"]:
        os.kill(pid, signal.SIGKILL)
    rest = list(lines)
    assert rest[-1] == b"data: [DONE]"
    error = json.loads(rest[-2].removeprefix(b"data: "))["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert application.chat("fp16", "hi", max_tokens=2).status_code == 200
    back = application.wait_for("int8", lambda e: e["state"] == "ready" and e["pid"] != engine["pid"], 300)
    assert set(back["process_ids"]).isdisjoint(engine["process_ids"])
    assert application.chat("int8", "hi", max_tokens=2).status_code == 200


def test_a_stopped_engine_is_noticed_within_20_s_and_comes_back(application):
    engine = application.engine("gptq")
    os.kill(engine["process_ids"][-1], signal.SIGSTOP)
    application.wait_for("gptq", lambda e: e["state"] != "ready", 20)
    assert application.chat("fp16", "hi", max_tokens=2).status_code == 200
    application.wait_for("gptq", lambda e: e["state"] == "ready", 300)
    assert application.chat("gptq", "hi", max_tokens=2).status_code == 200
