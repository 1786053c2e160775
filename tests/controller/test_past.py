"""What a router learns again from the ledger of the one before it."""

import json

import pytest
from starlette.testclient import TestClient

from app.controller.knowledge import Knowledge
from app.controller.past import PastRequest, read_past
from app.controller.routes import create_app
from app.energy.ledger import Ledger
from app.energy.queries import PastRow, past_rows
from app.routing.classes import Shape
from app.routing.profile import parse_profile
from app.routing.tags import Tag
from app.wire import Reply
from tests.routing.conftest import profile_content

FEATURES = {"tag": "code", "prompt_shape": "short", "max_tokens": 500, "sequences": 2, "draw": 0.5}
USAGE = {"output_tokens": 30, "accepted_tokens": 20, "queued_ms": None}
BEGIN = [{"role": "user", "content": "begin"}]


def row(mode="fp16", status="ok", recorded_s=100.0, features=FEATURES, decision=None, usage=USAGE):
    parts = features, decision or {"conversation": ["began", "so far"]}, {"usage": usage}
    return PastRow(recorded_s, mode, status, *(json.dumps(part).encode() for part in parts))


def further(turns, answer="well"):
    return [*turns, {"role": "assistant", "content": answer}, {"role": "user", "content": "go on"}]


@pytest.fixture
def knowledge():
    return Knowledge("tiny", "box", parse_profile(profile_content(), model="tiny", hardware="box"))


@pytest.fixture
def client(meter):
    return lambda service: TestClient(create_app(service, meter), raise_server_exceptions=False)


@pytest.fixture
def ask(client):
    """Sends a chat; returns the answer's headers."""

    def send(service, messages=BEGIN, policy=None, **body):
        headers = {"x-modeswitch-workload": "code", **({"x-modeswitch-policy": policy} if policy else {})}
        answer = client(service).post(
            "/v1/chat/completions", json={"messages": messages, "max_tokens": 64, **body}, headers=headers
        )
        assert answer.status_code == 200, answer.text
        return answer.headers

    return send


@pytest.fixture
def engine_again(ask):
    """The engine that serves a conversation's next turn when the client leaves it open."""
    return lambda service, messages: ask(service, messages)["x-modeswitch-engine"]


@pytest.fixture
def remember(tmp_path, records, knowledge):
    """Writes all records to a ledger, and has a service learn from it what it holds."""

    def learn(service):
        ledger = Ledger(tmp_path / "ledger.sqlite")
        ledger.record(records.records)
        rows = past_rows(ledger.connection, knowledge.model, 100)
        past, damaged = read_past(rows, records.records[-1].recorded_s)
        assert damaged == 0
        ledger.close()
        return service.router.remember(past, 1000.0)

    return learn


def test_conversations_keep_their_weights_over_a_restart(new_service, ask, engine_again, remember):
    """Those with one turn, too, and of those that began alike each its own."""
    old, new, ignorant = new_service(), new_service(), new_service()
    ask(old, policy="static:int8")
    ask(old, further(BEGIN, "well"))
    ask(old, policy="static:fp16")
    alone = [{"role": "user", "content": "another"}]
    ask(old, alone, policy="static:int8")
    assert remember(new) == 4
    open_choice = engine_again(ignorant, further(alone))
    assert open_choice not in ("int8", "fp16")
    assert engine_again(new, further(BEGIN, "yes?")) == "fp16"
    assert engine_again(new, further(further(BEGIN, "well"))) == "int8"
    assert engine_again(new, further(alone)) == "int8"
    assert engine_again(new, further([{"role": "user", "content": "never said"}])) == open_choice


def test_what_a_conversation_did_since_counts_more(new_service, ask, engine_again, records, remember):
    old, new = new_service(), new_service()
    ask(old, policy="static:int8")
    ask(new, policy="static:fp16")
    # As the ledger had it before the new one served anything.
    records.records.pop()
    remember(new)
    assert engine_again(new, further(BEGIN)) == "fp16"


def test_lengths_and_acceptance_are_known_again(new_service, ask, engines, usage, records, remember):
    old, new = new_service(), new_service()
    for engine in engines.values():
        engine.answer = Reply(200, b"{}", usage(output_tokens=2 * 45, accepted_tokens=60))
    for number in range(4):
        ask(old, [{"role": "user", "content": f"number {number}"}], "static:speculative", max_tokens=500, n=2)
    assert new.router.describe()["accepted_per_step"] == {}
    remember(new)
    ask(new, max_tokens=500)
    assert records.records[-1].features["expected_output_tokens"] == 45
    assert records.records[-1].features["output_source"] == "predicted"
    assert new.router.describe()["accepted_per_step"] == {"speculative:code": 2.0}


def test_old_lengths_fade_as_if_they_had_been_seen(service):
    old = [coding(36_000.0, 400) for _ in range(50)]
    new = [coding(60.0, 40) for _ in range(20)]
    service.router.remember([*old, *new], 100_000.0)
    assert service.router._lengths.predict(Tag.CODE, Shape.SHORT, 500).tokens < 100


def coding(age_s, tokens):
    return PastRequest(age_s, "fp16", Tag.CODE, Shape.SHORT, 500, 1, tokens, 0, ())


def test_modes_that_are_not_deployed_do_not_count(service):
    past, damaged = read_past([row(mode="awq"), row(mode="int8")], 100.0)
    assert (service.router.remember(past, 0.0), damaged) == (1, 0)
    assert service.router._conversations.weights("so far") == "int8"
    past, _ = read_past([row(mode="awq", decision={"conversation": ["x", "y"]})], 100.0)
    assert service.router.remember(past, 0.0) == 0
    assert service.router._conversations.weights("x") is None


def test_rows_are_read_as_they_were_written():
    (past,), _ = read_past([row()], 160.0)
    assert past == (60.0, "fp16", Tag.CODE, Shape.SHORT, 500, 2, 30, 20, ("began", "so far"))
    # A row from the future is new; one that was not answered to its end tells no length; older ones no conversation.
    (past,), _ = read_past([row(status="aborted", decision={"policy": "cost"})], 50.0)
    assert (past.age_s, past.output_tokens, past.conversation) == (0.0, None, ())
    (past,), _ = read_past([row(usage=None)], 160.0)
    assert past.output_tokens is None


@pytest.mark.parametrize(
    "damaged",
    [
        row()._replace(features=b""),
        row()._replace(features=b'{"tag": "co'),
        row()._replace(decision=b"\xff{"),
        row()._replace(outcome=b"[]"),
        row(features={}),
        row(features={**FEATURES, "tag": "poetry"}),
        row(features={**FEATURES, "sequences": 0}),
        row(features={**FEATURES, "max_tokens": 10**400}),
        row(decision={"conversation": "one"}),
        row(usage={"output_tokens": 10**400, "accepted_tokens": 0}),
        row(usage={"output_tokens": -3, "accepted_tokens": 0}),
        row(usage={"output_tokens": "many", "accepted_tokens": 0}),
    ],
)
def test_damaged_rows_are_counted_and_the_others_read(damaged):
    past, count = read_past([row(mode="int8"), damaged, row()], 100.0)
    assert ([request.mode for request in past], count) == (["int8", "fp16"], 1)
