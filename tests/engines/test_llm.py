"""Between vLLM's OpenAI classes and this project: faults as vLLM's server tells them, and what is added when asked."""

import json
from types import SimpleNamespace

import jinja2
import pytest

from app.config import load_settings
from app.wire import Call, Endpoint

pytest.importorskip("vllm")

from vllm import exceptions
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
from vllm.entrypoints.serve.engine.protocol import UsageInfo
from vllm.v1.engine.exceptions import EngineDeadError

from app.engines.llm import LLM, Counters, check_frontend

ASK = {"messages": [{"role": "user", "content": "hi"}]}


def llm_that(answer, dead=False):
    """An engine whose OpenAI classes answer so; an exception is raised."""

    class Serving:
        async def create_chat_completion(self, request):
            if isinstance(answer, Exception):
                raise answer
            return answer

        create_completion = create_chat_completion

    llm = LLM(SimpleNamespace(errored=dead), None, {}, Counters())
    llm._state.openai_serving_chat = llm._state.openai_serving_completion = Serving()
    return llm


def call(endpoint=Endpoint.CHAT, **body):
    return Call("key", "id", endpoint, "fp16", {**(ASK if endpoint is Endpoint.CHAT else {"prompt": "hi"}), **body})


def error_of(reply):
    error = json.loads(reply.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("fault", "status", "param"),
    [
        (exceptions.VLLMValidationError("no", parameter="n"), 400, "n"),
        (exceptions.VLLMNotFoundError("none"), 404, None),
        (exceptions.VLLMUnprocessableEntityError("no image", parameter="messages"), 422, "messages"),
        (exceptions.QueueOverflowError(), 503, None),
        (exceptions.RetryableRequestError(), 503, None),
        (NotImplementedError("not here"), 501, None),
        (jinja2.TemplateError("roles must alternate"), 400, None),
        (ValueError("no"), 400, None),
        (OverflowError(), 400, None),
    ],
)
async def test_what_vllm_raises_has_the_status_that_its_server_gives(fault, status, param):
    reply = await llm_that(fault).respond(call())
    error = error_of(reply)
    assert (reply.status, error["param"]) == (status, param)
    assert error["message"]


async def test_a_fault_without_an_answer_is_passed_on_and_a_dead_engine_is_told():
    with pytest.raises(RuntimeError, match="broken"):
        await llm_that(RuntimeError("broken")).respond(call())
    for fault in (RuntimeError("broken"), ValueError("broken")):
        with pytest.raises(EngineDeadError):
            await llm_that(fault, dead=True).respond(call())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": "many"}, "n"),
        ({"stop": [[1]]}, "stop"),
        ({"temperature": "hot"}, "temperature"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
    ],
)
@pytest.mark.parametrize("endpoint", list(Endpoint))
async def test_what_vllms_classes_refuse_is_named_by_its_field(endpoint, body, param):
    reply = await llm_that(None).respond(call(endpoint, **body))
    assert reply.status == 400
    assert error_of(reply)["param"].split(".")[0] == param


async def extra():
    return {"mode": "fp16"}


async def test_a_whole_answer_has_what_is_added_only_when_asked():
    answer = ChatCompletionResponse(model="m", choices=[], usage=UsageInfo())
    plain = await llm_that(answer).respond(call())
    assert "modeswitch" not in json.loads(plain.body)
    more = json.loads((await llm_that(answer).respond(call(), extra)).body)
    assert more.pop("modeswitch") == {"mode": "fp16"}
    assert more == json.loads(plain.body)


async def test_a_stream_has_one_chunk_more_before_its_end_when_asked():
    async def frames():
        for frame in ("data: 1\n\n", "data: [DONE]\n\n"):
            yield frame

    plain = [frame async for frame in await llm_that(frames()).respond(call(stream=True))]
    assert plain == ["data: 1\n\n", "data: [DONE]\n\n"]
    first, added, done = [frame async for frame in await llm_that(frames()).respond(call(stream=True), extra)]
    assert [first, done] == plain
    chunk = json.loads(added.removeprefix("data: "))
    assert (chunk["id"], chunk["choices"], chunk["modeswitch"]) == ("chatcmpl-id", [], {"mode": "fp16"})


@pytest.mark.parametrize("preset", ["cpu", "a100-40gb"])
def test_the_presets_front_ends_take_effect(preset):
    check_frontend(load_settings({"preset": preset}).model.frontend)


@pytest.mark.parametrize("name", ["tool_cal_parser", "api_key", "port", "sse_keep_alive_interval"])
def test_a_front_end_setting_that_would_be_ignored_is_refused(name):
    with pytest.raises(ValueError, match=name):
        check_frontend({name: "x", "tool_call_parser": "hermes"})
