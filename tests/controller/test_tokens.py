"""Chats are rendered as vLLM renders them, or are not counted."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from app.controller.tokens import TokenCounter, Uncountable

TEMPLATE = """{% for message in messages -%}
    <{{ message['role'] }}>{{ message['content'] }}</{{ message['role'] }}>{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}
{%- for document in documents or [] %}[{{ document['text'] }}]{% endfor %}
{%- if style is defined %}({{ style }}){% endif %}
{%- if reasoning_effort is defined %}{{ reasoning_effort }} {{ enable_thinking }}{% endif %}"""
ASK = {"role": "user", "content": "hi"}
BEGUN = {"role": "assistant", "content": "The capital is "}


@pytest.fixture
def counter(tmp_path):
    return make(tmp_path)


def make(folder, template=TEMPLATE, **frontend):
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return TokenCounter(folder, frontend)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({}, "<user>hi</user><assistant>"),
        ({"add_generation_prompt": False}, "<user>hi</user>"),
        ({"chat_template_kwargs": {"style": "short"}}, "<user>hi</user><assistant>(short)"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "<user>hi</user><assistant>"),
        ({"documents": [{"text": "a"}, {"text": "b"}]}, "<user>hi</user><assistant>[a][b]"),
        ({"chat_template_kwargs": {"documents": [{"text": "c"}]}}, "<user>hi</user><assistant>[c]"),
        ({"reasoning_effort": "low"}, "<user>hi</user><assistant>low True"),
        ({"reasoning_effort": "none"}, "<user>hi</user><assistant>none False"),
    ],
)
def test_what_shapes_the_prompt_is_followed(counter, body, text):
    assert counter.render({"messages": [ASK], **body}) == text


def test_the_front_end_s_defaults_are_the_engines(tmp_path):
    counter = make(tmp_path, default_chat_template_kwargs={"style": "long"})
    assert counter.render({"messages": [ASK]}).endswith("(long)")
    assert counter.render({"messages": [ASK], "chat_template_kwargs": {"style": "short"}}).endswith("(short)")
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[0].content }}!")
    for template in (file.read_text(), str(file)):
        assert make(tmp_path, chat_template=template).render({"messages": [ASK]}) == "hi!"


def test_a_message_that_is_continued_has_no_end(counter, tmp_path):
    body = {"messages": [ASK, BEGUN], "continue_final_message": True, "add_generation_prompt": False}
    assert counter.render(body) == "<user>hi</user><assistant>The capital is "
    trims = make(tmp_path, "{% for message in messages %}<{{ message.content | trim }}>{% endfor %}")
    assert trims.render(body) == "<hi><The capital is"
    assert body["messages"][1] == BEGUN


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [ASK, BEGUN], "continue_final_message": True},
        {"messages": [ASK, BEGUN], "chat_template": "{{ messages[0].content }}"},
        {"messages": [{"role": "developer", "content": "Be brief."}, ASK]},
        {"messages": [ASK, {**BEGUN, "reasoning": "hm"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [ASK], "chat_template_kwargs": [1]},
        {"messages": [ASK], "documents": 7},
        {"messages": [ASK], "tools": [{"function": "weather"}]},
        {"messages": [ASK], "tools": ["weather"]},
        {"messages": [ASK], "tools": 7},
        {"messages": [ASK, {"role": "assistant", "tool_calls": [{"function": "weather"}]}]},
        {"messages": [ASK, {"role": "assistant", "tool_calls": 7}]},
        {"messages": [{"role": "user", "content": 7}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 7}]}]},
    ],
)
def test_what_vllm_would_render_otherwise_or_refuse_is_not_counted(counter, body):
    with pytest.raises(Uncountable):
        counter.render(body)


def test_each_of_several_prompts_is_counted(counter):
    assert counter.count({"prompt": ["one two", [1, 2, 3]]}) == [2, 3]
    with pytest.raises(Uncountable):
        counter.count({"prompt": [{"no": "text"}]})
