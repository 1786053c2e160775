"""Which request an engine works on, and how many tokens each took: counted where vLLM hands out a step's results.

vLLM's stat loggers tell sums only. Its output processor sees every request of every step, so it is watched there
(`vllm.v1.engine.output_processor.OutputProcessor`); a context variable ties vLLM's own request ids, of which one
call may have several (`n`, several prompts), to the call they belong to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from app.energy.activity import ActivityRecorder, Labels, Work
from app.wire import Call, Usage

_key: ContextVar[str | None] = ContextVar("modeswitch_call", default=None)
_KEEP_PER_STEP = 0.98
"""What was seen before counts half after about 35 decode steps."""
_REMEMBER_ENDED = 1024
"""Calls that are over and can still be asked for: who gives one up learns too late that it was just complete."""


@dataclass(slots=True)
class _Tally:
    """One call under way. Times are `time.monotonic` seconds, which engine and host share."""

    begun_s: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    accepted_tokens: int = 0
    scheduled_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    uncomputed_tokens: int = 0
    """Prompt tokens of parts that have produced nothing yet."""
    finished: bool = False


@dataclass(slots=True)
class _Part:
    """One of vLLM's requests."""

    key: str
    tally: _Tally
    prompt_tokens: int
    prefilled: bool = False


class Activity:
    """Counts for all calls of one engine; owned by the event loop that vLLM's output handler runs in."""

    def __init__(self, recorder: ActivityRecorder, first_token: Callable[[str], None] | None = None) -> None:
        self._recorder = recorder
        self._first_token = first_token
        self._tallies: dict[str, _Tally] = {}
        self._parts: dict[str, _Part] = {}
        self._ended: dict[str, Usage] = {}
        self._steps = self._accepted = 0.0
        self.accepted_tokens = 0
        """All that drafts ever added to an answer. vLLM's own counter has those beyond an answer's end as well."""

    @property
    def accepted_per_step(self) -> float | None:
        """Draft tokens accepted per decode step of one sequence, lately; None before the first step."""
        return self._accepted / self._steps if self._steps else None

    def watch(self, output_processor: Any) -> None:
        """Put this in front of vLLM's output processor, once, before the first request."""
        add_request, process_outputs = output_processor.add_request, output_processor.process_outputs

        def add(request: Any, *args: Any, **options: Any) -> Any:
            if key := _key.get():
                self._add(key, request.request_id, len(request.prompt_token_ids or ()))
            return add_request(request, *args, **options)

        def process(outputs: Any, *args: Any, **options: Any) -> Any:
            self._stepped(outputs)
            return process_outputs(outputs, *args, **options)

        output_processor.add_request, output_processor.process_outputs = add, process

    def begin(self, call: Call) -> None:
        """The call was taken. What the current task and its children ask of vLLM from now on belongs to it."""
        _key.set(call.key)
        self._tallies[call.key] = _Tally(time.monotonic())
        self._recorder.begin(call.key, Labels(call.mode, call.tenant, call.request_class))

    def finish(self, key: str) -> Usage | None:
        """Nothing more is produced for the call, in whatever way it came to that. None for one that is over."""
        tally = self._tallies.get(key)
        if tally is None:
            return None
        if not tally.finished:
            tally.finished = True
            self._close(key, tally)
        return _usage(tally)

    def end(self, key: str) -> Usage | None:
        """The call is over. None for one that is over already."""
        usage = self.finish(key)
        self._tallies.pop(key, None)
        if usage is not None:
            self._ended[key] = usage
            if len(self._ended) > _REMEMBER_ENDED:
                del self._ended[next(iter(self._ended))]
        return usage

    def took(self, key: str) -> Usage | None:
        """What a call has taken so far, or took when it is over. None for one that is unknown or long over."""
        tally = self._tallies.get(key)
        return self._ended.get(key) if tally is None else _usage(tally)

    def _close(self, key: str, tally: _Tally) -> None:
        for request_id in [request_id for request_id, part in self._parts.items() if part.key == key]:
            del self._parts[request_id]
        if tally.uncomputed_tokens and tally.scheduled_s is None and len(self._tallies) == 1:
            # Aborted before its first token, and nothing else ran: the time since was spent on its prompt.
            self._recorder.stepped([Work(key, tally.uncomputed_tokens, 0)])
        self._recorder.end(key)

    def _add(self, key: str, request_id: str, prompt_tokens: int) -> None:
        if tally := self._tallies.get(key):
            tally.uncomputed_tokens += prompt_tokens
            # The samples of one prompt (`n`) are numbered in front of its id: it counts once.
            number, underscore, _ = request_id.partition("_")
            if not (underscore and number.isdigit() and number != "0"):
                tally.prompt_tokens += prompt_tokens
            self._parts[request_id] = _Part(key, tally, prompt_tokens)

    def _stepped(self, outputs: Iterable[Any]) -> None:
        now_s = time.monotonic()
        parts = self._parts
        # Plain tuples in the shape of `Work`, and no call for a part that only decodes: with hundreds of requests this
        # loop is what reporting costs.
        work: list[tuple[str, int, int]] = []
        steps, accepted = self._steps, self._accepted
        for output in outputs:
            part = parts.get(output.request_id)
            if part is None:
                continue
            tally = part.tally
            new_tokens = len(output.new_token_ids)
            computed_tokens = 0 if part.prefilled else self._prefilled(part, output, now_s)
            if new_tokens and not computed_tokens:
                steps = steps * _KEEP_PER_STEP + 1
                accepted = accepted * _KEEP_PER_STEP + new_tokens - 1
                tally.accepted_tokens += new_tokens - 1
                self.accepted_tokens += new_tokens - 1
            tally.output_tokens += new_tokens
            tally.last_s = now_s
            work.append((part.key, computed_tokens, new_tokens))
            if output.finish_reason is not None:
                del parts[output.request_id]
        self._steps, self._accepted = steps, accepted
        if work:
            self._recorder.stepped(work)

    def _prefilled(self, part: _Part, output: Any, now_s: float) -> int:
        """Note the first result of a prompt; returns the tokens that were computed for it."""
        part.prefilled = True
        tally = part.tally
        tally.uncomputed_tokens -= part.prompt_tokens
        cached_tokens = output.prefill_stats.num_cached_tokens if output.prefill_stats is not None else 0
        tally.cached_tokens += cached_tokens
        if tally.scheduled_s is None:
            tally.scheduled_s = _scheduled_s(output)
        if tally.first_s is None:
            tally.first_s = now_s
            if self._first_token is not None:
                self._first_token(part.key)
        return max(1, part.prompt_tokens - cached_tokens)


def _scheduled_s(output: Any) -> float | None:
    """When the engine core first ran the request (`EngineCoreEventType.SCHEDULED`)."""
    for event in output.events or ():
        if event.type.name == "SCHEDULED":
            return float(event.timestamp)
    return None


def _usage(tally: _Tally) -> Usage:
    def since_begun_ms(moment_s: float | None) -> float | None:
        return None if moment_s is None else round(max(0.0, moment_s - tally.begun_s) * 1e3, 3)

    return Usage(
        prompt_tokens=tally.prompt_tokens,
        cached_tokens=tally.cached_tokens,
        output_tokens=tally.output_tokens,
        accepted_tokens=tally.accepted_tokens,
        queued_ms=since_begun_ms(tally.scheduled_s),
        first_token_ms=since_begun_ms(tally.first_s),
        last_token_ms=since_begun_ms(tally.last_s),
    )
