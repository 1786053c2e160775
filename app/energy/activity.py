"""What an engine tells the meter: which requests it worked on, when, and how many tokens each took.

All times are seconds of the host's CLOCK_MONOTONIC (`time.monotonic`), which all processes of one host share. A report
from another host, or from before a reboot, is refused by its boot id.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

_SLICE_S = 0.25
"""Unbroken activity is told in slices of this length. Where it begins and ends is what must be told finely."""
_PAUSE_S = 0.01
"""A longer pause between two steps begins a new slice."""


@cache
def boot_id() -> str:
    """Names this boot of this host: its clock and no other."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


class Labels(NamedTuple):
    """What a request's joules are added up by."""

    mode: str
    tenant: str
    request_class: str


class Work(NamedTuple):
    """Tokens of one request within a slice. A prefix that came from the cache is not work."""

    request_id: str
    prefill_tokens: int
    decode_tokens: int


class Slice(NamedTuple):
    """A stretch of time in which the engine ran steps. Without work it is the engine's own (start, wake-up)."""

    start_s: float
    end_s: float
    busy_s: float | None
    """Time spent in steps; None when the engine cannot tell, and then the split falls back to tokens."""
    work: tuple[Work, ...]


@dataclass(frozen=True, slots=True)
class ActivityBatch:
    """All that an engine did from the end of its previous batch up to `through_s`."""

    engine: str
    source: str
    """One life of the engine's process."""
    seq: int
    """Counts from 0 within the source, so that a lost batch leaves a hole."""
    through_s: float
    """Everything that happened before is in this batch or an earlier one."""
    idle: bool
    """No request is under way: nothing will happen before the next batch says so."""
    slices: tuple[Slice, ...] = ()
    labels: Mapping[str, Labels] | None = None
    """Of every request in `slices`, whether told before or not, since an earlier batch may be lost."""
    ended: tuple[str, ...] = ()
    """Requests that will not appear again."""
    devices: tuple[str, ...] = ()
    """UUIDs of the GPUs it runs on; empty means the one device of the meter."""
    resident: bool = True
    resident_bytes: int | None = None
    process_id: int | None = None
    dropped_slices: int = 0
    """Slices that never got into a batch since the source began, because the buffer was full."""
    dropped_batches: int = 0
    """Batches of this source that no meter took in time, up to the moment this one was sent."""
    boot: str = ""


class Ack(NamedTuple):
    """The meter's answer to a batch."""

    generation: int
    settled_through_s: float
    """Activity before this moment is in the ledger; until then the sender keeps its batches."""
    refused: str | None = None
    """Why the batch was not taken; sending it again will not help."""


class ActivityRecorder:
    """Merges an engine's steps into slices. One thread or event loop owns it; a call costs microseconds.

    >>> recorder = ActivityRecorder("fp16")
    >>> recorder.begin("r1", Labels("fp16", "default", "standard"))
    >>> recorder.stepped([Work("r1", 128, 1)])
    >>> recorder.end("r1")
    >>> batch = recorder.take()
    """

    def __init__(
        self,
        engine: str,
        *,
        process_id: int | None = None,
        devices: tuple[str, ...] = (),
        capacity: int = 4096,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.resident = True
        self.resident_bytes: int | None = None
        self.devices = devices
        self._process_id = process_id
        self._clock = clock
        self._source = uuid.uuid4().hex
        self._seq = 0
        self._labels: dict[str, Labels] = {}
        self._ended: list[str] = []
        self._slices: deque[Slice] = deque(maxlen=capacity)
        self._dropped = 0
        self._open: _OpenSlice | None = None
        self._busy_since_s: float | None = None
        self._told: tuple[bool, int | None, tuple[str, ...]] | None = None

    def begin(self, request_id: str, labels: Labels) -> None:
        """The engine took the request. The same id again only renews the labels."""
        if not self._labels:
            self._busy_since_s = self._clock()
        self._labels[request_id] = labels

    def end(self, request_id: str) -> None:
        """The request is over: finished, failed or aborted. What it used stays its own."""
        if request_id in self._labels:
            self._ended.append(request_id)

    def stepped(self, work: Iterable[tuple[str, int, int]]) -> None:
        """The engine finished a step just now, with `Work` of requests.

        It began when the last one ended, or when there was work again.
        """
        now_s = self._clock()
        self.step(self._busy_since_s if self._busy_since_s is not None else now_s, now_s, work)

    def step(
        self, start_s: float, end_s: float, work: Iterable[tuple[str, int, int]] = (), busy_s: float | None = None
    ) -> None:
        """The engine was busy from `start_s` to `end_s` (less when `busy_s` says so). Without work: for itself."""
        current = self._open
        if current is not None and (end_s - current.start_s > _SLICE_S or start_s - current.end_s > _PAUSE_S):
            self._close()
            current = None
        if current is None:
            current = self._open = _OpenSlice(start_s, end_s, 0.0, {})
        current.end_s = max(current.end_s, end_s)
        current.busy_s += end_s - start_s if busy_s is None else busy_s
        tokens = current.work
        for request_id, prefill, decode in work:
            # In place: with hundreds of requests this is what a step costs.
            if (sums := tokens.get(request_id)) is None:
                tokens[request_id] = [prefill, decode]
            else:
                sums[0] += prefill
                sums[1] += decode
        if self._busy_since_s is not None:
            self._busy_since_s = max(self._busy_since_s, end_s)

    def take_news(self) -> ActivityBatch | None:
        """The next batch while requests are under way or anything happened since the last one; else None."""
        told = (self.resident, self.resident_bytes, self.devices)
        if not (self._labels or self._slices or self._open or self._ended or told != self._told):
            return None
        return self.take()

    def take(self) -> ActivityBatch:
        """The next batch: everything since the last one."""
        self._told = (self.resident, self.resident_bytes, self.devices)
        now_s = self._clock()
        self._close()
        ended = tuple(self._ended)
        self._ended.clear()
        slices = tuple(self._slices)
        self._slices.clear()
        labels = {
            w.request_id: self._labels[w.request_id] for s in slices for w in s.work if w.request_id in self._labels
        }
        for request_id in ended:
            self._labels.pop(request_id, None)
        idle = not self._labels
        # A step under way is reported when it ends: until then nothing is known after its beginning.
        through_s = now_s if idle or self._busy_since_s is None else self._busy_since_s
        if idle:
            self._busy_since_s = None
        batch = ActivityBatch(
            self.engine, self._source, self._seq, through_s, idle, slices, labels, ended, self.devices,
            self.resident, self.resident_bytes, self._process_id, self._dropped, boot=boot_id(),
        )  # fmt: skip
        self._seq += 1
        return batch

    def _close(self) -> None:
        if self._open is None:
            return
        if len(self._slices) == self._slices.maxlen:
            self._dropped += 1
        done, self._open = self._open, None
        work = tuple(Work(request_id, prefill, decode) for request_id, (prefill, decode) in done.work.items())
        # Clock readings of different origin may overlap by microseconds; a slice is never busier than it is long.
        self._slices.append(Slice(done.start_s, done.end_s, min(done.busy_s, done.end_s - done.start_s), work))


@dataclass(slots=True)
class _OpenSlice:
    start_s: float
    end_s: float
    busy_s: float
    work: dict[str, list[int]]
