"""Requests that fail, are given up or come too late: who tries again, who is blamed, and what the tenant pays."""

import asyncio
import json
import time
from dataclasses import replace

import pytest

from app.config import TenantLimits, load_live
from app.controller.errors import ApiError
from app.controller.links import EngineLost
from app.controller.overview import modes
from app.controller.plan import Ticket
from app.openai_errors import envelope
from app.routing.breaker import FAILURES_TO_OPEN, FIRST_PAUSE_S, BreakerState
from app.wire import Reply

TO_FP16 = {"x-modeswitch-policy": "static:fp16"}
FAILED = Reply(500, json.dumps(envelope(500, "it broke", "engine_error")).encode())
BURST_TOKENS = 1000


@pytest.fixture
def budget(service):
    """Tokens that the tenant `red` has left."""
    service.tenants.limit({"red": TenantLimits(tokens_per_s=1e-9, burst_tokens=BURST_TOKENS)}, 0.0)
    return lambda: round(service.tenants._budgets["red"].available_tokens(0.0))


@pytest.fixture
def ask(service, incoming):
    """A request of the tenant `red` to fp16."""

    async def send(**options):
        headers = {**TO_FP16, "x-modeswitch-tenant": "red", **options.pop("headers", {})}
        return await service.answer(replace(incoming(headers=headers, **options), named=True))

    return send


@pytest.fixture
async def following(service):
    tasks = [asyncio.create_task(link.follow()) for link in service.links]
    yield service.links[0]
    for task in tasks:
        task.cancel()


def states(service):
    return {service.router.breaker(mode)[0] for mode in service.table.modes}


async def read(answer):
    return "".join([text async for text in answer.frames])


# A request that fails in an engine which is alive ---------------------------------------------------------------


async def test_a_request_that_failed_is_tried_once_more_elsewhere(ask, engines, records):
    engines["fp16"].answer = FAILED
    answer = await ask()
    assert answer.reply.status == 200
    assert answer.headers["x-modeswitch-engine"] != "fp16"
    (record,) = records.records
    assert (record.status, record.outcome["lost_engines"]) == ("ok", ["fp16"])


async def test_a_request_that_fails_everywhere_visits_two_engines_and_blames_none(ask, service, engines, records):
    for engine in engines.values():
        engine.answer = FAILED
    for count in range(1, 2 * FAILURES_TO_OPEN):
        answer = await ask()
        assert (answer.reply.status, json.loads(answer.reply.body)["error"]["code"]) == (500, "engine_error")
        assert sum(len(engine.calls) for engine in engines.values()) == 2 * count
    assert (records.records[-1].status, records.records[-1].outcome["code"]) == ("failed", "engine_error")
    assert records.records[-1].mode is not None
    assert states(service) == {BreakerState.CLOSED}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_mode_where_requests_fail_that_succeed_elsewhere_is_taken_out_and_shown(
    ask, service, engines, streamed, usage, stream
):
    if stream:
        for engine in engines.values():
            engine.answer = streamed(last=True, usage=usage())
    engines["int8"].answer = FAILED
    to_int8 = {"x-modeswitch-policy": "static:int8"}
    for count in range(1, FAILURES_TO_OPEN + 1):
        assert service.router.breaker("int8")[0] is BreakerState.CLOSED
        assert (await ask(headers=to_int8, stream=stream)).headers["x-modeswitch-engine"] == "fp16"
        assert len(engines["int8"].calls) == count
    assert (await ask(headers=to_int8, stream=stream)).headers["x-modeswitch-engine"] == "fp16"
    assert len(engines["int8"].calls) == FAILURES_TO_OPEN
    told = {mode["id"]: (mode["breaker"], mode["retry_in_s"]) for mode in (await modes(service))["data"]}
    breaker, retry_in_s = told.pop("int8")
    assert (breaker, 0 < retry_in_s <= FIRST_PAUSE_S) == ("open", True)
    assert set(told.values()) == {("closed", None)}


@pytest.fixture
def by_rules(ask, service):
    """A request that the rules would not send to fp16 while another mode is left."""
    service.change(load_live(service.router.live, {"routing": {"accepted_modes": ["gptq", "int8"]}}))
    return lambda **options: ask(headers={"x-modeswitch-policy": "rules"}, max_tokens=64, **options)


async def test_a_request_that_failed_twice_is_tried_in_the_reference_mode_at_last(by_rules, service, engines, records):
    for engine in engines.values():
        engine.answer = FAILED
    engines["fp16"].answer = Reply(200, b"{}")
    answer = await by_rules()
    assert (answer.reply.status, answer.headers["x-modeswitch-mode"]) == (200, "fp16")
    (record,) = records.records
    failed = record.outcome["lost_engines"]
    assert (record.status, record.mode, len(set(failed)), "fp16" in failed) == ("ok", "fp16", 2, False)
    for _ in range(FAILURES_TO_OPEN - 1):
        assert (await by_rules()).reply.status == 200
    opened = {mode for mode in service.table.modes if service.router.breaker(mode)[0] is BreakerState.OPEN}
    assert {service.table.modes[mode].link.name for mode in opened} == set(failed)


@pytest.mark.parametrize("reference", [FAILED, EngineLost("it died"), None])
async def test_a_request_that_fails_in_the_reference_mode_too_is_not_tried_again(
    by_rules, service, engines, records, reference
):
    for engine in engines.values():
        engine.answer = FAILED
    engines["fp16"].answer = reference
    if reference is None:
        service.links[0].status = None
    assert service.links[0].name == "fp16"
    assert (await by_rules()).reply.status == 500
    tried = {name: len(engine.calls) for name, engine in engines.items()}
    assert (tried.pop("fp16"), sum(tried.values())) == (int(reference is not None), 2)
    assert records.records[-1].status == "failed"
    assert states(service) == {BreakerState.CLOSED}


async def test_a_request_that_failed_and_is_refused_elsewhere_blames_none(ask, service, engines):
    for engine in engines.values():
        engine.answer = Reply(400, b"{}")
    engines["fp16"].answer = FAILED
    for _ in range(FAILURES_TO_OPEN):
        assert (await ask()).reply.status == 400
    assert states(service) == {BreakerState.CLOSED}


async def test_a_named_mode_that_failed_answers_with_its_error(service, engines, incoming, records):
    engines["int8"].answer = FAILED
    answer = await service.answer(incoming(model="smollm2-135m-instruct:int8"))
    assert (answer.reply.status, answer.headers["x-modeswitch-mode"]) == (500, "int8")
    assert (records.records[-1].status, records.records[-1].mode) == ("failed", "int8")


async def test_a_request_that_failed_and_then_meets_a_lost_engine_ends_with_its_own_error(ask, engines):
    for engine in engines.values():
        engine.answer = EngineLost("it died")
    engines["fp16"].answer = FAILED
    assert (await ask()).reply.status == 500


@pytest.mark.parametrize(("code", "opens"), [("engine_lost", True), ("engine_error", False)])
async def test_a_stream_that_breaks_midway_is_recorded_as_failed_and_blames_a_lost_engine_only(
    ask, service, following, engines, records, streamed, frames, usage, code, opens
):
    engines["fp16"].answer = streamed()
    for count in range(1, FAILURES_TO_OPEN + 1):
        answer = await ask(stream=True)
        engines["fp16"].say(frames(engines["fp16"].calls[-1], "data: error\n\n", True, usage(3), code))
        assert (await read(answer)).endswith("data: error\n\n")
        record = await records.wait_for(count)
        assert (record.status, record.outcome["code"]) == ("failed", code)
        assert record.outcome["usage"]["output_tokens"] == 3
    assert (service.router.breaker("fp16")[0] is BreakerState.OPEN) == opens


async def test_a_channel_that_breaks_midway_fails_its_streams(ask, service, following, engines, records, streamed):
    engines["fp16"].answer = streamed()
    answers = [await ask(stream=True) for _ in range(FAILURES_TO_OPEN)]
    engines["fp16"].break_channel()
    for answer in answers:
        assert "engine_lost" in await read(answer)
    assert {(record.status, record.outcome["code"]) for record in records.records} == {("failed", "engine_lost")}
    assert service.router.breaker("fp16")[0] is BreakerState.OPEN


# Half-open breakers ---------------------------------------------------------------------------------------------


@pytest.fixture
def half_open(service):
    """The mode fp16 is taken out, and its pause is over."""
    for _ in range(FAILURES_TO_OPEN):
        service.router._breakers["fp16"].failed(time.monotonic() - FIRST_PAUSE_S)
    assert service.router.breaker("fp16")[0] is BreakerState.HALF_OPEN


async def test_a_mode_that_was_taken_out_says_when_it_is_tried_again(service, incoming):
    now_s = time.monotonic()
    # Opened, and three probes that failed: it pauses for 10, 20, 40 and now for 80 s.
    for ago_s in (*[70] * FAILURES_TO_OPEN, 60, 40, 0):
        service.router._breakers["int8"].failed(now_s - ago_s)
    with pytest.raises(ApiError) as refused:
        await service.answer(incoming(model="smollm2-135m-instruct:int8"))
    assert (refused.value.status, refused.value.code) == (503, "circuit_breaker_open")
    assert 70 < int(refused.value.headers["retry-after"]) <= 80


def takes(service):
    return "fp16" not in service.router.snapshot(time.monotonic()).tripped_modes


@pytest.mark.parametrize("reply", [Reply(400, b"{}"), FAILED])
async def test_a_probe_that_says_nothing_of_the_mode_lets_the_next_one_probe(half_open, ask, service, engines, reply):
    for engine in engines.values():
        engine.answer = reply
    await ask()
    assert len(engines["fp16"].calls) == 1
    assert takes(service)
    engines["fp16"].answer = Reply(200, b"{}")
    await ask()
    assert service.router.breaker("fp16")[0] is BreakerState.CLOSED


async def test_a_probe_that_fails_and_succeeds_elsewhere_takes_the_mode_out_for_longer(
    half_open, ask, service, engines
):
    engines["fp16"].answer = FAILED
    assert (await ask()).reply.status == 200
    state, retry_in_s = service.router.breaker("fp16")
    assert state is BreakerState.OPEN
    assert retry_in_s == pytest.approx(2 * FIRST_PAUSE_S, abs=1.0)


async def test_a_probe_that_is_given_up_lets_the_next_one_probe(half_open, ask, service, engines, records):
    engines["fp16"].answer = lambda call: asyncio.sleep(60)
    asking = asyncio.create_task(ask())
    await asyncio.sleep(0.01)
    assert not takes(service)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (await records.wait_for()).status == "aborted"
    assert takes(service)


async def test_a_probe_past_its_deadline_lets_the_next_one_probe(half_open, ask, service, engines, records):
    engines["fp16"].answer = lambda call: asyncio.sleep(60)
    with pytest.raises(ApiError, match="deadline"):
        await ask(headers={"x-modeswitch-deadline-ms": "20"})
    assert (await records.wait_for()).status == "deadline"
    assert takes(service)


# What is paid ---------------------------------------------------------------------------------------------------


async def test_a_stream_given_up_pays_for_what_was_produced(ask, following, engines, records, streamed, usage, budget):
    engines["fp16"].answer, engines["fp16"].took = streamed(), usage(40)
    answer = await ask(stream=True)
    await anext(answer.frames)
    await answer.frames.aclose()
    record = await records.wait_for()
    assert (record.status, record.outcome["usage"]["output_tokens"]) == ("aborted", 40)
    assert budget() == BURST_TOKENS - usage(40).prompt_tokens - 40


async def test_a_client_that_leaves_just_before_the_end_pays_for_all(
    ask, following, engines, records, streamed, frames, usage, budget
):
    engines["fp16"].answer = streamed()
    answer = await ask(stream=True)
    await anext(answer.frames)
    engines["fp16"].say(frames(engines["fp16"].calls[-1], "data: [DONE]\n\n", True, usage(70)))
    await anext(answer.frames)
    await answer.frames.aclose()
    assert (await records.wait_for()).status == "ok"
    assert budget() == BURST_TOKENS - usage(70).prompt_tokens - 70
    assert engines["fp16"].aborted == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_past_its_deadline_pays_for_what_was_produced(ask, engines, records, usage, budget, stream):
    engines["fp16"].answer, engines["fp16"].took = (lambda call: asyncio.sleep(60)), usage(8)
    with pytest.raises(ApiError, match="deadline"):
        await ask(stream=stream, headers={"x-modeswitch-deadline-ms": "20"})
    assert (await records.wait_for()).outcome["usage"]["output_tokens"] == 8
    assert budget() == BURST_TOKENS - usage(8).prompt_tokens - 8


@pytest.mark.parametrize("took", [None, ConnectionError("gone")])
async def test_an_engine_that_cannot_tell_what_was_produced_costs_the_prompt(ask, engines, records, budget, took):
    engines["fp16"].answer, engines["fp16"].took = (lambda call: asyncio.sleep(60)), took
    with pytest.raises(ApiError, match="deadline"):
        await ask(content="one two three", headers={"x-modeswitch-deadline-ms": "20"})
    record = await records.wait_for()
    assert budget() == BURST_TOKENS - record.features["prompt_tokens"]


async def test_what_never_reached_an_engine_costs_nothing(ask, service, records, budget):
    for link in service.links:
        link.status = None
    with pytest.raises(ApiError) as refused:
        await ask()
    assert refused.value.status == 503
    assert budget() == BURST_TOKENS
    assert service.tenants._shares.counters()["red"] == 0


async def test_what_every_engine_lost_costs_nothing(ask, engines, budget):
    for engine in engines.values():
        engine.answer = EngineLost("it died")
    with pytest.raises(ApiError, match="lost"):
        await ask()
    assert budget() == BURST_TOKENS


async def test_a_fault_of_ours_gives_back_what_was_reserved(ask, service, budget, monkeypatch):
    monkeypatch.setattr(service.router, "decide", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        await ask()
    assert budget() == BURST_TOKENS


# Deadlines ------------------------------------------------------------------------------------------------------


async def test_a_deadline_runs_from_the_arrival(ask, service, engines, records, monkeypatch):
    async def slowly(endpoint, body):
        await asyncio.sleep(60)

    monkeypatch.setattr(service._prompts, "read", slowly)
    with pytest.raises(ApiError) as refused:
        await ask(headers={"x-modeswitch-deadline-ms": "20"})
    assert (refused.value.status, refused.value.code) == (504, "deadline_exceeded")
    assert not any(engine.calls for engine in engines.values())
    assert records.records[-1].status == "deadline"


async def test_what_passed_before_the_prompt_is_read_counts(service, incoming):
    asked = type("Asked", (), {"deadline_s": 5.0})
    ticket = Ticket("key", incoming(), "red", time.monotonic() - 4.0)
    assert service._deadline_s(ticket, asked) - asyncio.get_running_loop().time() == pytest.approx(1.0, abs=0.1)
