"""The way to the meter: engines send activity, the controller sends records. Nothing here makes its caller wait.

An engine:

    recorder = ActivityRecorder(name, process_id=os.getpid())
    sender = ActivitySender(recorder, HandlePort(meter))
    asyncio.create_task(sender.run())
    ...
    recorder.begin(key, Labels(mode, tenant, request_class))   # a request was taken
    recorder.stepped([Work(key, prefill, decode), ...])        # after each engine step
    recorder.end(key)                                          # finished, failed or aborted

The controller:

    records = RecordSender(HandlePort(meter))
    asyncio.create_task(records.run())
    ...
    records.put(RequestRecord(key, ...))
    ...
    weights = WeightSender(HandlePort(meter))
    asyncio.create_task(weights.run())
    ...
    weights.put({"fp16": TokenWeights(0.02, 0.16)}, {"fp16": 110.0})   # once the profile is read
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from app.energy.activity import Ack, ActivityBatch, ActivityRecorder
from app.energy.attribution import TokenWeights
from app.energy.rows import RequestRecord

log = logging.getLogger("ray.serve")
FLUSH_S = 0.25
_SIGN_OF_LIFE_S = 10.0
_CALL_TIMEOUT_S = 5.0
_LONGEST_PAUSE_S = 5.0
_KEEP_BATCHES = 240
"""A minute of a busy engine's batches: what a meter that comes back can still be told."""
_KEEP_RECORDS = 4096
_RECORDS_AT_ONCE = 256
_WEIGH_AGAIN_S = 10.0
"""A meter that was started again knows no weights for so long, and splits by those of its settings."""


class MeterPort(Protocol):
    """How to reach the meter; any exception means that nothing was taken."""

    async def report(self, batch: ActivityBatch) -> Ack: ...

    async def record(self, records: Sequence[RequestRecord]) -> int:
        """How many of them were refused."""
        ...

    async def weigh(self, tokens: Mapping[str, TokenWeights], watts: Mapping[str, float]) -> None: ...


class HandlePort:
    """The meter behind a Serve deployment handle."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def report(self, batch: ActivityBatch) -> Ack:
        return await self._handle.report.remote(batch)  # type: ignore[no-any-return]

    async def record(self, records: Sequence[RequestRecord]) -> int:
        return await self._handle.record.remote(records)  # type: ignore[no-any-return]

    async def weigh(self, tokens: Mapping[str, TokenWeights], watts: Mapping[str, float]) -> None:
        await self._handle.weigh.remote(tokens, watts)


class ActivitySender:
    """Sends a recorder's batches, and again to a new meter what the old one had not yet written down."""

    def __init__(
        self,
        recorder: ActivityRecorder,
        port: MeterPort,
        *,
        flush_s: float = FLUSH_S,
        keep: int = _KEEP_BATCHES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.dropped_batches = 0
        """Batches that no meter can be told of any more. A meter sees the hole in their numbers, but for one that began
        later: so every batch tells their count."""
        self.refused: str | None = None
        """Why the meter refused the last batch that it refused."""
        self._recorder, self._port, self._clock = recorder, port, clock
        self._flush_s, self._keep = flush_s, keep
        self._kept: deque[ActivityBatch] = deque()
        self._delivered = 0
        """How many of the kept batches, from the left, the present meter has."""
        self._generation: int | None = None
        self._sent_s = float("-inf")

    async def run(self) -> None:
        """Flush for ever; while the meter is out of reach, less and less often."""
        await _flush_for_ever(self.flush, self._flush_s)

    async def flush(self) -> bool:
        """Send what there is; False when the meter could not be reached."""
        self._take()
        while self._delivered < len(self._kept):
            batch = replace(self._kept[self._delivered], dropped_batches=self.dropped_batches)
            try:
                ack = await asyncio.wait_for(self._port.report(batch), _CALL_TIMEOUT_S)
            except asyncio.CancelledError:
                raise
            except Exception as error:
                log.debug("the energy meter took nothing: %s", error)
                return False
            self._acknowledge(ack)
        return True

    def _take(self) -> None:
        now_s = self._clock()
        batch = self._recorder.take_news()
        if batch is None and now_s - self._sent_s < _SIGN_OF_LIFE_S:
            return
        self._sent_s = now_s
        self._kept.append(batch or self._recorder.take())
        while len(self._kept) > self._keep:
            self._kept.popleft()
            if self._delivered:
                self._delivered -= 1
            else:
                self.dropped_batches += 1

    def _acknowledge(self, ack: Ack) -> None:
        if self._generation not in (None, ack.generation):
            # A new meter: it has this batch, but of the earlier ones only what the old one wrote down.
            self._delivered = 0
        else:
            self._delivered += 1
        self._generation = ack.generation
        if ack.refused is not None and ack.refused != self.refused:
            log.error("the energy meter refused a report: %s", ack.refused)
            self.refused = ack.refused
        while self._delivered and self._kept[0].through_s <= ack.settled_through_s:
            self._kept.popleft()
            self._delivered -= 1


class RecordSender:
    """Sends the controller's records in batches; keeps them while the meter is out of reach, up to a limit."""

    def __init__(self, port: MeterPort, *, flush_s: float = 2 * FLUSH_S, keep: int = _KEEP_RECORDS) -> None:
        self.dropped_records = 0
        """Records that are in no ledger: those there was no room for, and those that the meter refused."""
        self._port, self._flush_s, self._keep = port, flush_s, keep
        self._waiting: deque[RequestRecord] = deque()

    def put(self, record: RequestRecord) -> None:
        """Send it soon. Returns at once; when the buffer is full the oldest record is dropped and counted."""
        self._waiting.append(record)
        if len(self._waiting) > self._keep:
            self._waiting.popleft()
            self.dropped_records += 1

    async def run(self) -> None:
        """Flush for ever; while the meter is out of reach, less and less often."""
        await _flush_for_ever(self.flush, self._flush_s)

    async def flush(self) -> bool:
        """Send what there is; False when the meter could not be reached."""
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(_RECORDS_AT_ONCE, len(self._waiting)))]
            try:
                refused = await asyncio.wait_for(self._port.record(batch), _CALL_TIMEOUT_S)
            except BaseException as error:
                # Sent twice is harmless: the ledger keeps the first row of a request.
                self._waiting.extendleft(reversed(batch))
                if not isinstance(error, Exception):
                    raise
                log.debug("the energy meter took no records: %s", error)
                return False
            # Not in one expression with the await: `put` may count in the meantime.
            self.dropped_records += refused
        return True


class WeightSender:
    """Tells the meter what a profile measured of each engine, and again from time to time: a new meter forgot it."""

    def __init__(self, port: MeterPort, *, again_s: float = _WEIGH_AGAIN_S) -> None:
        self._port, self._again_s = port, again_s
        self._weights: tuple[Mapping[str, TokenWeights], Mapping[str, float]] | None = None
        self._news = asyncio.Event()

    def put(self, tokens: Mapping[str, TokenWeights], watts: Mapping[str, float]) -> None:
        """Joules per token and watts above idle while busy, by engine; takes the place of what was put before."""
        self._weights = tokens, watts
        self._news.set()

    async def run(self) -> None:
        """Send for ever; a meter that is out of reach is told later."""
        await self._news.wait()
        while True:
            self._news.clear()
            await self._send()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), self._again_s)

    async def _send(self) -> None:
        assert self._weights is not None
        try:
            await asyncio.wait_for(self._port.weigh(*self._weights), _CALL_TIMEOUT_S)
        except Exception as error:
            log.debug("the energy meter took no weights: %s", error)


async def _flush_for_ever(flush: Callable[[], Awaitable[bool]], flush_s: float) -> None:
    pause_s = flush_s
    while True:
        await asyncio.sleep(pause_s)
        pause_s = flush_s if await flush() else min(2 * pause_s, _LONGEST_PAUSE_S)
