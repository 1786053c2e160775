"""Carries out a calibration's tasks against the server and adds what was seen to the samples."""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from loadgen.calibration_plan import (
    STEP_PROMPT_TOKENS,
    Engine,
    Grid,
    Pace,
    PrefillTask,
    StepTask,
    Task,
    Text,
    TogetherTask,
)
from loadgen.client import Call, OpenAIClient
from loadgen.energy_facts import EnergySource, written_ms
from loadgen.fitting import EngineSamples, StreamEnergy, accepted_per_step, add_sample
from loadgen.passages import rewriting_prompt, story_prompt
from loadgen.prompts import Frame, Messages, PromptMaker
from loadgen.records import Outcome, RequestRecord
from loadgen.server_facts import engines as engine_states

_SHORT_PROMPT_TOKENS = 256
_TOKENS_PER_SENTENCE = 26


class TrialFailed(Exception):
    """A request of a trial failed; the message has the client's words."""


@dataclass(frozen=True, slots=True)
class Counters:
    """An engine's counts of tokens since it started."""

    generated: int = 0
    accepted: int = 0

    def since(self, earlier: "Counters") -> "Counters":
        return Counters(self.generated - earlier.generated, self.accepted - earlier.accepted)


async def read_counters(client: OpenAIClient, engine: Engine) -> Counters:
    """Zeros for an engine that does not speculate: nothing of it is read from counters."""
    if engine.speculative:
        for state in await engine_states(client) or []:
            if state.get("name") == engine.name:
                return Counters(int(state.get("generation_tokens", 0)), int(state.get("accepted_tokens", 0)))
    return Counters()


def token_ms(record: RequestRecord, begin_ms: float, end_ms: float) -> float | None:
    """Time per token of a stream between two moments, both in ms on the clock of `sent_s`; None where it has none.

    Between frames tokens are taken to come evenly, since a frame may carry several.
    """
    tokens = record.output_tokens or 0
    if tokens < 2 or len(record.frame_ms) < 2 or end_ms <= begin_ms:
        return None
    # The last token may be one without text, which no frame shows: the answer's end does.
    at_ms = np.array([*record.frame_ms[:-1], written_ms(record)]) + record.sent_s * 1000
    places = np.linspace(0.0, tokens - 1.0, len(at_ms))
    written = float(np.interp(end_ms, at_ms, places) - np.interp(begin_ms, at_ms, places))
    return (end_ms - begin_ms) / written if written > 0 else None


def steady_window_ms(records: Sequence[RequestRecord]) -> tuple[float, float]:
    """From the moment that every stream has begun to write until the first of them ends."""
    begin = max(record.sent_s * 1000 + (record.ttft_ms or record.total_ms) for record in records)
    return begin, min(record.sent_s * 1000 + written_ms(record) for record in records)


@dataclass(slots=True)
class Calibrator:
    """The running calibration: one task at a time."""

    client: OpenAIClient
    served: str
    engines: Mapping[str, Engine]
    maker: PromptMaker
    energy: EnergySource
    samples: dict[str, EngineSamples] = field(default_factory=dict)
    seed: int = 0
    _number: int = 0

    def __post_init__(self) -> None:
        self.samples = {name: EngineSamples() for name in self.engines}

    async def warm_up(self) -> Pace:
        """One request to each engine, which also tells the pace of the slowest."""
        prefill_tokens_per_s = step_per_s = float("inf")
        for engine in self.engines.values():
            await self._ask(engine, self._filled(64), 2)
            record = await self._ask(engine, self._filled(_SHORT_PROMPT_TOKENS), 8)
            prefill_s = max(1e-4, (record.ttft_ms or record.total_ms) / 1000)
            decode_s = max(1e-4, (written_ms(record) - (record.ttft_ms or 0.0)) / 1000)
            prefill_tokens_per_s = min(prefill_tokens_per_s, _SHORT_PROMPT_TOKENS / prefill_s)
            step_per_s = min(step_per_s, 7 / decode_s)
        return Pace(prefill_tokens_per_s, 1 / step_per_s)

    async def carry_out(self, task: Task, grid: Grid) -> None:
        """Raises TrialFailed; what was seen of a failed trial is not kept."""
        match task:
            case PrefillTask(engine, tokens):
                # Short prompts are cheap and, beside the fixed costs, noisy.
                for _ in range(2 if tokens <= _SHORT_PROMPT_TOKENS else 1):
                    await self._prefill(self.engines[engine], tokens)
            case StepTask(engine, batch, text):
                await self._steps(self.engines[engine], batch, text, grid.output_tokens)
            case TogetherTask(engine, other):
                await self._together(self.engines[engine], self.engines[other], grid.output_tokens)

    async def note_memory(self) -> None:
        """Peak memory of every engine so far, where the server says it."""
        for state in await engine_states(self.client) or []:
            peak = state.get("peak_memory_bytes")
            if state.get("name") in self.samples and isinstance(peak, (int, float)) and peak > 0:
                self.samples[str(state["name"])].peak_memory_bytes = float(peak)

    async def _prefill(self, engine: Engine, tokens: int) -> None:
        record = await self._ask(engine, self._filled(tokens), 1)
        samples = self.samples[engine.name]
        add_sample(samples.prefill_ms, tokens, record.ttft_ms or record.total_ms)
        joules = await self.energy.joules(self.client, record)
        if joules is not None:
            add_sample(samples.prefill_j, tokens, joules)

    async def _steps(self, engine: Engine, batch: int, text: Text, output_tokens: int) -> None:
        before = await read_counters(self.client, engine)
        records = await self._streams([(engine, text)] * batch, output_tokens)
        spent = (await read_counters(self.client, engine)).since(before)
        samples = self.samples[engine.name]
        step = _step_ms(engine, records, steady_window_ms(records), spent, batch)
        if step is not None:
            add_sample(samples.step_ms.setdefault(text, {}), batch, step)
        if engine.speculative:
            for counts, more in (
                (samples.generated, spent.generated),
                (samples.accepted, spent.accepted),
                (samples.requests, batch),
            ):
                counts[text] = counts.get(text, 0) + more
        for record in records:
            joules = await self.energy.joules(self.client, record)
            if joules is not None and record.output_tokens:
                stream = StreamEnergy(record.prompt_tokens or STEP_PROMPT_TOKENS[text], record.output_tokens, joules)
                samples.streams_j.setdefault(batch, []).append(stream)

    async def _together(self, engine: Engine, other: Engine, output_tokens: int) -> None:
        both = (engine, other)
        before = [await read_counters(self.client, one) for one in both]
        records = await self._streams([(one, Text.FREE) for one in both], output_tokens)
        window = steady_window_ms(records)
        for one, second, record, earlier in zip(both, reversed(both), records, before, strict=True):
            spent = (await read_counters(self.client, one)).since(earlier)
            step = _step_ms(one, [record], window, spent, 1)
            if step is not None:
                self.samples[one.name].together_ms.setdefault(second.name, []).append(step)

    async def _streams(self, wanted: Sequence[tuple[Engine, Text]], output_tokens: int) -> list[RequestRecord]:
        origin = time.perf_counter()
        calls = [self._call(engine, self._text(text), output_tokens) for engine, text in wanted]
        return list(await asyncio.gather(*(self._send(call, origin) for call in calls)))

    async def _ask(self, engine: Engine, messages: Messages, output_tokens: int) -> RequestRecord:
        return await self._send(self._call(engine, messages, output_tokens), time.perf_counter())

    async def _send(self, call: Call, origin: float) -> RequestRecord:
        record = await self.client.send(call, origin=origin)
        if record.outcome is not Outcome.OK:
            raise TrialFailed(f"{record.outcome}: {record.error}")
        return record

    def _call(self, engine: Engine, messages: Messages, output_tokens: int) -> Call:
        body: dict[str, Any] = {
            "model": f"{self.served}:{engine.mode}",
            "messages": messages,
            "max_tokens": output_tokens,
            "temperature": 0.0,
            "stream": True,
            "ignore_eos": True,
        }
        return Call.of(body)

    def _rng(self) -> random.Random:
        """A new one for each prompt: no two are alike, so no cached prefix helps."""
        self._number += 1
        return random.Random(f"calibration/{self.seed}/{self._number}")

    def _filled(self, tokens: int) -> Messages:
        rng = self._rng()
        return self.maker.exact(Frame(head=f"{rng.randrange(10**6)}:"), tokens, rng)

    def _text(self, text: Text) -> Messages:
        rng = self._rng()
        if text is Text.REWRITING:
            prompt = rewriting_prompt(rng, STEP_PROMPT_TOKENS[text] // _TOKENS_PER_SENTENCE)
        else:
            prompt = story_prompt(rng)
        return [{"role": "user", "content": prompt}]


def _step_ms(
    engine: Engine, records: Sequence[RequestRecord], window: tuple[float, float], spent: Counters, requests: int
) -> float | None:
    """Mean time of a decode step; a speculative engine's yields several tokens, which its counters tell."""
    found = [ms for record in records if (ms := token_ms(record, *window)) is not None]
    if not found:
        return None
    accepted = accepted_per_step(spent.generated, spent.accepted, requests) if engine.speculative else 0.0
    return float(np.mean(found)) * (1.0 + (accepted or 0.0))
