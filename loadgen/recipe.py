"""Trace recipes: which kinds of requests come, how long they are and how often, written down in a file.

A recipe, a rate and a seed make one trace: equal arrivals and equal lengths, however often it is sent. Only the salt at
the beginning of each prompt differs from sending to sending, so that no cache remembers an earlier one.
"""

import random
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from loadgen.arrivals import Poisson
from loadgen.passages import passage, rewriting_prompt, story_prompt
from loadgen.prompts import Messages, PromptMaker
from loadgen.workloads import Item

PACKAGED = ("cpu",)
_TOKENS_PER_SENTENCE = 26
_SALT_WORDS = 4

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Kind = Literal["story", "summary", "shared_prefix", "choice", "rewriting"]


class RecipeRefused(Exception):
    """No such recipe, or a malformed one; the message says which and why."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RequestKind(_Part):
    """One kind of request. `prompt_tokens` is about right: prompts are made of whole sentences."""

    kind: Kind
    prompt_tokens: Count
    output_tokens: Count
    weight: Count = 1
    about: str = ""


class Recipe(_Part):
    """A mixture of kinds and the two rates it is sent at. Kinds come exactly in proportion to their weights."""

    name: str
    about: str = ""
    light_per_s: Rate
    saturating_per_s: Rate
    light_requests: Count
    saturating_requests: Count
    conversations: Count = 2
    """Among which the requests that share a prefix are divided."""
    classes: Annotated[dict[str, RequestKind], Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class Slot:
    """One request of a trace, not yet in words."""

    index: int
    due_s: float
    name: str
    """The class in the recipe."""
    conversation: int | None = None


def load_recipe(name: str) -> Recipe:
    """A packaged recipe by name, or one from a file. Raises RecipeRefused."""
    try:
        if name in PACKAGED:
            content = resources.files("loadgen.recipes").joinpath(f"{name}.json").read_text()
        else:
            content = Path(name).read_text()
        return Recipe.model_validate_json(content)
    except OSError as error:
        packaged = ", ".join(PACKAGED)
        raise RecipeRefused(f"no recipe {name!r} ({error.strerror or error}); packaged are: {packaged}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise RecipeRefused(f"the recipe {name} is malformed at {place}: {first['msg']}") from error


def trace_of(recipe: Recipe, rate_per_s: float, count: int, seed: int) -> list[Slot]:
    """`count` requests with Poisson arrivals; the kinds in a random order that repeats for the seed."""
    rng = random.Random(f"recipe/{recipe.name}/{seed}")
    deck = [name for name, kind in recipe.classes.items() for _ in range(kind.weight)]
    names: list[str] = []
    while len(names) < count:
        rng.shuffle(deck)
        names += deck
    slots, shared = [], 0
    for index, due_s in enumerate(Poisson(rate_per_s).offsets_s(count, seed)):
        conversation = None
        if recipe.classes[names[index]].kind == "shared_prefix":
            conversation, shared = shared % recipe.conversations, shared + 1
        slots.append(Slot(index, due_s, names[index], conversation))
    return slots


def items_of(recipe: Recipe, slots: list[Slot], maker: PromptMaker, seed: int, salt: str) -> list[Item]:
    """The trace in words: equal for equal seeds but for the salt, which is equally long whatever it is."""
    return [_item(recipe, slot, maker, seed, salt) for slot in slots]


def _item(recipe: Recipe, slot: Slot, maker: PromptMaker, seed: int, salt: str) -> Item:
    kind = recipe.classes[slot.name]
    rng = random.Random(f"{recipe.name}/{seed}/{slot.index}/{slot.name}")
    sentences = max(1, kind.prompt_tokens // _TOKENS_PER_SENTENCE)
    salted = _salt(maker, f"{salt}/{slot.index}")
    messages: Messages = []
    match kind.kind:
        case "story":
            prompt = story_prompt(rng)
        case "summary":
            prompt = f"{passage(rng, sentences)}\n\nSummarize this text in one sentence."
        case "rewriting":
            prompt = rewriting_prompt(rng, sentences)
        case "choice":
            options = "".join(
                f"\n{letter}. {word}" for letter, word in zip("ABCD", rng.sample(maker.words, 4), strict=True)
            )
            prompt = f"{passage(rng, sentences)}\n\nWhich word fits this text best?{options}\nAnswer:"
        case "shared_prefix":
            handbook = random.Random(f"{recipe.name}/{seed}/handbook/{slot.conversation}")
            shared = _salt(maker, f"{salt}/handbook/{slot.conversation}")
            system = f"{shared}\nYou answer questions about this text:\n{passage(handbook, sentences)}"
            messages = [{"role": "system", "content": system}]
            prompt = f"What does the text say about this? {passage(rng, 1)}"
    messages.append({"role": "user", "content": f"{salted}\n{prompt}"})
    return Item(slot.name, messages, maker.tokenizer.count_chat(messages), kind.output_tokens)


def _salt(maker: PromptMaker, text: str) -> str:
    return "Notes on" + maker.filler(random.Random(f"salt/{text}"), _SALT_WORDS) + "."
