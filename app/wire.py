"""What the controller and an engine deployment say to each other.

Plain data without vLLM, so that the controller's process can import it. A streamed answer takes two ways: `start`
answers with its first frames (or with an error, while another engine can still be tried), and all later frames of
all requests of one engine travel together over a single long-lived `channel` call, one message for whatever an
engine step made ready. One message a step instead of one a token and request is what keeps the overhead at
concurrency small.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple

INCLUDABLE = frozenset({"mode", "timing", "usage", "decision", "energy"})
"""What a client may ask for beside the answer, with `x-modeswitch-include`."""


class EngineState(StrEnum):
    """An engine's life: `queued -> starting -> ready`, or `failed` and queued again after a pause."""

    QUEUED = "queued"
    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"


class Endpoint(StrEnum):
    CHAT = "chat.completions"
    COMPLETION = "completions"


@dataclass(frozen=True, slots=True)
class Call:
    """One request for one engine. `body` is the client's OpenAI body, untouched but for model, id, salt and priority.

    `key` names the request in the ledger and is unique; `request_id` is the client's own name for it and need not be.
    """

    key: str
    request_id: str
    endpoint: Endpoint
    mode: str
    body: dict[str, Any]
    include: frozenset[str] = frozenset()
    stream: bool = False
    tenant: str = "default"
    request_class: str = "standard"
    decision: dict[str, Any] = field(default_factory=dict)
    """Why this engine was chosen, for a client that asks."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request took, counted as the engine handed out each step. Times are milliseconds from the call's arrival.

    `accepted_tokens` are the output tokens that came from drafts. A time is None when it never came to that.
    """

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    accepted_tokens: int
    queued_ms: float | None
    first_token_ms: float | None
    last_token_ms: float | None


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer: the HTTP status and the JSON body as bytes."""

    status: int
    body: bytes
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """A stream that has begun: its first server-sent event(s); the rest arrive on the channel."""

    frames: str
    last: bool
    usage: Usage | None = None


class Frames(NamedTuple):
    """Server-sent events of one request, ready to be written; `last` closes the stream, and brings the usage.

    `code` is of the error that the stream ended in (`ENGINE_LOST` or `ENGINE_ERROR`); None where it is complete.
    """

    key: str
    text: str
    last: bool
    usage: Usage | None = None
    code: str | None = None


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What an engine says of itself. Times are seconds on the engine's own clocks; unknown is None."""

    name: str
    state: EngineState
    pid: int
    reason: str | None = None
    """Why it failed, or what it waits for."""
    retry_in_s: float | None = None
    started_in_s: float | None = None
    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    step_ms: float | None = None
    """A decode step, lately."""
    accepted_per_step: float | None = None
    """Draft tokens accepted per decode step of one sequence, lately; None where nothing is drafted."""
    max_running: int | None = None
    """Sequences decoded at once."""
    kv_capacity_tokens: int | None = None
    resident_bytes: int | None = None
    peak_memory_bytes: int | None = None
    memory_method: Literal["resident_set", "device_allocator"] | None = None
    process_ids: tuple[int, ...] = ()
    engine_args: dict[str, Any] = field(default_factory=dict)
    """What it was started with: fields of vLLM's `AsyncEngineArgs`."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables set for it."""
    effective: dict[str, Any] = field(default_factory=dict)
    """Settings read back from the running engine, not from its configuration."""


class ChannelMessage(NamedTuple):
    """One message of an engine's channel: frames that are ready, and its status when that is news.

    `begun` are the keys of whole replies whose first token is there: their prompts are computed.
    """

    frames: tuple[Frames, ...]
    status: EngineStatus | None
    begun: tuple[str, ...] = ()
