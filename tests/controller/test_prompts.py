"""Prompts are read once: text, tokens, chain, and the name of the conversation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.controller.prompts import PromptReader
from app.controller.tokens import Uncountable
from app.wire import Endpoint

SYSTEM = {"role": "system", "content": "Be brief."}


class Words:
    def count(self, endpoint, body):
        return len(body["prompt"].split())

    def render(self, body):
        if any(not isinstance(message.get("content"), str) for message in body["messages"]):
            raise Uncountable("not text")
        return " ".join(message["content"] for message in body["messages"])

    def count_text(self, text, body):
        return len(text.split())


@pytest.fixture
def reader():
    return PromptReader(Words(), exact_below_chars=1000)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


async def chat(reader, *messages, **body):
    return await reader.read(Endpoint.CHAT, {"messages": list(messages), **body})


async def test_a_chat_is_counted_as_the_model_reads_it(reader):
    prompt = await chat(reader, SYSTEM, user("one two three"))
    assert (prompt.tokens, prompt.exact, prompt.instruction) == (5, True, "one two three")
    assert not prompt.continues


async def test_a_long_prompt_is_estimated_and_the_estimate_learns(reader):
    text = "word " * 1000
    prompt = await chat(reader, user(text))
    assert not prompt.exact
    first_error = abs(prompt.tokens - 1000)
    for _ in range(20):
        reader.counted(prompt, 1000)
    assert abs((await chat(reader, user(text))).tokens - 1000) < first_error


async def test_what_cannot_be_rendered_is_estimated(reader):
    prompt = await chat(reader, {"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": "see"}]})
    assert not prompt.exact
    assert prompt.tokens >= 1


async def test_without_a_tokenizer_everything_is_estimated():
    prompt = await chat(PromptReader(None, 1000), user("one two three"))
    assert (prompt.exact, prompt.tokens > 0) == (False, True)


async def test_a_conversation_keeps_its_name_over_its_turns(reader):
    first = await chat(reader, SYSTEM, user("hi"))
    later = await chat(reader, SYSTEM, user("hi"), assistant("hello"), user("and then?"))
    other = await chat(reader, SYSTEM, user("ho"), assistant("hello"), user("and then?"))
    assert first.conversation == later.conversation != other.conversation
    assert (first.continues, later.continues) == (False, True)


@pytest.mark.parametrize(
    ("prompt", "tokens", "exact"), [("a b c", 3, True), ([1, 2, 3, 4], 4, True), (["a b", "c"], None, False)]
)
async def test_completions_of_every_kind(prompt, tokens, exact):
    class Counts(Words):
        def count(self, endpoint, body):
            if isinstance(body["prompt"], list):
                raise Uncountable("several")
            return super().count(endpoint, body)

    read = await PromptReader(Counts(), 1000).read(Endpoint.COMPLETION, {"prompt": prompt})
    assert read.exact is exact
    assert tokens is None or read.tokens == tokens


async def test_prompts_with_different_salts_share_nothing(reader):
    text = "the same beginning of everything " * 20
    one, other = [await chat(reader, user(text), cache_salt=salt) for salt in ("a", "b")]
    assert not set(one.chain.hashes) & set(other.chain.hashes)


@given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(
    st.sampled_from(["content", "text", "type"]), inner)))  # fmt: skip
def test_any_content_is_read_without_a_fault(content):
    import asyncio

    prompt = asyncio.run(chat(PromptReader(None, 100), {"role": "user", "content": content}))
    assert prompt.tokens >= 1
