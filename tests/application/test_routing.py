"""Decisions, their records and their joules, on real engines."""

import contextlib
import json
import uuid

import pytest
import requests
from typer.testing import CliRunner

from loadgen.__main__ import make_app

pytestmark = pytest.mark.engine
STORY = "Write a very long story about a dog who travels the world."


def ask(application, content="Name a colour.", headers=None, **body):
    body = {"model": "auto", "messages": [{"role": "user", "content": content}], "max_tokens": 8, **body}
    return requests.post(f"{application.url}/v1/chat/completions", json=body, headers=headers, timeout=300)


def recorded(application, name):
    """The ledger's answer for a request, once it is there and its joules are settled."""

    def found():
        answer = requests.get(f"{application.url}/v1/requests/{name}", timeout=60)
        if answer.status_code == 404:
            return None
        body = answer.json()
        return body if body["record"] is not None and body["energy"]["status"] != "partial" else None

    return application.wait_until(found, 30)


def test_a_decision_is_the_same_in_headers_body_and_ledger(application):
    name = uuid.uuid4().hex
    answer = ask(application, headers={"x-request-id": name, "x-modeswitch-include": "mode, decision, usage"})
    headers, extra = answer.headers, answer.json()["modeswitch"]
    assert headers["x-request-id"] == name
    assert headers["x-modeswitch-request-id"].startswith(f"{name}.")
    assert headers["x-modeswitch-mode"] == extra["mode"] == extra["decision"]["mode"]
    assert headers["x-modeswitch-reason"] == extra["decision"]["reason"]
    found = recorded(application, name)
    record = found["record"]
    assert (record["status"], record["mode"], record["engine"]) == ("ok", extra["mode"], extra["decision"]["engine"])
    assert record["features"]["prompt_tokens"] == answer.json()["usage"]["prompt_tokens"]
    assert record["outcome"]["usage"]["output_tokens"] == answer.json()["usage"]["completion_tokens"]
    assert record["outcome"]["usage"] == extra["usage"]
    assert "colour" not in json.dumps(found)


def test_joules_come_with_the_answer_and_are_said_to_be_modelled(application):
    body = ask(application, headers={"x-modeswitch-include": "energy"}).json()
    energy = body["modeswitch"]["energy"]
    assert energy["energy_j"] > 0
    assert energy["method"] in ("modelled", "rapl")
    # What is not settled by then is said to be partial.
    assert energy["status"] in ("partial", "final")
    if energy["status"] == "final":
        assert energy["j_per_output_token"] == pytest.approx(energy["energy_j"] / body["usage"]["completion_tokens"])


def test_a_stream_brings_an_extra_chunk_when_asked(application):
    answer = ask(application, stream=True, headers={"x-modeswitch-include": "decision, energy, timing"})
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    extra = json.loads(events[-2])["modeswitch"]
    assert extra["decision"]["mode"] == answer.headers["x-modeswitch-mode"]
    assert extra["energy"]["energy_j"] > 0
    assert extra["timing"]["queued_ms"] <= extra["timing"]["first_token_ms"] <= extra["timing"]["total_ms"]


def test_an_aborted_request_keeps_the_joules_that_it_used(application):
    name = uuid.uuid4().hex
    with requests.Session() as session, contextlib.suppress(requests.ReadTimeout):
        body = {"model": "auto", "messages": [{"role": "user", "content": STORY}], "max_tokens": 4000, "stream": True}
        answer = session.post(
            f"{application.url}/v1/chat/completions",
            json={**body, "ignore_eos": True},
            headers={"x-request-id": name},
            stream=True,
            timeout=(5, 60),
        )
        lines = answer.iter_lines()
        for _ in range(12):
            next(lines)
        answer.close()
    found = recorded(application, name)
    assert found["record"]["status"] == "aborted"
    assert found["record"]["outcome"]["usage"]["output_tokens"] >= 3
    assert found["energy"]["energy_j"] > 0
    assert found["energy"]["decode_tokens"] >= 3


def test_the_account_adds_up_to_the_meter(application):
    ask(application, max_tokens=32, ignore_eos=True)
    account = requests.get(f"{application.url}/v1/energy", timeout=60).json()
    parts_j = account["idle_j"] + account["credited_j"] + account["residual_j"]
    assert parts_j == pytest.approx(account["measured_j"], rel=1e-6)
    for group in ("mode", "engine", "tenant", "class"):
        assert sum(share["energy_j"] for share in account["by"][group]) == pytest.approx(
            account["credited_j"], rel=1e-6
        )


def test_live_settings_reach_the_controller_and_no_engine(application):
    before = {engine["name"]: (engine["pid"], engine["process_ids"]) for engine in application.overview()["engines"]}
    application.deploy(policy="static:prefix_caching", shadows=["rules"])
    application.wait_until(lambda: application.overview()["routing"]["policy"] == "static:prefix_caching", 60)
    assert ask(application).headers["x-modeswitch-mode"] == "prefix_caching"
    application.deploy(policy="no such policy")
    application.wait_until(lambda: application.overview()["routing"]["settings_error"], 60)
    assert ask(application).headers["x-modeswitch-mode"] == "prefix_caching"
    application.deploy()
    application.wait_until(lambda: application.overview()["routing"]["policy"] == "cost", 60)
    after = {engine["name"]: (engine["pid"], engine["process_ids"]) for engine in application.overview()["engines"]}
    assert after == before


@pytest.mark.parametrize("policy", ["rules", "rules_published", "cost", "static:speculative"])
def test_every_policy_serves(application, policy):
    answer = ask(application, "Rewrite this in capitals: the dog runs.", headers={"x-modeswitch-policy": policy})
    assert answer.status_code == 200
    assert answer.headers["x-modeswitch-engine"] in ("fp16", "int8", "gptq", "speculative")


def test_the_whole_ledger_is_replayed_to_the_same_decisions(application):
    ask(application)
    result = CliRunner().invoke(make_app(), ["replay", "ledger", str(application.ledger), "--verify"])
    assert result.exit_code == 0, result.output
    assert "0 came out otherwise" in result.output
    assert "not verified" not in result.output
