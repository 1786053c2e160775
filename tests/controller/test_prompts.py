"""Prompts are read once: text, tokens, chain, and the name of the conversation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.controller.prompts import PromptReader
from app.controller.tokens import Uncountable, prompts_of
from app.routing.prefix_index import TOKENS_PER_BLOCK, PrefixIndex
from app.wire import Endpoint

SYSTEM = {"role": "system", "content": "Be brief."}


class Words:
    def count(self, body):
        if any(not isinstance(prompt, str) for prompt in prompts_of(body)):
            raise Uncountable("not text")
        return [len(prompt.split()) for prompt in prompts_of(body)]

    def render(self, body):
        if any(not isinstance(message.get("content"), str) for message in body["messages"]):
            raise Uncountable("not text")
        return " ".join(message["content"] for message in body["messages"])

    def count_text(self, text, body):
        return len(text.split())


@pytest.fixture
def reader():
    return PromptReader(Words(), 1000, 8192)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


async def chat(reader, *messages, **body):
    return await reader.read(Endpoint.CHAT, {"messages": list(messages), **body})


async def test_a_chat_is_counted_as_the_model_reads_it(reader):
    prompt = await chat(reader, SYSTEM, user("one two three"))
    assert (prompt.tokens, prompt.exact, prompt.instruction) == (5, True, "one two three")
    assert prompt.said.before is None


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
    prompt = await chat(PromptReader(None, 1000, 8192), user("one two three"))
    assert (prompt.exact, prompt.tokens > 0) == (False, True)


async def test_a_conversation_keeps_its_name_over_its_turns(reader):
    turns = [SYSTEM, user("hi")]
    first = (await chat(reader, *turns)).said
    turns += [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, {"role": "tool", "content": "5"}]
    second = (await chat(reader, *turns)).said
    third = (await chat(reader, *turns, assistant("hello"), user("and then?"))).said
    other = (await chat(reader, SYSTEM, user("ho"), assistant("hello"), user("and then?"))).said
    assert first.began == first.so_far == second.began == second.before == third.began
    assert third.before == second.so_far
    assert (first.before, len({second.so_far, third.so_far, other.so_far, other.before, first.began})) == (None, 5)


@pytest.mark.parametrize(
    ("prompt", "counts", "exact"),
    [
        ("a b c", (3,), True),
        ([1, 2, 3, 4], (4,), True),
        ([[1, 2, 3], [4]], (3, 1), True),
        (["a b", "c"], (2, 1), True),
        ([], (0,), False),
    ],
)
async def test_completions_of_every_kind(reader, prompt, counts, exact):
    read = await reader.read(Endpoint.COMPLETION, {"prompt": prompt})
    assert (read.counts, read.exact, read.tokens) == (counts, exact, max(1, sum(counts)))


@pytest.mark.parametrize("others", [[], [[7, 8]]])
async def test_lists_of_token_ids_share_what_they_begin_with_and_no_more(reader, others):
    async def chain(*prompts):
        return (await reader.read(Endpoint.COMPLETION, {"prompt": [*prompts, *others]})).chain

    one, other = list(range(5 * TOKENS_PER_BLOCK)), list(range(1000, 1000 + 5 * TOKENS_PER_BLOCK))
    alike = one[: 2 * TOKENS_PER_BLOCK] + other
    assert len((await chain(one)).hashes) == 5
    assert not set((await chain(one)).hashes) & set((await chain(other)).hashes)
    assert (await chain(one)).hashes[:2] == (await chain(alike)).hashes[:2]
    assert len(set((await chain(one)).hashes) & set((await chain(alike)).hashes)) == 2
    # A list of one is that one, for the engine's cache as well.
    assert (await reader.read(Endpoint.COMPLETION, {"prompt": one})).chain.hashes == (await chain(one)).hashes


async def test_several_lists_of_token_ids_are_expected_cached_in_the_share_that_came_before(reader):
    first, second, third = [[start + n for n in range(4 * TOKENS_PER_BLOCK)] for start in (0, 1000, 2000)]
    before = await reader.read(Endpoint.COMPLETION, {"prompt": [first, second]})
    after = await reader.read(Endpoint.COMPLETION, {"prompt": [first, third]})
    index = PrefixIndex()
    index.record(before.chain, before.tokens, None)
    assert index.seen_tokens(after.chain, after.tokens) == len(first)


@pytest.mark.parametrize("prompt", [[[1] * 300, "text"], [[1] * 300, []], [1] * 300 + [{}]])
async def test_what_is_no_list_of_token_ids_throughout_is_estimated(prompt):
    read = await PromptReader(None, 1000, 8192).read(Endpoint.COMPLETION, {"prompt": prompt})
    assert not read.exact


async def test_every_choice_of_every_prompt_is_a_sequence(reader):
    assert (await chat(reader, user("hi"), n=3)).sequences == 3
    assert (await reader.read(Endpoint.COMPLETION, {"prompt": ["a b", "c"], "n": 4})).sequences == 8


async def test_several_prompts_that_cannot_be_counted_are_estimated_one_by_one(reader):
    read = await reader.read(Endpoint.COMPLETION, {"prompt": ["word " * 8, {"no": "text"}, "word " * 40]})
    assert not read.exact
    assert read.counts[0] < read.counts[2] <= read.tokens
    assert len(read.counts) == 3


@pytest.mark.parametrize(
    ("kept", "counts", "exact"),
    [(2, (2, 1), True), (50, (3, 1), True), (0, (0, 0), True), (-1, (3, 1), False), ("2", (3, 1), True)],
)
async def test_what_the_engine_cuts_off_does_not_count(reader, kept, counts, exact):
    body = {"prompt": ["a b c", "d"], "truncate_prompt_tokens": kept}
    read = await reader.read(Endpoint.COMPLETION, body)
    assert (read.counts, read.exact) == (counts, exact)


async def test_a_prompt_that_was_cut_teaches_nothing_of_characters_per_token(reader):
    before = await chat(reader, user("word " * 1000))
    cut = await chat(reader, user("word " * 1000), truncate_prompt_tokens=-1)
    reader.counted(cut, 7)
    assert (await chat(reader, user("word " * 1000))).tokens == before.tokens


async def test_prompts_with_different_salts_share_nothing(reader):
    text = "the same beginning of everything " * 20
    one, other = [await chat(reader, user(text), cache_salt=salt) for salt in ("a", "b")]
    assert not set(one.chain.hashes) & set(other.chain.hashes)


@given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(
    st.sampled_from(["content", "text", "type"]), inner)))  # fmt: skip
def test_any_content_is_read_without_a_fault(content):
    import asyncio

    prompt = asyncio.run(chat(PromptReader(None, 100, 8192), {"role": "user", "content": content}))
    assert prompt.tokens >= 1
