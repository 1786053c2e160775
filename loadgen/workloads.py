"""The workloads: what is asked, how long it is, how much is answered. Sizes follow arXiv 2605.23057, section 4.

Every prompt of a workload is different (unless sharing is the point) and repeats for its seed.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadgen.prompts import Frame, Messages, PromptMaker
from loadgen.trace import MOONCAKE_BLOCK_TOKENS, TraceRow

_SHARED_PREFIXES = 4
_SHARED_WORDS = 880


@dataclass(frozen=True, slots=True)
class Item:
    """One conversation: a first prompt, and what the user says after each answer."""

    workload: str
    messages: Messages
    prompt_tokens: int
    output_tokens: int
    follow_ups: tuple[str, ...] = ()


Build = Callable[["Workload", PromptMaker, random.Random, int], Item]


@dataclass(frozen=True, slots=True)
class Workload:
    """A kind of request; prompt and output in tokens, the chat template included in the prompt."""

    name: str
    prompt_tokens: int
    output_tokens: int
    build: Build
    about: str

    def item(self, maker: PromptMaker, seed: int, index: int) -> Item:
        """Item `index` of the series that `seed` names, whatever was built before it."""
        return self.build(self, maker, random.Random(f"{self.name}/{seed}/{index}"), index)


def _one_turn(workload: Workload, maker: PromptMaker, rng: random.Random, frame: Frame) -> Item:
    messages = maker.exact(frame, workload.prompt_tokens, rng)
    return Item(workload.name, messages, workload.prompt_tokens, workload.output_tokens)


def _plain(workload: Workload, maker: PromptMaker, rng: random.Random, index: int) -> Item:
    return _one_turn(workload, maker, rng, Frame(head=f"Text {rng.randrange(10**6)}:", tail="\n\nContinue it."))


def _shared_prefix(workload: Workload, maker: PromptMaker, rng: random.Random, index: int) -> Item:
    which = rng.randrange(_SHARED_PREFIXES)
    handbook = maker.filler(random.Random(f"handbook/{which}"), _SHARED_WORDS)
    frame = Frame(
        head=f"Question {rng.randrange(10**6)}:", before=(("system", f"You answer from handbook {which}:{handbook}"),)
    )
    return _one_turn(workload, maker, rng, frame)


def _mathematics(workload: Workload, maker: PromptMaker, rng: random.Random, index: int) -> Item:
    people, price, share, years = rng.randint(3, 40), rng.randint(7, 95), rng.randint(2, 9), rng.randint(2, 6)
    head = (
        f"A club of {people} members buys {people * share} tickets at {price} dollars each and sells every third one "
        f"for {price + share} dollars. Its savings grow by {share} percent a year for {years} years. Notes on it:"
    )
    return _one_turn(workload, maker, rng, Frame(head=head, tail="\n\nHow much does it own? Solve it step by step."))


def _rewrite(workload: Workload, maker: PromptMaker, rng: random.Random, index: int) -> Item:
    old, new = rng.sample(maker.words, 2)
    head = f"Copy this text word for word, but write '{new}' where it says '{old}':\n"
    return _one_turn(workload, maker, rng, Frame(head=head))


def _choice(workload: Workload, maker: PromptMaker, rng: random.Random, index: int) -> Item:
    options = "".join(f"\n{letter}. {word}" for letter, word in zip("ABCD", rng.sample(maker.words, 4), strict=True))
    frame = Frame(head=f"Passage {rng.randrange(10**6)}:", tail=f"\n\nWhich word fits best?{options}\nAnswer: ")
    return _one_turn(workload, maker, rng, frame)


def _conversation(workload: Workload, maker: PromptMaker, rng: random.Random, index: int) -> Item:
    first = _plain(workload, maker, rng, index)
    follow_ups = tuple(f"And what about{maker.filler(rng, 24)}?" for _ in range(3))
    return Item(workload.name, first.messages, first.prompt_tokens, first.output_tokens, follow_ups)


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("ss", 128, 32, _plain, "short prompt, short output"),
        Workload("sl", 128, 128, _plain, "short prompt, long output"),
        Workload("ls", 1024, 32, _plain, "long prompt, short output"),
        Workload("ll", 1024, 128, _plain, "long prompt, long output"),
        Workload("shared_prefix", 1024, 128, _shared_prefix, "chat behind one of four shared system prompts"),
        Workload("memory_pressure", 2048, 128, _plain, "long context; give the engine a small KV budget"),
        Workload("math", 160, 384, _mathematics, "long mathematical generation"),
        Workload("rewrite", 320, 256, _rewrite, "copy-heavy rewriting: the output repeats the prompt"),
        Workload("multi_turn", 160, 64, _conversation, "four turns, each after the answer to the one before"),
        Workload("multiple_choice", 512, 8, _choice, "a passage and four options"),
    )
}


@dataclass(frozen=True, slots=True)
class Mixture:
    """Workloads by weight, as in `ss=3,math=1`; a plain name is a mixture of one, `mixed` is all alike."""

    parts: Mapping[str, float]

    @classmethod
    def parse(cls, text: str) -> "Mixture":
        """Raises ValueError that names what is wrong and which workloads there are."""
        if text == "mixed":
            return cls(dict.fromkeys(WORKLOADS, 1.0))
        parts: dict[str, float] = {}
        for piece in text.split(","):
            name, _, weight = piece.strip().partition("=")
            if name not in WORKLOADS:
                raise ValueError(f"no workload {name!r}; there are: mixed, {', '.join(WORKLOADS)}")
            parts[name] = parts.get(name, 0.0) + _weight(name, weight or "1")
        return cls(parts)

    def items(self, maker: PromptMaker, count: int, seed: int, first: int = 0) -> list[Item]:
        """`count` items from number `first` on; the draw of workloads repeats for its seed too."""
        names, weights = list(self.parts), list(self.parts.values())
        return [
            WORKLOADS[random.Random(f"mixture/{seed}/{index}").choices(names, weights)[0]].item(maker, seed, index)
            for index in range(first, first + count)
        ]


def _weight(name: str, text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = -1.0
    if not 0 < weight < float("inf"):
        raise ValueError(f"the weight of {name!r} must be a positive number, got {text!r}")
    return weight


def trace_items(rows: Sequence[TraceRow], maker: PromptMaker, seed: int, length_scale: float = 1.0) -> list[Item]:
    """Prompts for a trace: equal hash ids become equal text, so prefixes are shared as they were in the recording.

    length_scale shrinks prompts, outputs and blocks alike, for a model of a shorter context than the trace's.
    """
    block_words = max(1, round(MOONCAKE_BLOCK_TOKENS * length_scale))
    smallest = maker.tokenizer.count_chat(Frame().messages(" a"))
    items = []
    for index, row in enumerate(rows):
        start = "".join(maker.filler(random.Random(f"block/{seed}/{item}"), block_words) for item in row.hash_ids)
        tokens = max(smallest, round(row.input_tokens * length_scale))
        messages = maker.exact(Frame(), tokens, random.Random(f"trace/{seed}/{index}"), start)
        items.append(Item("trace", messages, tokens, max(1, round(row.output_tokens * length_scale))))
    return items


def body_of(item: Item, model: str, *, stream: bool, exact_output: bool) -> dict[str, Any]:
    """The OpenAI body of an item's first turn, greedy.

    exact_output adds vLLM's `ignore_eos`, so that every mode writes equally much; other servers may refuse it.
    """
    body: dict[str, Any] = {
        "model": model,
        "messages": item.messages,
        "max_tokens": item.output_tokens,
        "temperature": 0.0,
        "stream": stream,
    }
    return body | {"ignore_eos": True} if exact_output else body
