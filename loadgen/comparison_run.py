"""Carries out a comparison: one policy's run after the other, each on the trace that its block shares."""

import dataclasses
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from app.routing.tags import tag_of
from loadgen.arrivals import drive_open
from loadgen.client import INCLUDE_HEADER, Call, OpenAIClient
from loadgen.comparison import LIGHT, SATURATING, STATIC, Row
from loadgen.energy_facts import EnergySource, request_record
from loadgen.prompts import PromptMaker
from loadgen.recipe import Recipe, items_of, trace_of
from loadgen.records import Outcome, RecordWriter, RequestRecord
from loadgen.workloads import Item, body_of

POLICY_HEADER = "x-modeswitch-policy"
DECISION = "decision"
BARE = "bare"
_LEAD_S = 0.1
MISSED_IN_A_ROW = 5
"""Requests without energy, one after the other, that say the rest of a run has none either."""


class CompareRefused(Exception):
    """The comparison cannot be made as it was asked for; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """The command's options; see their help texts."""

    base_url: str
    bare_url: str | None
    policies: tuple[str, ...]
    allow: tuple[str, ...]
    recipe: Recipe
    rates_per_s: Mapping[str, float]
    requests: Mapping[str, int]
    rounds: int
    budget_s: float
    tokenizer: Path | None
    api_key: str | None
    out: Path
    seed: int


@dataclasses.dataclass(slots=True)
class Found:
    """Results so far, kept outside of the coroutine, so that an interruption loses nothing."""

    policies: tuple[str, ...] = ()
    rows: list[Row] = dataclasses.field(default_factory=list)
    features: dict[tuple[str, int, int], dict[str, Any]] = dataclasses.field(default_factory=dict)
    failures: list[str] = dataclasses.field(default_factory=list)
    ended: str = "interrupted"
    engines: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One policy on one trace."""

    policy: str
    rate: str
    round: int


def runs_of(policies: Sequence[str], rounds: int, seed: int) -> list[list[Run]]:
    """Blocks of runs that share a trace: both rates in every round, the policies in a fresh random order in each."""
    blocks = []
    for number in range(rounds):
        for rate in (LIGHT, SATURATING):
            order = list(policies)
            random.Random(f"compare/{seed}/{number}/{rate}").shuffle(order)
            blocks.append([Run(policy, rate, number) for policy in order])
    return blocks


@dataclasses.dataclass(slots=True)
class ComparisonRuns:
    """The running comparison: one run at a time, so that policies do not disturb one another."""

    options: Options
    client: OpenAIClient
    bare: OpenAIClient | None
    served: str
    bare_model: str
    maker: PromptMaker
    writer: RecordWriter
    found: Found
    decisions: bool
    """The server tells its decisions to a client that asks."""
    records_kept: bool
    """The server keeps a record of each request, with its energy."""
    salt: str

    async def run(self, run: Run, on_end: Callable[[], None]) -> None:
        """One run. Cancelled, it gives up what is under way and keeps what has ended."""
        options = self.options
        await self.client.reset_prefix_cache()
        seed = options.seed + run.round
        slots = trace_of(options.recipe, options.rates_per_s[run.rate], options.requests[run.rate], seed)
        items = items_of(options.recipe, slots, self.maker, seed, f"{self.salt}/{run}")
        calls = [self._call(run.policy, item) for item in items]
        records = [RequestRecord(index=slot.index, workload=slot.name) for slot in slots]
        client = self.client if run.policy != BARE or self.bare is None else self.bare
        origin = time.perf_counter() + _LEAD_S

        async def send(index: int, due: float | None) -> None:
            records[index].scheduled_s = slots[index].due_s
            try:
                await client.send(calls[index], records[index], due=due, origin=origin)
            finally:
                self.writer.write(records[index])
                on_end()

        try:
            await drive_open([slot.due_s for slot in slots], send, origin)
        finally:
            sent = [record for record in records if record.scheduled_s is not None]
            self.found.rows += [_row(run, items[record.index], record) for record in sent]
            self._note_failures(run, sent)
        await self._settle(run, records)

    def _call(self, policy: str, item: Item) -> Call:
        if policy == BARE:
            return Call.of(body_of(item, self.bare_model, stream=True, exact_output=True))
        call = Call.of(body_of(item, self.served, stream=True, exact_output=True))
        asked = {POLICY_HEADER: policy} | ({INCLUDE_HEADER: DECISION} if self.decisions else {})
        return dataclasses.replace(call, headers={**call.headers, **asked})

    def _note_failures(self, run: Run, records: Sequence[RequestRecord]) -> None:
        bad = [record for record in records if record.outcome not in (Outcome.OK, Outcome.INTERRUPTED)]
        if bad:
            example = f"{bad[0].outcome}: {bad[0].error}"
            self.found.failures.append(
                f"round {run.round + 1}, {run.rate}, {run.policy}: {len(bad)} of {len(records)} failed ({example})"
            )

    async def _settle(self, run: Run, records: Sequence[RequestRecord]) -> None:
        """Energy and features, which the server knows once a request is over. Asked for after the run, not in it."""
        answered = [record for record in records if record.outcome is Outcome.OK]
        joules = await settled_joules(self.client, answered) if self.records_kept and run.policy != BARE else {}
        places = {(row.policy, row.rate, row.round, row.index): place for place, row in enumerate(self.found.rows)}
        for record in answered:
            place = places[run.policy, run.rate, run.round, record.index]
            self.found.rows[place] = dataclasses.replace(self.found.rows[place], energy_j=joules.get(record.index))
            if run.policy.startswith(STATIC):
                features = await self._features(record)
                if features is not None:
                    self.found.features.setdefault((run.rate, run.round, record.index), features)

    async def _features(self, record: RequestRecord) -> dict[str, Any] | None:
        decision = (record.extras or {}).get(DECISION)
        features = decision.get("features") if isinstance(decision, dict) else None
        if features is None:
            features = (await request_record(self.client, record) or {}).get("features")
        return features if isinstance(features, dict) and features else None

    async def check(self, policy: str) -> tuple[str, ...]:
        """One request, which also warms up; the reasons why the server does not do as it is asked, if it does not."""
        recipe = self.options.recipe
        slot = trace_of(recipe, 1.0, 1, self.options.seed)[0]
        item = items_of(recipe, [slot], self.maker, self.options.seed, f"{self.salt}/warm-up/{policy}")[0]
        item = dataclasses.replace(item, output_tokens=4)
        client = self.bare if policy == BARE and self.bare is not None else self.client
        record = await client.send(self._call(policy, item))
        if record.outcome is not Outcome.OK:
            return (f"{policy}: {record.outcome}: {record.error}",)
        if policy.startswith(STATIC) and record.mode not in (None, policy.removeprefix(STATIC)):
            return (f"{policy}: the server used {record.mode} instead",)
        used = (record.extras or {}).get(DECISION)
        if isinstance(used, dict) and policy != BARE and used.get("policy") != policy:
            stood_in = used.get("stands_in_for")
            why = "; is a profile loaded?" if stood_in == policy else "; does it allow clients to name a policy?"
            return (f"{policy}: the server decided by {used.get('policy')}{why}",)
        return ()


async def settled_joules(client: OpenAIClient, records: Sequence[RequestRecord]) -> dict[int, float]:
    """Joules by index, of those that the server tells; each look for one that it does not tell takes time."""
    source = EnergySource(offered=True)
    found: dict[int, float] = {}
    missed: list[RequestRecord] = []
    in_a_row = 0
    for record in records:
        joules = await source.joules(client, record)
        if joules is None:
            missed.append(record)
            in_a_row += 1
            if in_a_row >= MISSED_IN_A_ROW:
                return found
        else:
            found[record.index], in_a_row = joules, 0
    # What ended last may not have been settled then.
    for record in missed:
        joules = await source.joules(client, record)
        if joules is not None:
            found[record.index] = joules
    return found


def _row(run: Run, item: Item, record: RequestRecord) -> Row:
    late_ms = 1000 * (record.sent_s - (record.scheduled_s or 0.0))
    return Row(
        policy=run.policy,
        name=record.workload,
        tag=tag_of(item.messages[-1]["content"]).tag.value,
        mode=record.mode,
        rate=run.rate,
        round=run.round,
        index=record.index,
        status=record.outcome.value,
        latency_ms=record.total_ms + max(0.0, late_ms),
        ttft_ms=record.ttft_ms,
        energy_j=None,
        output_tokens=record.output_tokens,
        started_s=record.scheduled_s or 0.0,
    )
