"""The quality gate that `calibrate` runs itself: how far lossy modes stray from the reference on free text.

It speaks for text without a tag and for nothing else; `quality` measures more, and what it found wins.
"""

import asyncio
from collections.abc import Collection, Iterable, Sequence

from app.routing.mode_info import ModeInfo
from app.routing.profile import QualityEvidence
from app.routing.tags import Tag
from loadgen.client import OpenAIClient, ServerFault
from loadgen.fidelity import FidelityUnavailable, TextFidelity, measure_fidelity, stdlib_texts
from loadgen.quality_gate import kl_evidence


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


async def read_texts(
    client: OpenAIClient,
    served: str,
    reference: str,
    modes: Sequence[str],
    count: int,
    limit_s: float,
    found: list[TextFidelity],
) -> str | None:
    """Lets every mode read `count` texts, into `found`; None, or why not all of them were read."""
    try:
        async with asyncio.timeout(limit_s):
            await measure_fidelity(client, served, reference, modes, stdlib_texts(count), on_text=found.append)
    except TimeoutError:
        return f"the quality gate had no time for all of its texts ({limit_s:.0f} s)"
    except (FidelityUnavailable, ServerFault) as fault:
        return f"the quality gate: {fault}"
    return None


def evidence_of(texts: Iterable[TextFidelity], engines: dict[str, list[str]]) -> list[QualityEvidence]:
    """Evidence for every mode of each engine; one engine writes the same, whichever of its modes asks."""
    by_mode: dict[str, list[TextFidelity]] = {}
    for text in texts:
        by_mode.setdefault(text.mode, []).append(text)
    return [
        kl_evidence(name, Tag.NONE.value, [text.divergence for text in by_mode[asked]])
        for asked, names in engines.items()
        if asked in by_mode
        for name in names
    ]
