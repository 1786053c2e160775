"""Sends the items of a run under an arrival process and writes every result as it comes."""

import dataclasses
import gc
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from loadgen.arrivals import Schedule, drive_closed, drive_open
from loadgen.client import Call, OpenAIClient
from loadgen.records import Outcome, RecordWriter, RequestRecord
from loadgen.workloads import Item, body_of

# Between the first due time and the making of the tasks that wait for it.
_LEAD_S = 0.05


@dataclasses.dataclass(frozen=True, slots=True)
class Manner:
    """How items are asked for: the model name, streamed or not, and how many are given up half-way."""

    model: str
    stream: bool = True
    exact_output: bool = True
    cancel_fraction: float = 0.0
    seed: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`concurrency` clients, each of which sends its next request when it has its answer."""

    concurrency: int


Arrival = ClosedLoop | Schedule


@dataclasses.dataclass(slots=True)
class Progress:
    """Records so far, in order of their ends; `wall_s` runs from the first send."""

    records: list[RequestRecord] = dataclasses.field(default_factory=list)
    started_at: float | None = None
    ended_at: float | None = None
    planned: int = 0

    @property
    def wall_s(self) -> float:
        if self.started_at is None:
            return 0.0
        return (self.ended_at or time.perf_counter()) - self.started_at


class LoadRun:
    """One run. `progress` is complete at any moment, also when the run is cancelled."""

    def __init__(
        self,
        client: OpenAIClient,
        items: Sequence[Item],
        manner: Manner,
        writer: RecordWriter,
        *,
        warmup: bool = False,
    ) -> None:
        self.progress = Progress(planned=sum(1 + len(item.follow_ups) for item in items))
        self._client = client
        self._items = items
        self._manner = manner
        self._writer = writer
        self.on_record: Callable[[RequestRecord], None] = lambda record: None
        self._warmup = warmup
        # Encoding takes a millisecond for a long prompt: done when a request is due, it would make it late.
        self._calls = [
            self._call(index, body_of(item, manner.model, **_answer(manner))) for index, item in enumerate(items)
        ]
        self._origin = 0.0

    async def go(self, arrival: Arrival) -> None:
        """Sends everything and waits for every end. Cancelled, it gives up what is under way and records it so."""
        # A full collection over the prepared requests takes longer than a send may be late.
        gc.collect()
        gc.freeze()
        self._origin = self.progress.started_at = time.perf_counter()
        try:
            if isinstance(arrival, ClosedLoop):
                await drive_closed(len(self._items), arrival.concurrency, self._conversation)
            else:
                offsets_s = arrival.offsets_s(len(self._items), self._manner.seed)
                self._origin = self.progress.started_at = time.perf_counter() + _LEAD_S
                await drive_open(offsets_s, self._conversation, self._origin)
        finally:
            self.progress.ended_at = time.perf_counter()
            gc.unfreeze()

    async def _conversation(self, index: int, due: float | None) -> None:
        item, call = self._items[index], self._calls[index]
        messages = list(item.messages)
        for turn in range(1 + len(item.follow_ups)):
            record = await self._turn(call, index, turn, due if turn == 0 else None)
            if record.outcome is not Outcome.OK or turn == len(item.follow_ups):
                return
            answer = {"role": "assistant", "content": record.text}
            messages += [answer, {"role": "user", "content": item.follow_ups[turn]}]
            body = body_of(dataclasses.replace(item, messages=messages), self._manner.model, **_answer(self._manner))
            call = self._call(index, body)

    async def _turn(self, call: Call, index: int, turn: int, due: float | None) -> RequestRecord:
        record = RequestRecord(index=index, workload=self._items[index].workload, turn=turn, warmup=self._warmup)
        if due is not None:
            record.scheduled_s = due - self._origin
        try:
            return await self._client.send(call, record, due=due, origin=self._origin)
        finally:
            self.progress.records.append(record)
            self._writer.write(record)
            self.on_record(record)

    def _call(self, index: int, body: dict[str, Any]) -> Call:
        rng = random.Random(f"cancel/{self._manner.seed}/{index}")
        gives_up = not self._warmup and rng.random() < self._manner.cancel_fraction
        frames = rng.randint(1, max(1, int(body["max_tokens"]) - 1)) if gives_up else None
        return Call.of(body, cancel_after_frames=frames)


def _answer(manner: Manner) -> dict[str, bool]:
    return {"stream": manner.stream, "exact_output": manner.exact_output}
