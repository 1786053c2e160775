"""The quality gate that `calibrate` runs itself: how far lossy modes stray from the reference on text that it reads.

It speaks for text without a tag and, where there is time, for rewriting and code, of which a text shows the whole work.
Mathematics and multiple choice have right answers: those `quality` asks for, and what it found wins.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from app.routing.mode_info import ModeInfo
from app.routing.profile import GateOutcome, QualityEvidence
from app.routing.tags import Tag
from loadgen.answer_fidelity import Wanted, measure_answers
from loadgen.client import OpenAIClient, ServerFault
from loadgen.fidelity import (
    TOP_TOKENS,
    FidelityUnavailable,
    TextFidelity,
    allowed_top_tokens,
    code_texts,
    fewer_words,
    measure_fidelity,
    stdlib_texts,
)
from loadgen.passages import rewriting_prompt
from loadgen.quality_gate import GENERATED_KL, Divergence, Limits, kl_evidence

_ANSWERED_TEXTS = Limits().bootstrap_samples_min
_REWRITTEN_SENTENCES = 2


class ScopedText(NamedTuple):
    """A text, and what it is evidence for."""

    scope: str
    text: str


def texts_to_read(free: int, tagged: int) -> list[ScopedText]:
    """`free` texts without a tag, then `tagged` of each tag that reading is evidence for."""
    rngs = (random.Random(f"quality/{index}") for index in range(tagged))
    return (
        [ScopedText(Tag.NONE.value, text) for text in stdlib_texts(free)]
        + [ScopedText(Tag.REWRITING.value, _rewritten(rng)) for rng in rngs]
        + [ScopedText(Tag.CODE.value, text) for text in code_texts(tagged)]
    )


def _rewritten(rng: random.Random) -> str:
    """A request to rewrite, with its answer."""
    prompt = rewriting_prompt(rng, _REWRITTEN_SENTENCES)
    _, _, passage = prompt.partition("\n\n")
    return f"{prompt}\n\n{passage}"


def lossy_engines(modes: Sequence[ModeInfo], judged: Collection[str]) -> dict[str, list[str]]:
    """By the mode that is asked: all lossy modes of its engine that nobody has judged yet, itself included."""
    found: dict[str, list[str]] = {}
    for mode in modes:
        if not mode.lossless and mode.name not in judged:
            found.setdefault(mode.engine, []).append(mode.name)
    return {names[0]: names for names in found.values()}


def reference_of(modes: Sequence[ModeInfo], reference_mode: str) -> str | None:
    """The configured reference where it is served, else the first lossless mode that does not speculate."""
    plain = [mode.name for mode in modes if mode.lossless and not mode.speculative]
    return reference_mode if reference_mode in plain else next(iter(plain), None)


@dataclass(slots=True)
class Gate:
    """What is to be judged and what was found, kept outside of coroutines, so that an interruption loses nothing.

    engines: as from `lossy_engines`. wanted: modes of which texts alone show too little. scopes: of the texts, by their
    number. top_tokens: compared at each position of a text.
    """

    engines: Mapping[str, Sequence[str]] = field(default_factory=dict)
    wanted: Mapping[str, Wanted] = field(default_factory=dict)
    scopes: Sequence[str] = ()
    texts: list[TextFidelity] = field(default_factory=list)
    on_text: Callable[[TextFidelity], None] = lambda text: None
    answers: dict[str, list[Divergence]] = field(default_factory=dict)
    top_tokens: int = TOP_TOKENS

    async def prepare(self, client: OpenAIClient, served: str, reference: str) -> str | None:
        """Finds out how closely the server lets modes be compared; None, or what is amiss."""
        try:
            models = [f"{served}:{mode}" for mode in (reference, *self.engines)]
            self.top_tokens = await allowed_top_tokens(client, models)
        except ServerFault as fault:
            return f"the quality gate: {fault}"
        return fewer_words(client.base_url, self.top_tokens)

    async def read(
        self, client: OpenAIClient, served: str, reference: str, texts: Sequence[ScopedText], limit_s: float
    ) -> str | None:
        """Lets every engine read the texts; None, or why not all of them were read."""
        self.scopes = [text.scope for text in texts]
        reading = measure_fidelity(
            client,
            served,
            reference,
            list(self.engines),
            [text.text for text in texts],
            top_tokens=self.top_tokens,
            on_text=self._keep,
        )
        return await _limited(reading, limit_s, "texts")

    def _keep(self, text: TextFidelity) -> None:
        self.texts.append(text)
        self.on_text(text)

    async def answer(self, client: OpenAIClient, served: str, reference: str, limit_s: float) -> str | None:
        """Lets the modes answer that pass by their texts and need more; None, or why not all of them did."""
        texts = stdlib_texts(_ANSWERED_TEXTS)
        answering = measure_answers(
            client, served, reference, self.to_answer, texts, self.answers, top_tokens=self.top_tokens
        )
        return await _limited(answering, limit_s, "answers")

    @property
    def to_answer(self) -> dict[str, Wanted]:
        """What fails by its texts needs no answers."""
        passed = [one.mode for one in self._by_texts() if one.outcome is GateOutcome.PASS]
        return {mode: self.wanted[mode] for mode in passed if mode in self.wanted}

    def _by_texts(self) -> list[QualityEvidence]:
        return evidence_of(self.texts, self.engines, self.scopes)

    def evidence(self) -> list[QualityEvidence]:
        """All pieces; where a mode has two in a scope, both must pass. Its own answers speak for every scope."""
        found, to_answer = self._by_texts(), self.to_answer
        return found + [
            kl_evidence(one.mode, one.scope, self.answers.get(one.mode, ()), metric=GENERATED_KL)
            for one in found
            if one.mode in to_answer
        ]


async def _limited(measuring: Awaitable[object], limit_s: float, what: str) -> str | None:
    try:
        async with asyncio.timeout(limit_s):
            await measuring
    except TimeoutError:
        return f"the quality gate had no time for all of its {what} ({limit_s:.0f} s)"
    except (FidelityUnavailable, ServerFault) as fault:
        return f"the quality gate: {fault}"
    return None


def evidence_of(
    texts: Iterable[TextFidelity], engines: Mapping[str, Sequence[str]], scopes: Sequence[str]
) -> list[QualityEvidence]:
    """Evidence for every mode of each engine, which reads alike for all of them: no text is read from a cache."""
    read: dict[tuple[str, str], list[Divergence]] = {}
    for text in texts:
        read.setdefault((text.mode, scopes[text.text]), []).append(text.divergence)
    return [
        kl_evidence(name, scope, read[asked, scope])
        for asked, names in engines.items()
        for name in names
        for scope in dict.fromkeys(scopes)
        if (asked, scope) in read
    ]
