"""What is measured of a request before it is routed.

Source: ModeSwitch-LLM (arXiv 2605.23057), six request features; here each is measured, none is taken from a name.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from app.routing.classes import (
    BatchPressure,
    RequestClass,
    Shape,
    batch_pressure,
    classify,
    output_shape,
    prefill_score,
    prompt_shape,
)
from app.routing.json_record import JsonRecord
from app.routing.output_length import OutputLengthPredictor, OutputSource
from app.routing.settings import RoutingSettings
from app.routing.snapshot import Snapshot
from app.routing.tags import Tag, tag_of


class Objective(StrEnum):
    """What a request wants least of: `limit` is the least energy among modes within a latency limit."""

    LATENCY = "latency"
    ENERGY = "energy"
    WEIGHTED = "weighted"
    LIMIT = "limit"


class Quality(StrEnum):
    """`gated`: lossy modes that passed the gate are welcome; `exact`: lossless modes only."""

    GATED = "gated"
    EXACT = "exact"


class Wishes(JsonRecord, frozen=True, kw_only=True):
    """What the client or the conversation asks of the choice, besides the tokens."""

    objective: Objective = Objective.LATENCY
    latency_limit_ms: float | None = None
    """Needed with `Objective.LIMIT`."""
    energy_weight: float | None = None
    """For `Objective.WEIGHTED`, 0 to 1; None takes the operator's."""
    quality: Quality = Quality.GATED
    conversation: str | None = None
    """A hash that names the conversation."""
    conversation_weights: str | None = None
    """The weight set this conversation began with."""
    excluded_engines: tuple[str, ...] = ()
    """Engines that failed this request already."""
    crowded_engines: tuple[str, ...] = ()
    """Engines in whose queue the request's tenant has its share of places, while others may come."""

    def __post_init__(self) -> None:
        if self.objective is Objective.LIMIT and (self.latency_limit_ms is None or not self.latency_limit_ms > 0):
            raise ValueError("objective 'limit' needs a latency_limit_ms above 0")
        if self.energy_weight is not None and not 0 <= self.energy_weight <= 1:
            raise ValueError(f"energy_weight must be from 0 to 1, not {self.energy_weight}")


NO_WISHES = Wishes()


class RequestFeatures(JsonRecord, frozen=True, kw_only=True):
    """Everything a policy may know of a request. Contains no text.

    `draw` is a random number from 0 up to 1 that decides exploration, so that a decision can be replayed.
    """

    prompt_tokens: int
    prompt_exact: bool = True
    """False: `prompt_tokens` is an estimate from characters."""
    expected_output_tokens: int
    """Of each sequence."""
    sequences: int = 1
    """Decoded together for it: its choices (`n`) of each of its prompts."""
    output_source: OutputSource = OutputSource.PREDICTED
    max_tokens: int | None = None
    """Of each sequence."""
    cached_tokens: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Prompt tokens expected in each engine's prefix cache."""
    seen_tokens: int = 0
    """Prompt tokens that begin some recent prompt."""
    shared_prefix: bool = False
    batch_size: int = 1
    """Requests on the device, this one included."""
    batch_pressure: BatchPressure = BatchPressure.LOW
    kv_use: float = 0.0
    memory_pressure: bool = False
    tag: Tag = Tag.NONE
    label: str | None = None
    """The client's own name of the workload, where it sent a usable one."""
    prompt_shape: Shape = Shape.SHORT
    output_shape: Shape = Shape.SHORT
    prefill_score: int = 0
    request_class: RequestClass = RequestClass.STANDARD
    draw: float = 1.0
    wishes: Wishes = NO_WISHES

    @property
    def output_prompt_ratio(self) -> float:
        return self.expected_output_tokens / max(1, self.prompt_tokens)

    @property
    def repeats_prompt(self) -> bool:
        """The output will mostly copy the prompt, which n-gram speculation predicts well."""
        return self.tag is Tag.REWRITING


def measure(
    *,
    text: str,
    prompt_tokens: int,
    snapshot: Snapshot,
    predictor: OutputLengthPredictor,
    settings: RoutingSettings,
    prompt_exact: bool = True,
    sequences: int = 1,
    max_tokens: int | None = None,
    label: str | None = None,
    seen_tokens: int = 0,
    cached_tokens: Mapping[str, int] | None = None,
    draw: float = 1.0,
    wishes: Wishes = NO_WISHES,
) -> RequestFeatures:
    """The features of a request with `prompt_tokens` tokens, whose instruction is `text`.

    `seen_tokens` and `cached_tokens` come from `PrefixIndex`. The text is looked at and not kept.
    """
    tag, name = tag_of(text, label)
    shape = prompt_shape(prompt_tokens)
    expected = predictor.predict(tag, shape, max_tokens)
    batch_size = snapshot.total_load() + 1
    pressure = batch_pressure(batch_size, settings.batch_medium, settings.batch_high)
    kv_use = snapshot.kv_use()
    free = snapshot.device_free_share()
    memory_pressure = kv_use >= settings.kv_pressure or (free is not None and free < settings.device_free_pressure)
    shared = (
        seen_tokens >= settings.shared_prefix_min_tokens
        and seen_tokens >= settings.shared_prefix_fraction * prompt_tokens
    )
    score = prefill_score(prompt_tokens, expected.tokens, memory_pressure)
    return RequestFeatures(
        prompt_tokens=prompt_tokens,
        prompt_exact=prompt_exact,
        expected_output_tokens=expected.tokens,
        sequences=sequences,
        output_source=expected.source,
        max_tokens=max_tokens,
        cached_tokens=cached_tokens or {},
        seen_tokens=seen_tokens,
        shared_prefix=shared,
        batch_size=batch_size,
        batch_pressure=pressure,
        kv_use=kv_use,
        memory_pressure=memory_pressure,
        tag=tag,
        label=name,
        prompt_shape=shape,
        output_shape=output_shape(expected.tokens),
        prefill_score=score,
        request_class=classify(pressure, shared, memory_pressure, tag, prompt_tokens, expected.tokens, score),
        draw=draw,
        wishes=wishes,
    )
