"""How many tokens a request will produce, from what finished requests of the same kind produced.

The kind is the tag, the prompt's shape and the size of max_tokens; not the request class, which itself depends on the
expected output. Where a kind has too few samples, wider kinds answer: tag and max_tokens, then the tag, then all.
`max_tokens` itself is the answer only when nothing at all is known.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from app.routing.classes import Shape
from app.routing.tags import Tag

UNKNOWN_OUTPUT_TOKENS = 128
"""Assumed with neither a finished request nor max_tokens."""
MIN_SAMPLES = 3
HALF_LIFE_S = 3600.0
MAX_EFFECTIVE_SAMPLES = 200.0


class OutputSource(StrEnum):
    PREDICTED = "predicted"
    MAX_TOKENS = "max_tokens"
    ASSUMED = "assumed"


_PREDICTED = OutputSource.PREDICTED


class OutputPrediction(NamedTuple):
    tokens: int
    source: OutputSource


_Kind = tuple[object, ...]


class _Lengths:
    """Mean of output lengths, old samples fading by age and by number."""

    __slots__ = ("last_s", "mean", "weight")

    def __init__(self, now_s: float) -> None:
        self.weight = 0.0
        self.mean = 0.0
        self.last_s = now_s

    def add(self, tokens: int, now_s: float) -> None:
        # A clock that jumps back counts as no time passed.
        aged = self.weight * 0.5 ** (max(0.0, now_s - self.last_s) / HALF_LIFE_S)
        # What is known never fades to nothing: an old mean is better than max_tokens.
        kept = min(max(aged, min(self.weight, MIN_SAMPLES)), MAX_EFFECTIVE_SAMPLES - 1)
        self.weight = kept + 1.0
        self.mean += (tokens - self.mean) / self.weight
        self.last_s = max(self.last_s, now_s)


class OutputLengthPredictor:
    """Online predictor of output tokens. Its memory is bounded by the number of kinds (a few hundred)."""

    __slots__ = ("_lengths",)

    def __init__(self) -> None:
        self._lengths: dict[_Kind, _Lengths] = {}

    def observe(self, tag: Tag, shape: Shape, max_tokens: int | None, output_tokens: int, now_s: float) -> None:
        """A finished request produced `output_tokens`. `now_s` is seconds of any one clock."""
        if output_tokens < 0:
            return
        for kind in _kinds(tag, shape, max_tokens):
            lengths = self._lengths.get(kind)
            if lengths is None:
                lengths = self._lengths[kind] = _Lengths(now_s)
            lengths.add(output_tokens, now_s)

    def predict(self, tag: Tag, shape: Shape, max_tokens: int | None) -> OutputPrediction:
        """Expected output tokens, at least 1 and at most `max_tokens`."""
        lengths = self._known(tag, shape, max_tokens)
        if lengths is not None:
            return OutputPrediction(_possible(round(lengths.mean), max_tokens), _PREDICTED)
        if max_tokens is not None:
            return OutputPrediction(_possible(max_tokens, None), OutputSource.MAX_TOKENS)
        return OutputPrediction(UNKNOWN_OUTPUT_TOKENS, OutputSource.ASSUMED)

    def _known(self, tag: Tag, shape: Shape, max_tokens: int | None) -> _Lengths | None:
        lengths = None
        for kind in _kinds(tag, shape, max_tokens):
            lengths = self._lengths.get(kind)
            if lengths is not None and lengths.weight >= MIN_SAMPLES:
                return lengths
        # Fewer samples than wanted, of all kinds together, are still better than max_tokens.
        return lengths


def _possible(tokens: int, max_tokens: int | None) -> int:
    """At least 1 and at most `max_tokens`."""
    if max_tokens is not None and tokens > max_tokens:
        tokens = max_tokens
    return tokens if tokens > 1 else 1


def _kinds(tag: Tag, shape: Shape, max_tokens: int | None) -> tuple[_Kind, ...]:
    size = 0 if max_tokens is None else max_tokens.bit_length()
    return (tag, shape, size), (tag, size), (tag,), ()
