from collections.abc import AsyncIterator
from math import exp, log
from typing import Any

import pytest
from aiohttp import web

from loadgen.client import OpenAIClient, ServerFault
from loadgen.fidelity import (
    TOP_TOKENS,
    TOP_TOKENS_VLLM,
    FidelityUnavailable,
    TextFidelity,
    Token,
    allowed_top_tokens,
    bucketed_kl,
    compare,
    measure_fidelity,
    read_text,
    stdlib_texts,
)
from tests.loadgen.conftest import serve

P = {1: log(0.7), 2: log(0.2), 3: log(0.1)}
Q = {1: log(0.4), 2: log(0.5), 3: log(0.1)}


def test_kl_of_whole_distributions_is_exact() -> None:
    exact = sum(exp(P[key]) * (P[key] - Q[key]) for key in P)
    found = bucketed_kl(P, Q)
    assert found.kl_nats == pytest.approx(exact, abs=1e-6)
    assert found.covered == pytest.approx(1)
    assert bucketed_kl(P, P).kl_nats == pytest.approx(0, abs=1e-6)


def test_kl_of_the_most_probable_tokens_is_a_lower_bound() -> None:
    found = bucketed_kl({1: P[1], 2: P[2]}, {1: Q[1], 3: Q[3]})
    assert 0 < found.kl_nats <= bucketed_kl(P, Q).kl_nats
    assert found.covered == pytest.approx(0.7)


def test_distributions_without_a_shared_token() -> None:
    found = bucketed_kl({1: log(0.6)}, {2: log(0.6)})
    assert (found.kl_nats, found.covered) == (0.0, 0.0)


def test_compare_means_over_tokens() -> None:
    found = compare("gptq", 3, [Token(1, P[1], P), Token(2, P[2], P)], [Token(1, Q[1], Q), Token(2, Q[2], Q)])
    assert found.tokens == 2
    assert found.delta_logprob == pytest.approx(((Q[1] - P[1]) + (Q[2] - P[2])) / 2)
    assert found.delta_logprob_abs == pytest.approx((abs(Q[1] - P[1]) + abs(Q[2] - P[2])) / 2)
    assert found.perplexity_ratio == pytest.approx(exp(-found.delta_logprob))
    assert found.greedy_agreement == 0.0


def test_other_tokens_make_no_pairs() -> None:
    with pytest.raises(FidelityUnavailable, match="other tokens"):
        compare("gptq", 0, [Token(1, P[1], P)], [Token(2, P[2], P)])


def row(logprobs: dict[int, float]) -> dict[str, Any]:
    return {str(key): {"logprob": value, "rank": 1, "decoded_token": "x"} for key, value in logprobs.items()}


LIMITS = {"strict": 20, "stricter": 5}


async def _complete(request: web.Request) -> web.Response:
    body = await request.json()
    mode = body["model"].partition(":")[2]
    if mode == "plain":
        return web.json_response({"choices": [{"text": "x"}]})
    if mode == "broken":
        return web.json_response({"error": {"message": "no such mode"}}, status=404)
    if (allowed := LIMITS.get(mode)) and body["prompt_logprobs"] > allowed:
        words = f"Requested prompt logprobs of {body['prompt_logprobs']}, which is greater than max allowed: {allowed}"
        return web.json_response({"error": {"message": words}}, status=400)
    if mode == "curt" and body["prompt_logprobs"] > 20:
        return web.json_response({"error": {"message": "too many prompt_logprobs"}}, status=400)
    seen = Q if mode == "gptq" else P
    return web.json_response({"choices": [{"text": "x", "prompt_logprobs": [None, row(seen), row(seen)]}]})


@pytest.fixture
async def url() -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/completions", _complete)
    server = await serve(app)
    yield str(server.make_url("")).rstrip("/")
    await server.close()


async def test_every_mode_reads_every_text(url: str) -> None:
    kept: list[TextFidelity] = []
    async with OpenAIClient(url) as client:
        found = await measure_fidelity(client, "m", "fp16", ["gptq", "int8"], ["a", "b"], on_text=kept.append)
    assert kept == found
    assert {(item.mode, item.text) for item in found} == {("gptq", 0), ("gptq", 1), ("int8", 0), ("int8", 1)}
    assert all(item.tokens == 2 for item in found)
    assert all((item.kl_nats < 1e-6) == (item.mode == "int8") for item in found)


@pytest.mark.parametrize(
    ("modes", "allowed"),
    [
        (["fp16", "gptq"], TOP_TOKENS),
        (["fp16", "strict"], 20),
        (["fp16", "stricter", "strict"], 5),
        (["curt"], TOP_TOKENS_VLLM),
    ],
)
async def test_as_many_tokens_are_compared_as_all_engines_allow(url: str, modes: list[str], allowed: int) -> None:
    async with OpenAIClient(url) as client:
        assert await allowed_top_tokens(client, [f"m:{mode}" for mode in modes]) == allowed
        if modes[0] == "fp16":
            found = await measure_fidelity(client, "m", "fp16", modes[1:], ["a"], top_tokens=allowed)
            assert len(found) == len(modes) - 1


async def test_a_mode_that_answers_nothing_has_no_limit(url: str) -> None:
    async with OpenAIClient(url) as client:
        with pytest.raises(ServerFault, match="no such mode"):
            await allowed_top_tokens(client, ["m:broken"])


async def test_a_server_without_prompt_logprobs_is_named(url: str) -> None:
    async with OpenAIClient(url) as client:
        with pytest.raises(FidelityUnavailable, match="m:plain"):
            await read_text(client, "m:plain", "text")
        with pytest.raises(ServerFault, match="no such mode"):
            await measure_fidelity(client, "m", "fp16", ["broken"], ["a"])


async def test_a_server_that_is_gone() -> None:
    async with OpenAIClient("http://127.0.0.1:9") as client:
        with pytest.raises(ServerFault, match=r"127\.0\.0\.1:9"):
            await read_text(client, "m", "text")


def test_texts_are_the_same_every_time_and_differ() -> None:
    found = stdlib_texts(40)
    assert found == stdlib_texts(40)
    assert len(set(found)) == 40
    assert all(400 < len(text) < 600 for text in found)
