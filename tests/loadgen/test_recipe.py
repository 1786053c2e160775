import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.routing.tags import Tag, tag_of
from loadgen.prompts import ChatTokenizer, PromptMaker
from loadgen.recipe import RecipeRefused, items_of, load_recipe, trace_of

CPU = load_recipe("cpu")


@given(st.integers(1, 60), st.floats(0.01, 100), st.integers(0, 1000))
@settings(deadline=None)
def test_a_trace_repeats_and_keeps_its_proportions(count: int, rate: float, seed: int) -> None:
    slots = trace_of(CPU, rate, count, seed)
    assert slots == trace_of(CPU, rate, count, seed)
    assert [slot.index for slot in slots] == list(range(count))
    assert all(left.due_s <= right.due_s for left, right in pairwise(slots))
    often = Counter(slot.name for slot in slots)
    assert max(often.values()) - min(often.get(name, 0) for name in CPU.classes) <= 1
    assert [slot.name for slot in slots] == [slot.name for slot in trace_of(CPU, 2 * rate, count, seed)]


@pytest.fixture(scope="session")
def maker(model_folder: Path) -> PromptMaker:
    return PromptMaker(ChatTokenizer.load(model_folder))


def test_another_salt_changes_every_prompt_and_no_length(maker: PromptMaker) -> None:
    slots = trace_of(CPU, 1.0, 24, 3)
    first, second = (items_of(CPU, slots, maker, 3, salt) for salt in ("cost", "rules"))
    for one, other in zip(first, second, strict=True):
        assert one.prompt_tokens == other.prompt_tokens
        assert one.messages[0]["content"][:40] != other.messages[0]["content"][:40]
        assert one.messages[-1]["content"].split("\n", 1)[1] == other.messages[-1]["content"].split("\n", 1)[1]
    assert first == items_of(CPU, slots, maker, 3, "cost")


def test_conversations_share_their_beginning_and_kinds_are_recognised(maker: PromptMaker) -> None:
    items = items_of(CPU, trace_of(CPU, 1.0, 48, 0), maker, 0, "x")
    systems = {item.messages[0]["content"] for item in items if item.workload == "shared_prefix"}
    assert len(systems) == CPU.conversations
    tags = {item.workload: tag_of(item.messages[-1]["content"]).tag for item in items}
    assert tags["rewriting"] is Tag.REWRITING
    assert tags["multiple_choice"] is Tag.MULTIPLE_CHOICE
    assert tags["free_text"] is tags["short"] is tags["long"] is Tag.NONE


def test_bad_recipes_are_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeRefused, match="packaged are: cpu"):
        load_recipe("gpu")
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(CPU.model_dump() | {"light_per_s": 0}))
    with pytest.raises(RecipeRefused, match="light_per_s"):
        load_recipe(str(path))
