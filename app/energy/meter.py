"""The meter: looks at the devices, settles who used what, and has it written down. A plain object without Ray.

One thread owns it and calls everything. `tick` is the sampling loop's body.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.energy.accounts import Rows
from app.energy.activity import Ack, ActivityBatch, boot_id
from app.energy.attribution import TokenWeights, share_idle
from app.energy.baseline import IdleBaseline
from app.energy.bookkeeper import Bookkeeper, settled_through_s
from app.energy.engine_power import EnginePower
from app.energy.ledger import Fenced
from app.energy.ledger_file import LedgerFile
from app.energy.request_energy import RequestEnergy
from app.energy.rows import CalibrationRow, RequestRecord
from app.energy.samplers.base import GPU_METHODS, Point, Sampler
from app.energy.samplers.null import Meters
from app.energy.settings import EnergySettings
from app.energy.sources import Sources
from app.energy.track import Track

log = logging.getLogger("ray.serve")
_DITHER = 0.2
"""Looks are spread by this part of the interval, so that they do not keep step with what they look at."""
_SETTLE_EVERY_S = 0.25
_CATCH_UP_EVERY_S = 0.5
_CALIBRATE_EVERY_S = 10.0
_FENCED_PAUSE_S = 1.0
_UPDATE_TAKES_AT_MOST_S = 60.0
"""A longer pause between two meters is one in which nothing was served."""


@dataclass(slots=True)
class _Looking:
    track: Track
    next_s: float = 0.0


class Meter:
    """Owns joules: everything that is known of them goes through here."""

    def __init__(
        self,
        meters: Meters,
        settings: EnergySettings,
        ledger_path: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        cpu_clock: Callable[[], float] = time.thread_time,
        observe: Callable[[Rows], None] = lambda rows: None,
        seed: int | None = None,
    ) -> None:
        """`observe` gets the rows of every flush, for metrics; `seed` fixes the dither of the looks.

        `cpu_clock` tells the CPU seconds of the thread that owns the meter: its looks, and all that it answers.
        """
        self.fenced: str | None = None
        """Why this meter has stopped: a later one took over."""
        self._settings, self._meters = settings, meters
        self._clock, self._wall, self._cpu_clock, self._observe = clock, wall, cpu_clock, observe
        self._file = LedgerFile(ledger_path, settings.retention_days, wall, clock)
        self._books = Bookkeeper(self._file, clock, wall)
        self._sources = Sources(settings.late_after_s)
        self._events: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._last_event: str | None = None
        self._token_weights: dict[str, TokenWeights] = {}
        self._random = random.Random(seed)
        self._begun_s = clock()
        self._flushed_s = self._begun_s
        self._flush_at_s = self._begun_s + settings.flush_s
        self._calibrate_at_s = self._begun_s + _CALIBRATE_EVERY_S
        self._settle_from_s = float("-inf")
        self._cpu_begun_s = cpu_clock()
        self._looking = [_Looking(self._track(sampler)) for sampler in meters.samplers]

    def _track(self, sampler: Sampler) -> Track:
        """A device's account, going on from where the ledger says it ended."""
        info, ledger = sampler.info, self._file.ledger
        learned = ledger.last_calibration(info.device) if ledger else None
        last = ledger.last_interval(info.device) if ledger else None
        paused_s = self._begun_s - last.end_monotonic_s if last and last.boot == boot_id() else -1.0
        resume = None
        if last and paused_s >= 0 and info.absolute and last.method == info.method and last.end_counter_j is not None:
            resume = Point(last.end_monotonic_s, last.end_counter_j, info.blur_s)
        watts = {**self._settings.engine_watts, **(learned.engine_watts if learned else {})}
        weights = TokenWeights(self._settings.prefill_token_weight, self._settings.decode_token_weight)
        track = Track(sampler, weights, IdleBaseline(last.idle_w if last else None), EnginePower(watts), resume)
        if resume is None and 0 < paused_s <= _UPDATE_TAKES_AT_MOST_S:
            track.unmeasured_s = paused_s
        return track

    @property
    def _tracks(self) -> list[Track]:
        return [looking.track for looking in self._looking]

    # The loop ---------------------------------------------------------------------------------------------------

    def tick(self) -> float:
        """Look, settle, and flush what is due; returns the seconds until the next call."""
        if self.fenced is not None:
            return _FENCED_PAUSE_S
        now_s = self._clock()
        for looking in self._looking:
            if now_s >= looking.next_s:
                self._look(looking)
        self._settle(now_s)
        if now_s >= self._flush_at_s:
            self.flush()
        soonest_s = min((looking.next_s for looking in self._looking), default=self._flush_at_s)
        return max(min(soonest_s, self._flush_at_s) - self._clock(), 0.001)

    def _look(self, looking: _Looking) -> None:
        now_s = self._clock()
        looking.next_s = now_s + looking.track.sampler.period_s * self._random.uniform(1 - _DITHER, 1 + _DITHER)
        if event := looking.track.look(now_s):
            self._events[event.split(":")[0]] += 1
            self._last_event = f"{looking.track.sampler.info.device}: {event}"
            log.warning("energy meter: %s", self._last_event)

    def _settle(self, now_s: float) -> None:
        known_s = self._sources.known_until(now_s)
        if known_s < self._settle_from_s:
            return
        # Not at every look: longer windows of unbroken activity tell no less and cost less.
        self._settle_from_s = known_s + _SETTLE_EVERY_S
        for track in self._tracks:
            settlements = track.settle(known_s)
            info = track.sampler.info
            for settlement in settlements:
                shares: dict[str, float] = {}
                if self._settings.idle_sharing == "residency" and settlement.idle_j is not None:
                    shares = share_idle(settlement.idle_j, self._sources.residents(info.device, self._only_one))
                self._books.book(info, settlement, shares)

    @property
    def _only_one(self) -> bool:
        return len(self._looking) == 1

    def flush(self) -> None:
        """Write what is settled, now."""
        now_s = self._flushed_s = self._clock()
        self._flush_at_s = now_s + self._settings.flush_s
        self._books.requests.abandon(self._sources.retire(now_s))
        try:
            rows = self._books.flush(self._tracks, self._calibrations(now_s))
        except Fenced as fence:
            self.fenced = str(fence)
            log.info("energy meter: %s; stopping", fence)
            return
        self._observe(rows)

    def _calibrations(self, now_s: float) -> list[CalibrationRow]:
        if now_s < self._calibrate_at_s:
            return []
        self._calibrate_at_s = now_s + _CALIBRATE_EVERY_S
        return self._learned()

    def _learned(self) -> list[CalibrationRow]:
        at_s = self._wall()
        return [
            CalibrationRow(at_s, track.sampler.info.device, track.baseline.idle_w, track.power.known_watts())
            for track in self._tracks
        ]

    # What others say --------------------------------------------------------------------------------------------

    def report(self, batch: ActivityBatch) -> Ack:
        """An engine's activity.

        Raises:
            Fenced: this meter was overtaken; send it again, to the new one.
        """
        if self.fenced is not None:
            raise Fenced(self.fenced)
        if refused := self._refusal(batch):
            self._refused[refused.split(":")[0]] += 1
            return Ack(self.generation, self._books.durable_s, refused)
        if self._sources.take(batch, self._clock()):
            self._books.requests.take(batch)
            for track in self._tracks:
                if self._only_one or track.sampler.info.device in batch.devices:
                    if batch.process_id is not None:
                        track.sampler.watch(batch.engine, batch.process_id)
                    track.add(batch.engine, batch.slices)
        return Ack(self.generation, self._books.durable_s)

    def _refusal(self, batch: ActivityBatch) -> str | None:
        if batch.boot != boot_id():
            return "other_host: its clock is not this meter's"
        infos = [track.sampler.info for track in self._tracks]
        gpus = {info.device for info in infos if info.method in GPU_METHODS}
        if batch.devices and gpus and gpus.isdisjoint(batch.devices):
            return f"other_device: it runs on {', '.join(batch.devices)}, and measured are {', '.join(sorted(gpus))}"
        if len(gpus) > 1 and not batch.devices:
            return "no_device: there are several GPUs, and the report names none of them"
        latest_s = self._clock() + 1.0
        if any(not piece.start_s <= piece.end_s <= latest_s for piece in batch.slices):
            return "garbage: a slice ends before it begins, or in the future"
        return None

    def record(self, records: Sequence[RequestRecord]) -> int:
        """The controller's rows of finished requests; returns how many were refused because they hold text.

        Raises:
            Fenced: as with `report`.
            sqlite3.Error: none was written; send them again.
        """
        if self.fenced is not None:
            raise Fenced(self.fenced)
        return self._file.record(records)

    def weigh(self, tokens: Mapping[str, TokenWeights], watts: Mapping[str, float]) -> None:
        """What a profile measured of engines: joules per token, and watts above idle while busy.

        The settings' weights stay for every engine that is not named. Telling it again changes nothing.
        """
        self._token_weights = dict(tokens)
        for track in self._tracks:
            track.weigh(tokens, watts)

    # What others ask --------------------------------------------------------------------------------------------

    def catch_up(self) -> None:
        """Settle and write what is known, for one who is about to read the ledger; done a moment ago, it is enough."""
        now_s = self._clock()
        if self.fenced is None and now_s - self._flushed_s >= _CATCH_UP_EVERY_S:
            self._settle(now_s)
            self.flush()

    def request(self, request_id: str, tenant: str | None = None) -> dict[str, Any]:
        """A request's record (None while it runs) and its energy: the latest of a name, of one `tenant` or of all.

        Raises:
            UnknownRequest
            sqlite3.Error: the ledger cannot be read now.
        """
        return self._books.request(request_id, settled_through_s(self._tracks), bool(self._looking), tenant)

    def energy(self, request_id: str) -> RequestEnergy | None:
        """What a request has used so far; None when the meter has not heard of it.

        Raises:
            sqlite3.Error: the ledger cannot be read now.
        """
        return self._books.energy(request_id, settled_through_s(self._tracks), bool(self._looking))

    @property
    def generation(self) -> int:
        """This meter's number in the ledger; 0 while there is no ledger."""
        return self._file.ledger.generation if self._file.ledger else 0

    def state(self) -> dict[str, Any]:
        """What is measured, how, and what goes wrong, as JSON."""
        now_s = self._clock()
        settled_s = settled_through_s(self._tracks)
        cpu_s, life_s = self._cpu_clock() - self._cpu_begun_s, now_s - self._begun_s
        return {
            "measuring": bool(self._looking) and self.fenced is None,
            "devices": [track.state() for track in self._tracks],
            "passed_over": list(self._meters.passed_over),
            "generation": self.generation,
            "fenced": self.fenced,
            "idle_sharing": self._settings.idle_sharing,
            "token_weights_j": {engine: weights._asdict() for engine, weights in self._token_weights.items()},
            "settled_s_ago": now_s - settled_s if abs(settled_s) < float("inf") else None,
            "lost_reports": self._sources.lost_reports,
            "dropped_reports": self._sources.dropped_batches,
            "dropped_slices": self._sources.dropped_slices,
            "refused_reports": dict(self._refused),
            "sampler_events": dict(self._events),
            "last_sampler_event": self._last_event,
            "ledger": {
                "path": str(self._file.path),
                "message": self._file.message,
                "backlog": self._books.backlog,
                "lost_flushes": self._books.lost_flushes,
            },
            "cpu_share": cpu_s / life_s if life_s > 0 else None,
        }

    def close(self) -> None:
        """Write what is settled and what was learned; let go of devices and file."""
        if self.fenced is None:
            self._settle(self._clock())
            self._calibrate_at_s = float("-inf")
            self.flush()
        for track in self._tracks:
            track.sampler.close()
        self._file.close()
