"""The quality gate that `calibrate` runs itself: how far lossy modes stray from the reference on free text.

It speaks for text without a tag and for nothing else; `quality` measures more, and what it found wins.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

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
    fewer_words,
    measure_fidelity,
    stdlib_texts,
)
from loadgen.quality_gate import GENERATED_KL, Divergence, Limits, kl_evidence

_ANSWERED_TEXTS = Limits().bootstrap_samples_min


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

    engines: as from `lossy_engines`. wanted: modes of which texts alone show too little. top_tokens: compared at each
    position of a text.
    """

    engines: Mapping[str, Sequence[str]] = field(default_factory=dict)
    wanted: Mapping[str, Wanted] = field(default_factory=dict)
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

    async def read(self, client: OpenAIClient, served: str, reference: str, count: int, limit_s: float) -> str | None:
        """Lets every engine read `count` texts; None, or why not all of them were read."""
        texts = stdlib_texts(count)
        reading = measure_fidelity(
            client, served, reference, list(self.engines), texts, top_tokens=self.top_tokens, on_text=self._keep
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
        passed = [one.mode for one in evidence_of(self.texts, self.engines) if one.outcome is GateOutcome.PASS]
        return {mode: self.wanted[mode] for mode in passed if mode in self.wanted}

    def evidence(self) -> list[QualityEvidence]:
        """All pieces; where a mode has two, both must pass."""
        found = evidence_of(self.texts, self.engines)
        return found + [
            kl_evidence(mode, Tag.NONE.value, self.answers.get(mode, ()), metric=GENERATED_KL)
            for mode in self.to_answer
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


def evidence_of(texts: Iterable[TextFidelity], engines: Mapping[str, Sequence[str]]) -> list[QualityEvidence]:
    """Evidence for every mode of each engine, which reads alike for all of them: no text is read from a cache."""
    by_mode: dict[str, list[TextFidelity]] = {}
    for text in texts:
        by_mode.setdefault(text.mode, []).append(text)
    return [
        kl_evidence(name, Tag.NONE.value, [text.divergence for text in by_mode[asked]])
        for asked, names in engines.items()
        if asked in by_mode
        for name in names
    ]
