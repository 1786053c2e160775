"""Carries out a sweep's trials against the server: what is timed, and what is looked up once they are over."""

import asyncio
import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

from rich.console import Console

from loadgen.calibration_plan import Engine
from loadgen.calibration_trials import Counters, read_counters
from loadgen.client import OpenAIClient
from loadgen.decode_limit import DecodeLimit
from loadgen.energy_by_mode import Spent, j_per_token
from loadgen.energy_facts import EnergySource
from loadgen.fitting import accepted_per_step
from loadgen.kv_use import WORKLOAD, watched_kv_use
from loadgen.prompts import PromptMaker
from loadgen.questioning import rouge_l
from loadgen.records import RecordWriter, RequestRecord
from loadgen.runner import ClosedLoop, LoadRun, Manner
from loadgen.server_facts import model_name
from loadgen.sweep_plan import Cell, Results, TrialResult, TrialSpoilt, read_trial
from loadgen.workloads import WORKLOADS

# Waves of a trial: enough that a stream's start and end do not make the whole of it.
_REQUESTS_PER_STREAM = 2
_WARMUP = -1
_WARMUP_FIRST = 10**6
_WATCHED_S = 0.25
"""How often KV caches are looked at: a trial may be over in a second."""
_SETTLE_S = 2.0
"""A request's joules are settled one to two seconds after its end."""


class Likeness(NamedTuple):
    """A mode's greedy texts beside the reference's for the same prompts, 0 to 1; ROUGE-L None where not installed."""

    rouge_l: float | None
    same_text: float


def likeness(reference: Mapping[int, str], other: Mapping[int, str]) -> Likeness | None:
    """Means over the prompts that both have a text for, by number; None where there is none."""
    pairs = [(reference[number], text) for number, text in other.items() if number in reference]
    if not pairs:
        return None
    try:
        # Equal texts are common and cost nothing this way.
        rouge = fmean(1.0 if left == right else rouge_l(left, right) for left, right in pairs)
    except ImportError:
        rouge = None
    return Likeness(rouge, fmean(left == right for left, right in pairs))


@dataclass(frozen=True, slots=True)
class Trial:
    """A trial that is over. `equal_prompts`: its prompts are those of the other modes in its round."""

    result: TrialResult
    records: Sequence[RequestRecord]
    equal_prompts: bool

    @property
    def texts(self) -> dict[int, str]:
        """By number of the prompt. Later turns follow each mode's own answers, so only first ones are comparable."""
        return {record.index: record.text for record in self.records if record.turn == 0} if self.equal_prompts else {}


@dataclass(slots=True)
class SweepTrials:
    """The running sweep: one trial at a time, so that modes do not disturb one another.

    engines, limits: by mode, where the server tells them.
    """

    client: OpenAIClient
    served: str
    reference: str
    maker: PromptMaker
    writer: RecordWriter
    energy: EnergySource
    results: Results
    seed: int
    exact_output: bool
    engines: Mapping[str, Engine] = field(default_factory=dict)
    limits: Mapping[str, DecodeLimit] = field(default_factory=dict)

    async def warm_up(self, cell: Cell, mode: str) -> None:
        try:
            await self._trial(cell, mode, _WARMUP)
        except TrialSpoilt as spoilt:
            self.results.failures.append(f"warm-up, {mode}: {spoilt}")

    async def cell(self, cell: Cell, order: Sequence[str], number: int, console: Console) -> None:
        """The trials of one round in one cell. Each is kept at once, what is looked up is added when all are over."""
        trials: dict[str, Trial] = {}
        for mode in order:
            with console.status(f"round {number + 1}: {cell.workload} x {cell.concurrency}, {mode}"):
                try:
                    trials[mode] = await self._trial(cell, mode, number)
                except TrialSpoilt as spoilt:
                    self.results.failures.append(f"round {number + 1}, {cell}, {mode}: {spoilt}")
                else:
                    self.results.add(cell, mode, number, trials[mode].result)
        with console.status(f"round {number + 1}: energy and likeness in {cell.workload} x {cell.concurrency}"):
            await self._complete(cell, number, trials)

    async def _trial(self, cell: Cell, mode: str, number: int) -> Trial:
        """One mode in one cell. All modes get equal prompts in a round where caches can be emptied, else their own."""
        was_reset = await self.client.reset_prefix_cache()
        count = cell.concurrency * _REQUESTS_PER_STREAM
        seed = self.seed if was_reset else zlib.crc32(f"{self.seed}/{mode}".encode())
        workload = WORKLOADS[cell.workload]
        first = (number if number >= 0 else _WARMUP_FIRST) * count
        items = [workload.item(self.maker, seed, first + index) for index in range(count)]
        # No energy is asked for with the answer: it would end seconds later, when the meter has settled it.
        manner = Manner(model_name(self.served, mode), exact_output=self.exact_output, seed=self.seed)
        load = LoadRun(self.client, items, manner, self.writer, warmup=number < 0)
        engine = self.engines.get(mode)
        before = await read_counters(self.client, engine) if engine else Counters()
        async with AsyncExitStack() as watching:
            watched = cell.workload == WORKLOAD and engine is not None
            kv_use = await watching.enter_async_context(watched_kv_use(self.client, _WATCHED_S)) if watched else {}
            await load.go(ClosedLoop(cell.concurrency))
        spent = (await read_counters(self.client, engine) if engine else Counters()).since(before)
        records = load.progress.records
        result = read_trial(records, load.progress.wall_s)
        if engine:
            result = dataclasses.replace(result, kv_use=kv_use.get(engine.name))
        if engine and cell.concurrency == 1:
            accepted = accepted_per_step(spent.generated, spent.accepted, len(records)) if engine.speculative else 0.0
            share = self._bandwidth_share(mode, result.between_tokens_ms, accepted)
            result = dataclasses.replace(result, bandwidth_share=share)
        return Trial(result, records, was_reset)

    def _bandwidth_share(self, mode: str, token_ms: float | None, accepted: float | None) -> float | None:
        limit = self.limits.get(mode)
        if limit is None or token_ms is None or accepted is None:
            return None
        return limit.share(token_ms * (1.0 + accepted))

    async def _complete(self, cell: Cell, number: int, trials: Mapping[str, Trial]) -> None:
        if self.energy.offered:
            await asyncio.sleep(_SETTLE_S)
        reference = trials.get(self.reference)
        for mode, trial in trials.items():
            alike = likeness(reference.texts, trial.texts) if reference and mode != self.reference else None
            result = dataclasses.replace(
                trial.result,
                j_per_token=await self._j_per_token(trial.records),
                rouge_l=alike and alike.rouge_l,
                same_text=alike and alike.same_text,
            )
            self.results.add(cell, mode, number, result)

    async def _j_per_token(self, records: Sequence[RequestRecord]) -> float | None:
        spent = []
        for record in records:
            joules = await self.energy.joules(self.client, record)
            if joules is None:
                # The trial's are unknown as soon as one request's are, and each look takes time.
                return None
            spent.append(Spent(joules, record.output_tokens))
        return j_per_token(spent)
