"""The HTTP surface over played engines: answers, refusals in OpenAI's envelope, and nothing disturbed by them."""

import json

import pytest
from starlette.testclient import TestClient

from app.config import load_settings
from app.controller.links import EngineLost
from app.controller.routes import create_app
from app.modes import NGRAM_SPECULATION
from app.wire import EngineState, EngineStatus, Reply

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
SERVED = "smollm2-135m-instruct"


@pytest.fixture
def client(service, meter):
    return TestClient(create_app(service, meter), raise_server_exceptions=False)


def error_of(answer):
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert answer.json().keys() == {"error"}
    return error


def test_an_answer_names_mode_and_engine(client, engines):
    engines["int8"].answer = Reply(200, b'{"ok": 1}')
    answer = client.post(CHAT, json={**HELLO, "model": f" {SERVED}:int8 "})
    assert answer.json() == {"ok": 1}
    assert answer.headers["x-modeswitch-mode"] == answer.headers["x-modeswitch-engine"] == "int8"
    assert int(answer.headers["x-modeswitch-prompt-tokens"]) > 0


def test_the_body_passes_on_untouched_but_for_model_id_and_salt(client, engines):
    body = {**HELLO, "model": SERVED, "tools": [{"type": "function"}], "n": 2, "seed": 1, "anything": {"x": [1]}}
    client.post(CHAT, json={**body, "model": f"{SERVED}:fp16", "priority": -5}, headers={"x-request-id": "mine-1"})
    (call,) = engines["fp16"].calls
    salt = call.body.pop("cache_salt")
    assert salt
    assert call.body == {**body, "model": SERVED, "request_id": "mine-1"}


@pytest.mark.parametrize(("mode", "salted"), [("fp16", True), ("prefix_caching", False), ("gptq", True)])
def test_only_modes_without_reuse_get_a_salt_of_their_own(client, engines, service, mode, salted):
    for _ in range(2):
        client.post(CHAT, json={**HELLO, "model": f"{SERVED}:{mode}"})
    salts = [call.body.get("cache_salt") for call in engines[service.table.modes[mode].link.name].calls]
    assert len({*salts} - {None}) == (2 if salted else 0)


@pytest.mark.parametrize("model", [None, "auto", SERVED, f"{SERVED}:auto"])
def test_without_a_mode_the_policy_chooses_a_lossless_one(client, model):
    body = HELLO if model is None else {**HELLO, "model": model}
    headers = client.post(CHAT, json=body).headers
    assert headers["x-modeswitch-mode"] in ("fp16", "prefix_caching", "speculative")
    assert headers["x-modeswitch-policy"] == "rules"
    assert "stands in for cost" in headers["x-modeswitch-reason"]


def test_an_engine_that_is_not_ready_is_not_chosen(client, service):
    for link in service.links:
        if link.name != "speculative":
            link.status = None
    assert client.post(CHAT, json=HELLO).headers["x-modeswitch-mode"] == "speculative"


@pytest.mark.parametrize("lost", ["fp16", "speculative"])
def test_an_engine_lost_before_the_first_token_is_replaced_by_another(client, engines, records, lost):
    engines[lost].answer = EngineLost("it died")
    policy = {"x-modeswitch-policy": f"static:{lost}"}
    assert client.post(CHAT, json=HELLO, headers=policy).headers["x-modeswitch-engine"] not in (lost, "int8", "gptq")
    (record,) = records.records
    assert (record.status, record.outcome["lost_engines"]) == ("ok", [lost])


def test_a_named_mode_is_not_replaced(client, engines):
    engines["int8"].answer = RuntimeError("it died")
    answer = client.post(CHAT, json={**HELLO, "model": f"{SERVED}:int8"})
    assert (answer.status_code, error_of(answer)["code"]) == (503, "engine_lost")
    assert answer.headers["retry-after"]


def test_a_mode_that_is_not_ready_says_what_it_waits_for(client, service):
    service.links[1].status = EngineStatus("int8", EngineState.FAILED, 1, reason="ValueError: too little memory")
    answer = client.post(CHAT, json={**HELLO, "model": f"{SERVED}:int8"})
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert "ValueError: too little memory" in error_of(answer)["message"]


def nested(place):
    """A body that parses, with something in it that recursion would fail on."""
    body = json.dumps({**HELLO, **place}).encode()
    return dict(content=body.replace(b'"deeply"', b"[" * 600 + b"]" * 600))


BAD = {
    "not JSON": (dict(content=b"{"), 400, "invalid_json"),
    "deep JSON": (dict(content=b"[" * 5000), 400, "invalid_json"),
    "deep content": (nested({"messages": [{"role": "user", "content": "deeply"}]}), 400, "nested_too_deeply"),
    "deep metadata": (nested({"metadata": {"a": "deeply"}}), 400, "nested_too_deeply"),
    "deep tools": (nested({"tools": [{"function": "deeply"}]}), 400, "nested_too_deeply"),
    "not UTF-8": (dict(content=b'{"model": "\xff"}'), 400, "invalid_json"),
    "NaN": (dict(content=b'{"temperature": NaN, ' + json.dumps(HELLO).encode()[1:]), 400, "invalid_json"),
    "-Infinity": (dict(content=b'{"seed": [-Infinity], ' + json.dumps(HELLO).encode()[1:]), 400, "invalid_json"),
    "half a character": (dict(content=json.dumps({"model": "\ud83d", **HELLO})), 400, "invalid_json"),
    "half in bytes": (dict(content=b'{"model": "\xed\xa0\xbd", "messages": []}'), 400, "invalid_json"),
    "no object": (dict(json=[1]), 400, None),
    "no messages": (dict(json={"model": "auto"}), 400, None),
    "messages of a wrong type": (dict(json={"messages": "hi"}), 400, None),
    "message of a wrong type": (dict(json={"messages": ["hi"]}), 400, None),
    "model of a wrong type": (dict(json={**HELLO, "model": 7}), 400, None),
    "stream of a wrong type": (dict(json={**HELLO, "stream": "yes"}), 400, None),
    "unknown model": (dict(json={**HELLO, "model": "gpt-4"}), 404, "model_not_found"),
    "unknown mode": (dict(json={**HELLO, "model": f"{SERVED}:fast"}), 404, "model_not_found"),
    "mode not served": (dict(json={**HELLO, "model": f"{SERVED}:awq"}), 404, "model_not_found"),
    "over-long prompt": (
        dict(json={"messages": [{"role": "user", "content": "a " * 200}]}),
        400,
        "context_length_exceeded",
    ),
    "too large a body": (dict(content=b" " * 20_000), 413, "request_too_large"),
    "unknown include": (dict(json=HELLO, headers={"x-modeswitch-include": "mood"}), 400, None),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_the_envelope_and_disturbs_nothing(client, engines, name):
    request, status, code = BAD[name]
    answer = client.post(CHAT, **request)
    error = error_of(answer)
    assert (answer.status_code, error["type"], error["code"]) == (status, "invalid_request_error", code)
    assert not any(engine.calls for engine in engines.values())
    assert client.post(CHAT, json=HELLO).status_code == 200


def test_a_body_without_length_is_cut_at_its_limit(client):
    def endless():
        for _ in range(100):
            yield b" " * 1000

    assert client.post(CHAT, content=endless()).status_code == 413


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v2/nothing", 404, "not_found"),
        ("GET", "/v1/models/none", 404, "model_not_found"),
    ],
)
def test_wrong_paths_and_methods(client, method, path, status, code):
    answer = client.request(method, path)
    assert (answer.status_code, error_of(answer)["code"]) == (status, code)


def test_an_unknown_mode_is_told_what_exists(client):
    message = error_of(client.post(CHAT, json={**HELLO, "model": f"{SERVED}:fast"}))["message"]
    assert "gptq_prefix_caching" in message


def test_a_fault_of_ours_is_told_without_internals(client, service, monkeypatch):
    monkeypatch.setattr(service.table, "named", lambda model: 1 / 0)
    answer = client.post(CHAT, json=HELLO)
    assert answer.status_code == 500
    assert "division" not in error_of(answer)["message"]


def test_models_can_be_listed_and_asked_for(client):
    ids = [entry["id"] for entry in client.get("/v1/models").json()["data"]]
    assert ids[:3] == [SERVED, "auto", f"{SERVED}:fp16"]
    for name in ids:
        assert client.get(f"/v1/models/{name}").json()["id"] == name


def test_modes_show_engine_state_and_memory(client, service):
    service.links[1].status = EngineStatus("int8", EngineState.STARTING, 1)
    overview = client.get("/v1/modes").json()
    assert {mode["id"]: mode["engine"] for mode in overview["data"]}["int8_continuous_batching"] == "int8"
    assert {mode["id"]: mode["state"] for mode in overview["data"]}["int8"] == "starting"
    assert {mode["id"]: mode["residency"] for mode in overview["data"]}["int8"] == "starting"
    assert overview["engines"][0]["resident_bytes"] == 5
    assert overview["engines"][0]["residency"] == "resident"
    assert "awq" in {mode["id"] for mode in overview["not_served"]}


@pytest.mark.parametrize(
    "settings",
    [load_settings({"preset": "cpu", "modes": ["fp16", "speculative", "speculative_draft"], "model": {"draft": "d"}})],
)
def test_a_mode_shows_its_exact_difference(client, settings):
    shown = {mode["id"]: mode["engine_delta"] for mode in client.get("/v1/modes").json()["data"]}
    assert shown == {
        "fp16": {},
        "speculative": NGRAM_SPECULATION,
        "speculative_draft": {"speculative_config": {"model": "d", "num_speculative_tokens": 5}},
    }


def test_an_engine_out_of_reach_is_not_resident(client, service, engines):
    service.links[1].status = None
    engines["int8"].status_error = ConnectionError("gone")
    overview = client.get("/v1/modes").json()
    assert {mode["id"]: mode["residency"] for mode in overview["data"]}["int8"] == "failed"
    assert {engine["name"]: engine["residency"] for engine in overview["engines"]}["int8"] == "failed"


def test_an_engine_that_reports_no_more_is_said_to_be_stale(client, service):
    service.links[1].heard_s -= 100.0
    shown = {engine["name"]: engine for engine in client.get("/v1/modes").json()["engines"]}
    assert shown["int8"]["report_is_stale"]
    assert shown["int8"]["reported_s_ago"] >= 100.0
    assert not shown["fp16"]["report_is_stale"]


def test_ready_as_soon_as_one_engine_is(client, service):
    assert client.get("/health").status_code == 200
    assert client.get("/health/ready").status_code == 200
    for link in service.links:
        link.status = None
    assert client.get("/health").status_code == 200
    assert client.get("/health/ready").status_code == 503


def test_prefix_caches_are_reset_on_every_ready_engine(client, service):
    service.links[2].status = None
    assert json.loads(client.post("/admin/reset_prefix_cache").text) == {
        "reset": {"fp16": True, "int8": True, "speculative": True}
    }


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a " * 100}]}, "messages"),
        ("/v1/completions", {"prompt": "a " * 100}, "prompt"),
        ("/v1/completions", {"prompt": ["b", "a " * 100]}, "prompt"),
    ],
)
def test_a_prompt_beyond_the_context_is_refused_by_its_name(client, path, body, param):
    answer = client.post(path, json=body)
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert client.post(path, json={**body, "truncate_prompt_tokens": 50}).status_code == 200
    assert client.post(path, json={**body, "truncate_prompt_tokens": -1}).status_code == 200


def test_prompts_that_fit_one_by_one_are_served_together(client):
    answer = client.post("/v1/completions", json={"prompt": ["a " * 60] * 4})
    assert answer.status_code == 200
    assert answer.headers["x-modeswitch-prompt-tokens"] == "240"


def test_escaped_characters_of_two_halves_are_fine(client, engines):
    client.post(
        CHAT,
        content=b'{"model": "smollm2-135m-instruct:int8", "messages": [{"role": "user", "content": "\\uD83d\\ude00"}]}',
    )
    assert engines["int8"].calls[0].body["messages"][0]["content"] == "\U0001f600"


def test_completions_need_a_prompt(client):
    assert client.post("/v1/completions", json={"model": "auto"}).status_code == 400
    assert client.post("/v1/completions", json={"prompt": "hello"}).status_code == 200
