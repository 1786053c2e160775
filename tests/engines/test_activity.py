"""Tokens of every call, counted from played results of vLLM's steps."""

import asyncio
from types import SimpleNamespace

import pytest

from app.energy.activity import ActivityRecorder
from app.engines import activity_cost
from app.engines.activity import Activity
from app.wire import Call, Endpoint


class PlayedProcessor:
    """Stands where vLLM's `OutputProcessor` stands."""

    def __init__(self):
        self.added, self.processed = [], 0

    def add_request(self, request, prompt, parent=None, index=0, queue=None):
        self.added.append(request.request_id)

    def process_outputs(self, outputs, timestamp=None, stats=None):
        self.processed += len(outputs)
        return "processed"


def request(request_id, prompt_tokens=10):
    return SimpleNamespace(request_id=request_id, prompt_token_ids=[1] * prompt_tokens)


def output(request_id, tokens=1, cached=None, finished=False, scheduled_s=None):
    event = SimpleNamespace(type=SimpleNamespace(name="SCHEDULED"), timestamp=scheduled_s)
    return SimpleNamespace(
        request_id=request_id,
        new_token_ids=[0] * tokens,
        finish_reason="stop" if finished else None,
        prefill_stats=None if cached is None else SimpleNamespace(num_cached_tokens=cached),
        events=[event] if scheduled_s is not None else None,
    )


@pytest.fixture
def recorder():
    return ActivityRecorder("fp16")


@pytest.fixture
def firsts():
    return []


@pytest.fixture
def activity(recorder, firsts):
    return Activity(recorder, firsts.append)


@pytest.fixture
def processor(activity):
    processor = PlayedProcessor()
    activity.watch(processor)
    return processor


def call(key="k"):
    return Call(key, "id", Endpoint.CHAT, "fp16", {}, tenant="red", request_class="batched")


def work(recorder):
    batch = recorder.take()
    return {item.request_id: (item.prefill_tokens, item.decode_tokens) for piece in batch.slices for item in piece.work}


async def test_a_request_is_counted_from_its_first_to_its_last_step(activity, processor, recorder, firsts):
    activity.begin(call())
    processor.add_request(request("chatcmpl-id-0", 10), "prompt")
    assert processor.process_outputs([output("chatcmpl-id-0", cached=4)]) == "processed"
    processor.process_outputs([output("chatcmpl-id-0", tokens=3)])
    processor.process_outputs([output("chatcmpl-id-0", finished=True)])
    batch = recorder.take()
    assert batch.labels["k"] == ("fp16", "red", "batched")
    usage = activity.end("k")
    assert (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens, usage.accepted_tokens) == (10, 4, 5, 2)
    assert usage.first_token_ms <= usage.last_token_ms
    assert firsts == ["k"]
    assert activity.end("k") is None
    assert recorder.take().ended == ("k",)


async def test_work_is_told_by_call_and_a_cached_prefix_is_none(activity, processor, recorder):
    async def one(key, cached):
        activity.begin(call(key))
        processor.add_request(request(f"chatcmpl-{key}"), "prompt")
        processor.process_outputs([output(f"chatcmpl-{key}", cached=cached)])

    await asyncio.gather(*(asyncio.create_task(one(key, cached)) for key, cached in (("a", 0), ("b", 9))))
    assert work(recorder) == {"a": (10, 1), "b": (1, 1)}


async def test_samples_of_one_prompt_belong_to_one_call(activity, processor, recorder):
    activity.begin(call())
    for number in range(3):
        processor.add_request(request(f"{number}_chatcmpl-id"), "prompt")
    processor.process_outputs([output(f"{number}_chatcmpl-id", cached=0) for number in range(3)])
    assert work(recorder) == {"k": (30, 3)}
    usage = activity.end("k")
    assert (usage.prompt_tokens, usage.output_tokens) == (10, 3)


async def test_what_is_not_ours_is_left_alone(activity, processor, recorder):
    processor.add_request(request("warmup"), "prompt")
    processor.process_outputs([output("warmup")])
    assert processor.added == ["warmup"]
    assert work(recorder) == {}
    assert activity.end("unknown") is None


async def test_results_after_the_end_are_ignored(activity, processor, recorder):
    activity.begin(call())
    processor.add_request(request("r"), "prompt")
    processor.process_outputs([output("r", cached=0)])
    activity.end("k")
    recorder.take()
    processor.process_outputs([output("r")])
    assert work(recorder) == {}


async def test_a_prompt_given_up_alone_keeps_what_it_used(activity, processor, recorder):
    activity.begin(call())
    processor.add_request(request("r", 500), "prompt")
    usage = activity.end("k")
    assert (usage.output_tokens, usage.first_token_ms) == (0, None)
    assert work(recorder) == {"k": (500, 0)}


async def test_finished_is_not_yet_over(activity, processor):
    activity.begin(call())
    processor.add_request(request("r"), "prompt")
    processor.process_outputs([output("r", cached=0, finished=True)])
    assert activity.finish("k") == activity.finish("k") == activity.end("k")


async def test_acceptance_is_per_decode_step(activity, processor):
    assert activity.accepted_per_step is None
    activity.begin(call())
    processor.add_request(request("r"), "prompt")
    processor.process_outputs([output("r", cached=0)])
    for tokens in (1, 3, 3, 1) * 50:
        processor.process_outputs([output("r", tokens=tokens)])
    assert activity.accepted_per_step == pytest.approx(1.0, abs=0.1)


async def test_a_call_given_up_tells_what_it_took_under_way_and_when_it_is_over(activity, processor, monkeypatch):
    monkeypatch.setattr("app.engines.activity._REMEMBER_ENDED", 2)
    assert activity.took("k") is None
    activity.begin(call())
    processor.add_request(request("r"), "prompt")
    processor.process_outputs([output("r", tokens=3, cached=0)])
    assert activity.took("k").output_tokens == 3
    activity.end("k")
    assert activity.took("k").output_tokens == 3
    for key in "ab":
        activity.begin(call(key))
        activity.end(key)
    assert activity.took("k") is None
    assert activity.took("b").output_tokens == 0


def test_the_cost_of_reporting_is_measured(capsys):
    activity_cost.main(["--requests", "4", "--step-ms", "50"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["step", "batch", "activity"]
    assert "with 4 requests" in lines[0]
    assert "every 5 steps" in lines[1]
    assert float(lines[2].split()[1].rstrip("%")) > 0
