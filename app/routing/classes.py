"""Request classes, prompt and output shapes, and the paper's prefill score.

Source: ModeSwitch-LLM (arXiv 2605.23057), request features and routing rules; thresholds from its code.
"""

from __future__ import annotations

from enum import StrEnum

from app.routing.tags import Tag

PROMPT_SHORT_BELOW_TOKENS = 384
PROMPT_LONG_FROM_TOKENS = 768
OUTPUT_SHORT_UP_TO_TOKENS = 64
OUTPUT_LONG_FROM_TOKENS = 128
PREFILL_HEAVY_ABOVE_SCORE = 40


_READING = frozenset({Tag.MULTIPLE_CHOICE, Tag.BENCHMARK})


class RequestClass(StrEnum):
    """In order of precedence; `standard` is none of the others."""

    BATCHED = "batched"
    SHARED_PREFIX = "shared_prefix"
    MEMORY_PRESSURE = "memory_pressure"
    DECODE_HEAVY = "decode_heavy"
    PREFILL_HEAVY = "prefill_heavy"
    STANDARD = "standard"


class BatchPressure(StrEnum):
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


class Shape(StrEnum):
    SHORT = "short"
    BETWEEN = "between"
    LONG = "long"


# Reading a member from its enumeration takes ten times as long as reading a global.
SHORT, BETWEEN, LONG = Shape
LOW, MEDIUM, HIGH = BatchPressure
BATCHED, SHARED_PREFIX, MEMORY_PRESSURE, DECODE_HEAVY, PREFILL_HEAVY, STANDARD = RequestClass
_MATHEMATICS = Tag.MATHEMATICS


def prompt_shape(prompt_tokens: int) -> Shape:
    if prompt_tokens < PROMPT_SHORT_BELOW_TOKENS:
        return SHORT
    return LONG if prompt_tokens >= PROMPT_LONG_FROM_TOKENS else BETWEEN


def output_shape(output_tokens: int) -> Shape:
    if output_tokens <= OUTPUT_SHORT_UP_TO_TOKENS:
        return SHORT
    return LONG if output_tokens >= OUTPUT_LONG_FROM_TOKENS else BETWEEN


def batch_pressure(batch_size: int, medium: int = 2, high: int = 4) -> BatchPressure:
    """Pressure of `batch_size` concurrent requests, this one included (paper: 2 medium, 4 high)."""
    if batch_size >= high:
        return HIGH
    return MEDIUM if batch_size >= medium else LOW


def prefill_score(prompt_tokens: int, output_tokens: int, memory_pressure: bool) -> int:
    """The paper's prefill score, 0 to 100: how much of the work is reading the prompt."""
    score = 0
    if prompt_tokens >= 384:
        score += 15
    if prompt_tokens >= 768:
        score += 10
    if output_tokens <= 8:
        score += 30
    elif output_tokens <= 16:
        score += 20
    # As a product, so that an empty prompt needs no special case.
    if output_tokens <= 0.02 * prompt_tokens:
        score += 20
    elif output_tokens <= 0.05 * prompt_tokens:
        score += 10
    if output_tokens >= 64:
        score -= 20
    if output_tokens >= 128:
        score -= 15
    if memory_pressure:
        score += 5
    return score if score > 0 else 0


def classify(
    pressure: BatchPressure,
    shared_prefix: bool,
    memory_pressure: bool,
    tag: Tag,
    prompt_tokens: int,
    output_tokens: int,
    score: int,
) -> RequestClass:
    """The request's class; the first that applies, in the order of `RequestClass`."""
    if pressure is HIGH:
        return BATCHED
    if shared_prefix:
        return SHARED_PREFIX
    if memory_pressure:
        return MEMORY_PRESSURE
    if output_tokens >= OUTPUT_LONG_FROM_TOKENS or tag is _MATHEMATICS:
        return DECODE_HEAVY
    if tag in _READING or prompt_tokens >= PROMPT_LONG_FROM_TOKENS or score > PREFILL_HEAVY_ABOVE_SCORE:
        return PREFILL_HEAVY
    return STANDARD
