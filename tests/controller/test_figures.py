"""Figures that the controller tells, as a dashboard reads them."""

import asyncio
from dataclasses import replace

import pytest

from app.controller.errors import ApiError
from app.telemetry import CONTROLLER_METRICS
from app.wire import EngineState, Reply

TO_FP16 = {"x-modeswitch-policy": "static:fp16"}


class Kept:
    """Telemetry that a test can read."""

    def __init__(self):
        self.values = {}

    def count(self, name, *labels, by=1.0):
        self.set(name, self.values.get((name, *labels), 0.0) + by, *labels)

    def set(self, name, value, *labels):
        assert len(labels) == len(CONTROLLER_METRICS[name].labels)
        self.values[(name, *labels)] = value

    def observe(self, name, value, *labels):
        self.set(name, value, *labels)


@pytest.fixture
def kept(service):
    service._telemetry = service._settlement._telemetry = Kept()
    return service._telemetry.values


def test_an_engine_that_is_not_ready_is_told_apart_from_one_that_is(service, kept):
    starting, gone, *ready = service.links
    starting.status = replace(starting.status, state=EngineState.STARTING)
    gone.status = None
    service.tell_gauges()
    told = {link.name: kept["modeswitch_engine_ready", link.name] for link in service.links}
    assert told == {starting.name: 0.0, gone.name: 0.0, **{link.name: 1.0 for link in ready}}


def test_of_an_engine_out_of_reach_no_cache_use_is_made_up(service, kept):
    gone, working, *_ = service.links
    gone.status = None
    working.status = replace(working.status, kv_cache_usage=0.75)
    service.tell_gauges()
    assert ("modeswitch_kv_cache_use", gone.name) not in kept
    assert kept["modeswitch_kv_cache_use", working.name] == 0.75


async def test_tokens_count_whichever_way_a_request_ended(service, engines, incoming, usage, records, kept):
    engines["fp16"].answer = Reply(200, b"{}", usage(output_tokens=40))
    await service.answer(incoming(headers=TO_FP16))
    engines["fp16"].answer, engines["fp16"].took = (lambda call: asyncio.sleep(60)), usage(output_tokens=8)
    with pytest.raises(ApiError, match="deadline"):
        await service.answer(incoming(headers={**TO_FP16, "x-modeswitch-deadline-ms": "20"}))
    await records.wait_for(2)
    assert kept["modeswitch_generated_tokens_total", "fp16"] == 48
