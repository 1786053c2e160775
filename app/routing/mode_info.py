"""What routing needs to know of a deployed mode."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModeInfo:
    """A deployed mode, as plain data.

    `weights` is the weight set (fp16, int8, gptq, awq) a conversation stays with; `lossless` says that the output
    distribution equals the reference's by construction; `prefix_reuse` that cached prefixes are used; `speculative`
    that decode steps may yield several tokens.
    """

    name: str
    engine: str
    weights: str
    lossless: bool
    prefix_reuse: bool = False
    speculative: bool = False
