import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.prompts import ChatTokenizer, Frame, PromptError, PromptMaker
from loadgen.trace import TraceRow
from loadgen.workloads import WORKLOADS, Mixture, body_of, trace_items


@pytest.fixture(scope="session")
def maker(model_folder: Path) -> PromptMaker:
    return PromptMaker(ChatTokenizer.load(model_folder))


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_prompts_are_exact_different_and_repeatable(maker: PromptMaker, name: str) -> None:
    workload = WORKLOADS[name]
    items = [workload.item(maker, 7, index) for index in range(6)]
    for item in items:
        assert maker.tokenizer.count_chat(item.messages) == workload.prompt_tokens
        assert item.output_tokens == workload.output_tokens
    assert len({json.dumps(item.messages) for item in items}) == len(items)
    assert [workload.item(maker, 7, index) for index in range(6)] == items
    assert workload.item(maker, 8, 0) != items[0]


def test_shared_prefixes_are_shared_and_most_of_the_prompt(maker: PromptMaker) -> None:
    items = [WORKLOADS["shared_prefix"].item(maker, 0, index) for index in range(40)]
    systems = {item.messages[0]["content"] for item in items}
    assert len(systems) == 4
    assert all(maker.tokenizer.count(text) > 0.8 * 1024 for text in systems)


def test_conversations_have_later_turns(maker: PromptMaker) -> None:
    assert len(WORKLOADS["multi_turn"].item(maker, 0, 0).follow_ups) == 3
    assert WORKLOADS["ss"].item(maker, 0, 0).follow_ups == ()


@settings(max_examples=50, deadline=None)
@given(tokens=st.integers(20, 3000), seed=st.integers(0, 10**6))
def test_any_size_can_be_made(maker: PromptMaker, tokens: int, seed: int) -> None:
    messages = maker.exact(Frame(head="Say:"), tokens, random.Random(seed))
    assert maker.tokenizer.count_chat(messages) == tokens


def test_a_size_below_the_fixed_parts_is_refused(maker: PromptMaker) -> None:
    with pytest.raises(PromptError, match="too short"):
        maker.exact(Frame(head="one two three four"), 5, random.Random(0))


def test_folders_without_a_tokenizer_or_template(tmp_path: Path, model_folder: Path) -> None:
    with pytest.raises(PromptError, match="no usable tokenizer"):
        ChatTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((model_folder / "tokenizer.json").read_bytes())
    with pytest.raises(PromptError, match="no chat template"):
        ChatTokenizer.load(tmp_path).count_chat([])
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no system message') }}")
    with pytest.raises(PromptError, match="no system message"):
        ChatTokenizer.load(tmp_path).count_chat([])


def test_mixtures_follow_their_weights(maker: PromptMaker) -> None:
    items = Mixture.parse("ss=3, multiple_choice=1").items(maker, 200, seed=1)
    share = sum(item.workload == "ss" for item in items) / 200
    assert 0.65 < share < 0.85
    assert {item.workload for item in Mixture.parse("mixed").items(maker, 60, seed=1)} == set(WORKLOADS)
    assert Mixture.parse("ss").items(maker, 2, 0, first=5) == [WORKLOADS["ss"].item(maker, 0, i) for i in (5, 6)]


@pytest.mark.parametrize("text", ["nonsense", "ss=x", "ss=0", "ss=-1", "", "ss=nan"])
def test_a_wrong_mixture_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"workload|weight"):
        Mixture.parse(text)


def test_a_trace_shares_prefixes_by_hash_id(maker: PromptMaker) -> None:
    rows = [TraceRow(0.0, 1000, 50, (1, 2)), TraceRow(0.1, 900, 2, (1, 3)), TraceRow(0.2, 700, 1, (4, 2))]
    first, second, third = trace_items(rows, maker, seed=0, length_scale=0.5)
    assert [maker.tokenizer.count_chat(item.messages) for item in (first, second, third)] == [500, 450, 350]
    assert [item.output_tokens for item in (first, second, third)] == [25, 1, 1]
    words = [item.messages[0]["content"].split() for item in (first, second, third)]
    assert words[0][:256] == words[1][:256]
    assert words[0][256:400] != words[1][256:400]
    assert words[0][:100] != words[2][:100]


def test_the_body_says_only_what_is_asked(maker: PromptMaker) -> None:
    item = WORKLOADS["ss"].item(maker, 0, 0)
    body = body_of(item, "auto", stream=True, exact_output=False)
    assert (body["model"], body["max_tokens"], body["stream"]) == ("auto", 32, True)
    assert "ignore_eos" not in body
    assert body_of(item, "auto", stream=True, exact_output=True)["ignore_eos"] is True
