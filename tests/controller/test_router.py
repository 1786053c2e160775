"""Deciding, learning from what came of it, failing over, and replaying every recorded decision."""

import asyncio
import json
from dataclasses import replace

import msgspec
import pytest
from starlette.testclient import TestClient

from app.config import TenantLimits, load_live
from app.controller.errors import ApiError
from app.controller.knowledge import Knowledge
from app.controller.links import EngineLost
from app.controller.plan import Ticket
from app.controller.policies import PolicySet
from app.controller.prompts import Prompt
from app.controller.routes import create_app
from app.routing.breaker import FAILURES_TO_OPEN
from app.routing.classes import RequestClass
from app.routing.decision import Decision, Ineligible, Refusal
from app.routing.features import RequestFeatures, Wishes
from app.routing.mode_info import ModeInfo
from app.routing.prefix_index import text_chain
from app.routing.profile import parse_profile
from app.routing.settings import RoutingSettings
from app.routing.snapshot import Snapshot
from app.wire import EngineState, EngineStatus, Reply
from tests.routing.conftest import profile_content

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def knowledge():
    return Knowledge("tiny", "box", parse_profile(profile_content(), model="tiny", hardware="box"))


@pytest.fixture
def client(service, meter):
    return TestClient(create_app(service, meter), raise_server_exceptions=False)


@pytest.fixture
def chat(client):
    def send(content="hello", status=200, headers=None, **body):
        messages = [{"role": "user", "content": content}]
        answer = client.post(CHAT, json={"messages": messages, **body}, headers=headers)
        assert answer.status_code == status, answer.text
        return answer

    return send


def status_of(name, **changes):
    return EngineStatus(name, EngineState.READY, pid=1, **changes)


def test_the_cost_policy_says_why(chat):
    headers = chat(max_tokens=64).headers
    assert headers["x-modeswitch-policy"] == "cost"
    assert headers["x-modeswitch-mode"].startswith("gptq")
    assert headers["x-modeswitch-profile"] == "p1"
    assert float(headers["x-modeswitch-predicted-ms"]) > 0
    assert "lost by" in headers["x-modeswitch-reason"]


@pytest.mark.parametrize(
    ("headers", "modes"),
    [
        ({"x-modeswitch-quality": "exact"}, {"fp16", "prefix_caching", "speculative"}),
        ({"x-modeswitch-objective": "energy"}, {"int8", "int8_continuous_batching"}),
        ({"x-modeswitch-policy": "static:int8"}, {"int8"}),
        ({"x-modeswitch-workload": "rewriting", "x-modeswitch-quality": "exact"}, {"speculative"}),
    ],
)
def test_a_request_may_say_what_it_wants(chat, headers, modes):
    assert chat(max_tokens=64, headers=headers).headers["x-modeswitch-mode"] in modes


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"x-modeswitch-policy": "fastest"}, "unknown_policy"),
        ({"x-modeswitch-policy": "static:awq"}, "unknown_policy"),
        ({"x-modeswitch-policy": "learned"}, "unknown_policy"),
        ({"x-modeswitch-objective": "speed"}, "invalid_objective"),
        ({"x-modeswitch-deadline-ms": "-3"}, "invalid_header"),
    ],
)
def test_what_makes_no_sense_is_refused_and_serving_goes_on(chat, engines, headers, code):
    assert chat(status=400, headers=headers).json()["error"]["code"] == code
    assert not any(engine.calls for engine in engines.values())
    chat()


def test_a_tag_of_ten_kilobytes_is_ignored(chat):
    chat(headers={"x-modeswitch-workload": "x" * 10_000})


def test_named_modes_with_quality_exact_are_refused_where_they_are_lossy(chat):
    answer = chat(status=400, model="smollm2-135m-instruct:int8", headers={"x-modeswitch-quality": "exact"})
    assert answer.json()["error"]["code"] == "quality_exact_needs_lossless"


def test_a_conversation_keeps_its_weights(client, service, engines):
    turns = [{"role": "user", "content": "begin"}]
    first = client.post(
        CHAT, json={"messages": turns, "max_tokens": 64}, headers={"x-modeswitch-policy": "static:int8"}
    )
    assert first.headers["x-modeswitch-engine"] == "int8"
    turns += [{"role": "assistant", "content": "well"}, {"role": "user", "content": "go on"}]
    body = {"messages": turns, "max_tokens": 64}
    assert client.post(CHAT, json=body).headers["x-modeswitch-engine"] == "int8"
    service.links[1].status = None
    assert client.post(CHAT, json=body).headers["x-modeswitch-engine"] == "gptq"


def test_conversations_that_begin_alike_keep_their_own_weights(client):
    def turn(turns, policy=None):
        headers = {"x-modeswitch-policy": policy} if policy else {}
        body = {"messages": turns, "max_tokens": 64}
        return client.post(CHAT, json=body, headers=headers).headers["x-modeswitch-engine"]

    def further(turns, answer):
        return [*turns, {"role": "assistant", "content": answer}, {"role": "user", "content": "go on"}]

    begin = [{"role": "user", "content": "hello"}]
    one, other = further(begin, "well"), further(begin, "yes?")
    assert turn(begin, "static:int8") == turn(one) == "int8"
    assert turn(begin, "static:fp16") == turn(other) == "fp16"
    assert turn(further(one, "so")) == "int8"
    assert turn(further(other, "so")) == "fp16"
    # Without what was in between it is only known how it began.
    assert turn([*begin, *further([], "so")]) == "fp16"


def test_a_shared_prefix_is_expected_where_it_was_sent_until_the_engine_forgets(chat, service, engines):
    service.links[0].status = status_of("fp16", kv_capacity_tokens=10_000)
    prompt = "the same long beginning of it all " * 12
    reuse = {"x-modeswitch-policy": "static:prefix_caching"}
    chat(prompt, headers=reuse)
    include = {"x-modeswitch-include": "decision", **reuse}
    chat(prompt, headers=include)
    features = engines["fp16"].calls[-1].decision["features"]
    assert features["cached_tokens"]["fp16"] > 0.5 * features["prompt_tokens"]
    service.links[0].epoch += 1
    chat(prompt, headers=include)
    assert "fp16" not in engines["fp16"].calls[-1].decision["features"]["cached_tokens"]


def test_expected_output_is_what_such_requests_produced_and_not_their_limit(chat, engines, usage):
    for engine in engines.values():
        engine.answer = Reply(200, b"{}", usage(output_tokens=12))
    for _ in range(5):
        chat(max_tokens=500)
    chat(max_tokens=500, headers={"x-modeswitch-include": "decision"})
    (call,) = [call for engine in engines.values() for call in engine.calls if call.decision]
    assert call.decision["features"]["expected_output_tokens"] == 12
    assert call.decision["features"]["output_source"] == "predicted"


def test_choices_are_decoded_together_and_budgeted_one_by_one(chat, service, engines, usage):
    alone, together = (float(chat(max_tokens=64, n=n).headers["x-modeswitch-predicted-ms"]) for n in (1, 8))
    assert alone < together < 2 * alone
    for engine in engines.values():
        engine.answer = Reply(200, b"{}", usage(output_tokens=8 * 40))
    for _ in range(5):
        chat(max_tokens=500, n=8)
    chat(max_tokens=500, n=8, headers={"x-modeswitch-include": "decision"})
    (call,) = [call for engine in engines.values() for call in engine.calls if call.decision]
    features = call.decision["features"]
    assert (features["expected_output_tokens"], features["sequences"]) == (40, 8)


async def test_the_tokens_of_all_choices_are_reserved(service, incoming):
    service.change(load_live(service.router.live, {"tenants": {"default": {"tokens_per_s": 1, "burst_tokens": 100}}}))
    await service.answer(incoming(max_tokens=20, n=4))
    with pytest.raises(ApiError) as refused:
        await service.answer(incoming(max_tokens=40, n=4))
    assert refused.value.code == "token_budget_exhausted"


def test_counts_beyond_all_sense_are_left_to_the_engine(chat):
    chat(max_tokens=10**400, n=10**400)


def test_a_slower_mode_than_predicted_is_corrected_within_bounds(chat, service, engines, usage):
    engines["gptq"].answer = Reply(200, b"{}", usage(output_tokens=64, queued_ms=0.0, last_token_ms=60_000.0))
    modes = [chat(max_tokens=64).headers["x-modeswitch-mode"] for _ in range(12)]
    assert modes[0].startswith("gptq")
    assert not modes[-1].startswith("gptq")
    factors = service.router.describe()["corrections"]
    assert 1.0 < factors["gptq"] <= 2.5


@pytest.mark.parametrize(
    "options",
    [
        {"model": "smollm2-135m-instruct:gptq"},
        {"headers": {"x-modeswitch-policy": "rules"}, "content": "long " * 80},
        {"headers": {"x-modeswitch-policy": "static:gptq"}},
    ],
)
def test_whoever_chose_a_mode_its_prediction_is_corrected(chat, service, engines, records, usage, monkeypatch, options):
    ratios = []
    monkeypatch.setattr(service._telemetry, "observe", lambda name, value, *labels: ratios.append((name, value)))
    for engine in engines.values():
        engine.answer = Reply(200, b"{}", usage(output_tokens=16, queued_ms=0.0, last_token_ms=9_000.0))
    chat(max_tokens=16, **options)
    (record,) = records.records
    assert "terms" not in record.decision["decision"] or record.decision["decision"]["terms"] is None
    assert service.router.describe()["corrections"][record.engine] > 1.0
    (ratio,) = [value for name, value in ratios if name == "modeswitch_predicted_ratio"]
    assert ratio > 2.0


def test_speculation_is_learned_from_what_was_accepted(chat, service, engines, usage):
    engines["speculative"].answer = Reply(200, b"{}", usage(output_tokens=90, accepted_tokens=60))
    chat(headers={"x-modeswitch-policy": "static:speculative", "x-modeswitch-workload": "code"})
    assert service.router.describe()["accepted_per_step"] == {"speculative:code": 2.0}


def test_a_full_queue_sends_to_the_next_best_and_then_refuses_with_the_time_to_wait(chat, service):
    service.change(load_live(service.router.live, {"queue_limit": 1}))
    seen = []
    for number in range(len(service.links)):
        engine = chat(max_tokens=64).headers["x-modeswitch-engine"]
        seen.append(engine)
        link = next(link for link in service.links if link.name == engine)
        link.in_flight.send(f"filler {number}", 10, 10)
    assert len(set(seen)) == len(service.links)
    answer = chat(status=503)
    assert answer.json()["error"]["code"] == "queue_full"
    assert int(answer.headers["retry-after"]) >= 1
    chat(status=503, model="smollm2-135m-instruct:int8")


def test_a_request_that_was_lost_comes_again_when_the_other_queues_have_drained(chat, service, engines):
    service.change(load_live(service.router.live, {"queue_limit": 1}))
    for link in service.links[1:]:
        link.in_flight.send("filler", 10, 1000)
    engines["fp16"].answer = EngineLost("it died")
    answer = chat(status=503)
    assert answer.json()["error"]["code"] == "engine_lost"
    # 1000 tokens at the 50 ms a step that are assumed of an engine which has not told its own.
    assert answer.headers["retry-after"] == "50"


def test_a_mode_that_fails_repeatedly_is_taken_out_and_shown(chat, client, service, engines):
    engines["gptq"].answer = EngineLost("it died")
    for _ in range(2 * FAILURES_TO_OPEN):
        chat(max_tokens=64)
    chat(max_tokens=64)
    before = len(engines["gptq"].calls)
    chat(max_tokens=64)
    assert len(engines["gptq"].calls) == before
    shown = {mode["id"]: mode["breaker"] for mode in client.get("/v1/modes").json()["data"]}
    assert "open" in (shown["gptq"], shown["gptq_prefix_caching"])
    assert shown["fp16"] == "closed"


def test_when_every_engine_is_lost_the_client_is_told(chat, engines, records):
    for engine in engines.values():
        engine.answer = EngineLost("it died")
    answer = chat(status=503)
    assert answer.json()["error"]["code"] == "engine_lost"
    assert {engine for engine in engines if engines[engine].calls} == set(engines)
    assert records.records[-1].status == "failed"


async def test_a_deadline_before_the_first_token_is_an_error_and_aborts(service, engines, records, incoming):
    for engine in engines.values():
        engine.answer = lambda call: asyncio.sleep(60)
    with pytest.raises(ApiError) as refused:
        await service.answer(incoming(headers={"x-modeswitch-deadline-ms": "30"}))
    assert (refused.value.status, refused.value.code) == (504, "deadline_exceeded")
    assert sum(len(engine.aborted) for engine in engines.values()) == 1
    assert (await records.wait_for()).status == "deadline"


async def test_a_deadline_after_the_first_token_ends_the_stream_in_an_error_frame(
    service, engines, records, incoming, streamed
):
    for engine in engines.values():
        engine.answer = streamed()
    answer = await service.answer(incoming(stream=True, headers={"x-modeswitch-deadline-ms": "50"}))
    text = "".join([frame async for frame in answer.frames])
    assert "deadline_exceeded" in text
    assert text.endswith("data: [DONE]\n\n")
    assert (await records.wait_for()).status == "deadline"
    assert sum(len(engine.aborted) for engine in engines.values()) == 1


def test_live_settings_change_what_decides_and_bad_ones_change_nothing(chat, client, service):
    service.change(load_live(service.router.live, {"policy": "static:int8"}))
    assert chat().headers["x-modeswitch-mode"] == "int8"
    service.change(load_live(service.router.live, {"policy": "learned"}))
    routing = client.get("/v1/modes").json()["routing"]
    assert routing["policy"] == "static:int8"
    assert "trained model" in routing["settings_error"]
    service.change(load_live(service.router.live, {"tenants": {"red": {"tokens_per_s": 1, "burst_tokens": 1}}}))
    routing = client.get("/v1/modes").json()["routing"]
    assert routing["settings_error"] is None
    assert RoutingSettings.model_validate(routing["settings"]) == service.router.live.routing
    assert service.router.live.tenants == {"red": TenantLimits(tokens_per_s=1, burst_tokens=1)}


def test_shadows_are_recorded_and_not_followed(chat, service, records):
    service.change(load_live(service.router.live, {"policy": "static:fp16", "shadows": ["cost", "rules"]}))
    assert chat(max_tokens=64).headers["x-modeswitch-mode"] == "fp16"
    shadows = records.records[-1].decision["shadows"]
    assert [shadow["policy"] for shadow in shadows] == ["cost", "rules"]
    assert shadows[0]["mode"].startswith("gptq")


def test_the_log_says_what_decided_and_why(chat, service, caplog):
    caplog.set_level("INFO", logger="ray.serve")
    headers = chat("a word of mine", max_tokens=64).headers
    (line,) = [record.getMessage() for record in caplog.records]
    for part in ("request-id", "policy", "profile", "engine", "reason"):
        assert headers[f"x-modeswitch-{part}"] in line
    assert "word" not in line
    for link in service.links:
        link.status = None
    caplog.clear()
    chat(status=503)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "policy cost" in line
    assert "engine unhealthy" in line


def test_a_refusal_that_names_dozens_of_modes_is_recorded_all_the_same(service, incoming):
    by_mode = {f"a_mode_of_the_operators_own_{number}": Ineligible.NOT_RESIDENT for number in range(40)}
    why = Refusal(
        code=Ineligible.NOT_RESIDENT,
        request_class=RequestClass.STANDARD,
        policy="cost",
        settings_version="v",
        by_mode=by_mode,
    )
    prompt = Prompt("", "", (1,), 1, True, text_chain(""), None)
    plan = service.router.decide(prompt, wishes=Wishes())
    ticket = Ticket("key", incoming(), "red", 0.0, plan=replace(plan, outcome=why))
    assert len(why.reason) > 500
    row = ticket.record("refused", None, "engine_not_resident").columns()
    assert json.loads(row["decision"])["decision"]["by_mode"] == by_mode


def decide_again(record):
    """The decision of a record from nothing but its row and its context, as a replay makes it."""
    row = record.columns()
    decision = json.loads(row["decision"])
    context = json.loads(record.context.content)
    modes = [ModeInfo(**mode) for mode in context["modes"]]
    profile = context["profile"] and parse_profile(
        context["profile"], model=context["model"], hardware=context["hardware"]
    )
    live = load_live_of(context["settings"])
    policies = PolicySet(live, modes, Knowledge(context["model"], context["hardware"], profile))
    features = RequestFeatures.from_json(row["features"])
    snapshot = Snapshot.from_json(row["snapshot"])
    name = decision["policy"]
    policy = policies.named(name.removeprefix("static:")) if decision["named"] else policies.policy(name)
    kind = Decision if "mode" in decision["decision"] else Refusal
    return policy.decide(features, snapshot), msgspec.convert(decision["decision"], kind)


def load_live_of(routing):
    from app.config import LiveSettings

    return LiveSettings(routing=RoutingSettings(**routing))


def test_the_operators_objective_decides_where_the_request_names_none(chat, client, service, records):
    service.change(load_live(service.router.live, {"routing": {"objective": "energy"}}))
    assert client.get("/v1/modes").json()["routing"]["settings"]["objective"] == "energy"
    assert chat(max_tokens=64).headers["x-modeswitch-engine"] == "int8"
    assert chat(max_tokens=64, headers={"x-modeswitch-objective": "latency"}).headers["x-modeswitch-engine"] == "gptq"
    service.change(load_live(service.router.live, {"routing": {"objective": "latency"}}))
    assert chat(max_tokens=64).headers["x-modeswitch-engine"] == "gptq"
    asked = [json.loads(record.columns()["features"])["wishes"].get("objective") for record in records.records]
    assert asked[0] == "energy"
    assert "energy" not in asked[1:]
    for record in records.records:
        again, logged = decide_again(record)
        assert again == logged


def test_every_record_of_a_run_is_replayed_to_the_same_decision(chat, service, engines, records, usage):
    for engine in engines.values():
        engine.answer = Reply(200, b"{}", usage(output_tokens=20, accepted_tokens=5))
    service.links[0].status = status_of("fp16", kv_capacity_tokens=10_000, kv_cache_usage=0.9, step_ms=20.0)
    policies = ["cost", "rules", "rules_published", "static:gptq", "static:speculative"]
    for number in range(60):
        headers = {
            "x-modeswitch-policy": policies[number % 5],
            "x-modeswitch-workload": ["code", "rewriting"][number % 2],
        }
        if number % 7 == 0:
            headers |= {"x-modeswitch-quality": "exact"}
        chat(f"{number} " + "word " * (number % 40), headers=headers, max_tokens=8 * (1 + number % 20))
        if number == 20:
            engines["gptq"].answer = EngineLost("it died")
        if number == 40:
            service.change(load_live(service.router.live, {"routing": {"batch_high": 9, "exploration_rate": 0.5}}))
    chat(model="smollm2-135m-instruct:int8")
    assert len(records.records) == 61
    assert len({record.context.name for record in records.records}) == 2
    for record in records.records:
        again, logged = decide_again(record)
        assert again == logged
