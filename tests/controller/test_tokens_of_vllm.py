"""A chat is rendered to the very text that vLLM's own classes make of the same request."""

import json
from itertools import product
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from app.controller.tokens import TokenCounter

pytest.importorskip("vllm")

from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers.chat_utils import parse_chat_messages
from vllm.renderers.hf import resolve_chat_template_content_format, safe_apply_chat_template

# As published models do it: tools as JSON in front, calls by their parts, answers by the name of the call.
TEMPLATE = """
{%- if tools %}{{ '<tools>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '</tools>' }}{% endif %}
{%- for message in messages %}
    {{- '<' + message.role + '>' }}
    {%- if message.name is defined %}{{ message.name + ': ' }}{% endif %}
    {{- message.content }}
    {%- if message.tool_calls is defined %}
        {%- for call in message.tool_calls %}
            {{- '[' + call.id + ' ' + call.function.name + call.function.arguments | tojson + ']' }}
        {%- endfor %}
    {%- endif %}
    {%- if message.tool_call_id is defined %}{{ '(' + message.tool_call_id + ')' }}{% endif %}
    {%- if message.refusal is defined %}{{ 'refused' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""

# As models that also see images do it.
IN_PARTS = """
{%- for message in messages %}
    {{- '<' + message['role'] + '>' }}
    {%- if message['content'] is string %}{{ message['content'] | trim }}{% else %}
        {%- for part in message['content'] %}{{ part['text'] | trim }}{% endfor %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""

ASK = {"role": "user", "content": "hi"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "é", "parameters": PARAMETERS}}


def answered(arguments):
    function = {"name": "weather"} if arguments is None else {"name": "weather", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def write_model(folder, template):
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), TEMPLATE)


def by_vllm(folder, body, template=TEMPLATE, given_format="auto"):
    """The prompt's text, in the steps of `vllm.renderers.online_renderer`."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), chat_template=template)
    config = SimpleNamespace(
        multimodal_config=None,
        hf_config=SimpleNamespace(),
        enable_prompt_embeds=False,
        revision=None,
        code_revision=None,
        trust_remote_code=False,
    )
    request = ChatCompletionRequest.model_validate(body)
    tools = [tool.model_dump() for tool in request.tools] if request.tools is not None else None
    params = request.build_chat_params(template, "auto").with_defaults({"tools": tools, "tokenize": False})
    content_format = resolve_chat_template_content_format(template, tools, given_format, tokenizer, model_config=config)
    conversation, _, _ = parse_chat_messages(request.messages, config, content_format)
    return safe_apply_chat_template(config, tokenizer, conversation, **params.get_apply_chat_template_kwargs())


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"tools": [WEATHER]},
        {"tools": [{"function": {"name": "weather"}}]},
        {"tools": [{"type": "function", "function": {"parameters": PARAMETERS, "name": "weather"}, "more": 1}]},
        {"tools": [{"type": "function", "function": {"name": "weather", "strict": True, "more": {"a": 1}}}]},
        {"tools": [{"type": "function", "function": {"name": "weather"}, "defer_loading": True}]},
        {"tools": [WEATHER], "tool_choice": "none"},
        {"messages": [ASK, answered('{"city": "Paris"}'), {"role": "tool", "tool_call_id": "1", "content": "日本"}]},
        {"messages": [ASK, answered(""), {"role": "tool", "tool_call_id": "1", "content": "sunny"}]},
        {"messages": [ASK, answered("[1]"), {"role": "tool", "tool_call_id": "1", "content": "sunny"}]},
        {"messages": [ASK, {"role": "assistant", "content": "no", "tool_calls": []}, ASK]},
        {"messages": [ASK, {"role": "assistant", "content": "no", "refusal": "never"}, ASK]},
        {"messages": [{**ASK, "name": "Ann"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": text} for text in ("a", "", "b")]}]},
        {"messages": [{"role": "system", "content": "Be brief."}, ASK], "add_generation_prompt": False},
    ],
)  # fmt: skip
def test_a_prompt_is_the_text_that_vllm_makes(folder, body):
    body = {"messages": [ASK], **body}
    assert TokenCounter(folder).render(body) == by_vllm(folder, json.loads(json.dumps(body)))


@pytest.mark.parametrize("given_format", ["auto", "string", "openai"])
@pytest.mark.parametrize(
    ("role", "content"),
    [*product(["user", "assistant", "system", "tool"], ["hi", "", ["a", "", "b"]]), ("assistant", None)],
)
def test_a_template_that_reads_parts_gets_them(tmp_path, given_format, content, role):
    parts = [{"type": "text", "text": text} for text in content] if isinstance(content, list) else content
    body = {"messages": [ASK, {"role": role, "content": parts, **({"tool_call_id": "1"} if role == "tool" else {})}]}
    counter = TokenCounter(write_model(tmp_path, IN_PARTS), {"chat_template_content_format": given_format})
    assert counter.render(body) == by_vllm(tmp_path, json.loads(json.dumps(body)), IN_PARTS, given_format)


def test_tools_may_be_kept_from_the_prompt(folder):
    body = {"messages": [ASK], "tools": [WEATHER], "tool_choice": "none"}
    assert "weather" in TokenCounter(folder).render(body)
    hiding = TokenCounter(folder, {"exclude_tools_when_tool_choice_none": True})
    assert "weather" not in hiding.render(body)
    assert "weather" in hiding.render({**body, "tool_choice": "auto"})
