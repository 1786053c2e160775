"""Who reports activity: what is missing of it, who is resident, and up to which moment everything is known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from app.energy.activity import ActivityBatch

_IDLE_GRACE_S = 0.75
"""An idle engine may have begun to work just now: its report is three flushes away at most."""
_HOLD_S = 30.0
"""An engine within one long step holds settling back, but not for ever: it may hang."""
RETIRE_AFTER_S = 60.0
"""An engine that has not been heard of for so long is gone (an idle one sends a sign of life every 10 s)."""


@dataclass(slots=True)
class Source:
    """One life of one engine's process."""

    engine: str
    next_seq: int
    heard_s: float
    through_s: float
    idle: bool
    devices: tuple[str, ...]
    resident: bool
    resident_bytes: int | None
    dropped_slices: int = 0
    dropped_batches: int = 0
    missing: set[int] = field(default_factory=set)
    first_seq: int = 0
    resent: set[int] = field(default_factory=set)
    """Batches from before `first_seq`, which an earlier meter had but did not write down."""


class Sources:
    """All engines that report to one meter."""

    def __init__(self, late_after_s: float) -> None:
        self._late_after_s = late_after_s
        self._sources: dict[str, Source] = {}
        self._lost_before = 0
        self._dropped_before = 0
        self._dropped_batches_before = 0

    def take(self, batch: ActivityBatch, now_s: float) -> bool:
        """Note the batch; False when it was here before and must not count again."""
        source = self._sources.get(batch.source)
        if source is None:
            # A source that is older than this meter: what came before is in the ledger, or will be sent again.
            source = self._sources[batch.source] = Source(
                batch.engine, batch.seq, now_s, batch.through_s, batch.idle, batch.devices, True, None,
                first_seq=batch.seq,
            )  # fmt: skip
        resent = batch.seq < source.first_seq and batch.seq not in source.resent
        if resent:
            source.resent.add(batch.seq)
        new = batch.seq >= source.next_seq or batch.seq in source.missing or resent
        if batch.seq >= source.next_seq:
            source.missing.update(range(source.next_seq, batch.seq))
            source.next_seq = batch.seq + 1
            source.idle, source.devices = batch.idle, batch.devices
            source.resident, source.resident_bytes = batch.resident, batch.resident_bytes
            source.dropped_slices = max(source.dropped_slices, batch.dropped_slices)
        source.dropped_batches = max(source.dropped_batches, batch.dropped_batches)
        source.missing.discard(batch.seq)
        source.heard_s = now_s
        source.through_s = max(source.through_s, batch.through_s)
        return new

    def known_until(self, now_s: float) -> float:
        """Activity before this moment is reported, as far as it ever will be."""
        until_s = now_s - _IDLE_GRACE_S
        for source in self._sources.values():
            if not source.idle and now_s - source.heard_s <= self._late_after_s:
                until_s = min(until_s, max(source.through_s, now_s - _HOLD_S))
        return until_s

    def retire(self, now_s: float) -> Iterator[str]:
        """Forget sources that are gone, and name them."""
        for name, source in list(self._sources.items()):
            if now_s - source.heard_s > RETIRE_AFTER_S:
                self._lost_before += len(source.missing)
                self._dropped_before += source.dropped_slices
                self._dropped_batches_before += source.dropped_batches
                del self._sources[name]
                yield name

    def residents(self, device: str, only_device: bool) -> dict[str, int | None]:
        """Memory in bytes (None: not told) of each engine that is resident on a device."""
        return {
            source.engine: source.resident_bytes
            for source in self._sources.values()
            if source.resident and (only_device or device in source.devices)
        }

    @property
    def lost_reports(self) -> int:
        """Batches that never arrived, among those since this meter first heard of their engine."""
        return self._lost_before + sum(len(source.missing) for source in self._sources.values())

    @property
    def dropped_slices(self) -> int:
        """Slices that an engine had no room to keep until they were sent."""
        return self._dropped_before + sum(source.dropped_slices for source in self._sources.values())

    @property
    def dropped_batches(self) -> int:
        """Batches that engines gave up because no meter took them; those that this one could see are lost as well."""
        return self._dropped_batches_before + sum(source.dropped_batches for source in self._sources.values())
