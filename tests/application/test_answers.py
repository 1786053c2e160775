"""A real model answers through every mode of the preset, streamed and not, to openai-python."""

import math

import pytest
import requests

from app.config import load_settings
from app.modes import CATALOGUE

pytestmark = pytest.mark.engine
MODES = [str(mode) for mode in load_settings({"preset": "cpu"}).modes]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
LOGIT_EPSILON = 0.35
"""In nats, between the two best tokens. Speculation and prefix reuse compute the same bfloat16 sums in another order;
a rounding step of a logit around 20 is 0.125, so closer candidates than a few steps may change places."""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stream", [False, True])
def test_chat_answers(application, served, mode, stream):
    call = application.openai().chat.completions.with_raw_response.create(
        model=f"{served}:{mode}", messages=QUESTION, max_tokens=24, temperature=0, stream=stream
    )
    assert call.headers["x-modeswitch-mode"] == mode
    answer = call.parse()
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)
    else:
        text = answer.choices[0].message.content
    # One of the model's two best first words leads to a detour by way of the Étoile; rounded weights may take it.
    assert ("Paris" if CATALOGUE[mode].lossless else "France") in text


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stream", [False, True])
def test_completion_answers(application, served, mode, stream):
    answer = application.openai().completions.create(
        model=f"{served}:{mode}", prompt="1, 2, 3, 4, 5,", max_tokens=12, temperature=0, stream=stream
    )
    text = "".join(chunk.choices[0].text for chunk in answer) if stream else answer.choices[0].text
    assert "6" in text


@pytest.mark.parametrize("mode", [mode for mode in MODES if CATALOGUE[mode].lossless and mode != "fp16"])
@pytest.mark.parametrize(
    "content",
    [
        "Count from one to thirty in words.",
        "Repeat this three times: the quick brown fox jumps over the lazy dog.",
        "Explain in a few sentences why the sky is blue.",
    ],
)
def test_lossless_modes_equal_fp16_token_for_token(application, mode, content):
    options = dict(max_tokens=96, temperature=0, logprobs=True, top_logprobs=2)
    for _ in range(2):
        # The second time the prefix is cached.
        other = application.chat(mode, content, **options).json()["choices"][0]["logprobs"]["content"]
    reference = application.chat("fp16", content, **options).json()["choices"][0]["logprobs"]["content"]
    for expected, got in zip(reference, other, strict=False):
        if expected["token"] != got["token"]:
            first, second = expected["top_logprobs"]
            assert got["token"] == second["token"]
            assert first["logprob"] - second["logprob"] < LOGIT_EPSILON, f"{first['token']!r} became {got['token']!r}"
            return
    assert len(reference) == len(other)


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "none"},
        {"messages": [{"role": "system", "content": "Be brief."}, *QUESTION]},
        {"add_generation_prompt": False},
        {
            "messages": [*QUESTION, {"role": "assistant", "content": "The capital of France is"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
        {
            "messages": [
                *QUESTION,
                {"role": "assistant", "content": None, "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
                ]},
                {"role": "tool", "tool_call_id": "1", "content": "sunny, élan 日本"},
            ],
            "tools": TOOLS,
        },
    ],
)  # fmt: skip
def test_the_controller_counts_tokens_as_the_engine_does(application, extra):
    body = {"model": "auto", "messages": QUESTION, "max_tokens": 2, **extra}
    answer = requests.post(f"{application.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    assert int(answer.headers["x-modeswitch-prompt-tokens"]) == answer.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize("prompt", ["One two", ["One two", "Three"], [1, 2, 3], [[1, 2], [3]]])
def test_completion_prompts_are_counted_too(application, prompt):
    body = {"model": "auto", "prompt": prompt, "max_tokens": 2}
    answer = requests.post(f"{application.url}/v1/completions", json=body, timeout=120)
    assert int(answer.headers["x-modeswitch-prompt-tokens"]) == answer.json()["usage"]["prompt_tokens"]


def test_openai_options_pass_through(application, served):
    answer = application.openai().chat.completions.create(
        model=served, messages=QUESTION, n=2, seed=1, max_tokens=8, logprobs=True, top_logprobs=3, stop=["\n"]
    )
    assert len(answer.choices) == 2
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 3
    json_answer = application.chat(
        "fp16", "Give me a JSON object.", max_tokens=48, response_format={"type": "json_object"}
    )
    assert json_answer.json()["choices"][0]["message"]["content"].lstrip().startswith("{")


def test_usage_and_extras_come_when_asked_for(application, served):
    stream = application.openai().chat.completions.create(
        model=f"{served}:fp16",
        messages=QUESTION,
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
        extra_headers={"x-modeswitch-include": "mode,timing", "x-request-id": "test-7"},
    )
    chunks = list(stream)
    assert [chunk.usage for chunk in chunks if chunk.usage][-1].completion_tokens > 0
    extra = chunks[-1].model_extra["modeswitch"]
    assert (extra["mode"], extra["engine"]) == ("fp16", "fp16")
    assert extra["request_id"].startswith("test-7.")
    assert 0 < extra["timing"]["first_token_ms"] <= extra["timing"]["total_ms"]
    whole = requests.post(
        f"{application.url}/v1/chat/completions",
        json={"model": f"{served}:fp16", "messages": QUESTION, "max_tokens": 4},
        headers={"x-modeswitch-include": "mode", "x-request-id": "test-8"},
        timeout=120,
    )
    assert whole.headers["x-request-id"] == "test-8"
    name = whole.headers["x-modeswitch-request-id"]
    assert whole.json()["modeswitch"] == {"request_id": name, "mode": "fp16", "engine": "fp16"}
    assert "modeswitch" not in application.chat("fp16", "hi", max_tokens=2).json()


def test_a_score_of_the_same_text_differs_between_weights(application):
    """The quantised engines really run other weights, and close ones."""
    options = dict(max_tokens=8, temperature=0, logprobs=True)
    scores = {}
    for mode in ("fp16", "int8", "gptq"):
        content = application.chat(mode, QUESTION[0]["content"], **options).json()["choices"][0]["logprobs"]["content"]
        scores[mode] = content[0]["logprob"]
    assert len(set(scores.values())) == 3
    assert all(math.isclose(score, scores["fp16"], abs_tol=1.0) for score in scores.values())
