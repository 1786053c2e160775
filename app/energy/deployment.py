"""The meter as a Serve deployment: one replica beside the device, without a share of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ray import serve

from app.energy.activity import Ack, ActivityBatch
from app.energy.attribution import TokenWeights
from app.energy.ledger_reader import LedgerReader
from app.energy.meter import Meter
from app.energy.meter_thread import MeterStopped, MeterThread
from app.energy.metrics import EnergyMetrics
from app.energy.queries import PastRow, TimeRange, Totals, UnknownRequest
from app.energy.request_energy import UNMEASURED, RequestEnergy
from app.energy.rows import RequestRecord
from app.energy.settings import EnergySettings
from app.telemetry import ENERGY_METRICS, RayTelemetry

log = logging.getLogger("ray.serve")
T = TypeVar("T")
_MAX_ONGOING_REQUESTS = 1024
_TELL_STATE_EVERY_S = 5.0
_LOOK_FOR_FINAL_EVERY_S = 0.05
_CLOSE_WITHIN_S = 3.0
_OVERTAKEN_FOR_S = 10.0
"""An update's overlap is over by then: a meter that was overtaken and still runs may be the only one."""


def meter_application(
    settings: EnergySettings, ledger_path: Path, device_resource: str | None = None
) -> serve.Application:
    """The meter's deployment, bound. It asks for no GPU, so Ray hides all of them and CUDA is never initialised.

    `device_resource` keeps it on the device's node where `settings.resource` names none.
    """
    resource = settings.resource or device_resource
    return serve.deployment(
        EnergyMeter,
        name="energy",
        num_replicas=1,
        max_ongoing_requests=_MAX_ONGOING_REQUESTS,
        graceful_shutdown_timeout_s=2 * _CLOSE_WITHIN_S,
        ray_actor_options={
            "num_cpus": settings.num_cpus,
            "num_gpus": 0,
            "resources": {resource: 0.001} if resource else {},
        },
    ).bind(settings, ledger_path)


class EnergyMeter:
    """Runs a `Meter` on a thread of its own. The constructor only remembers; what fails, fails in the background."""

    def __init__(self, settings: EnergySettings, ledger_path: Path) -> None:
        self._settings, self._ledger_path = settings, ledger_path
        self._metrics: EnergyMetrics | None = None
        self._reader = LedgerReader(ledger_path)
        self._tell_at_s = 0.0
        self._overtaken: tuple[float, int] | None = None
        """Since when, and which generation this meter was."""
        self._thread = MeterThread(self._open, self._tell)
        self._thread.start()

    def _open(self) -> Meter:
        # Here, because whoever wires the application together needs no sampler's library.
        from app.energy.samplers.choose import choose_meters

        metrics = self._metrics = EnergyMetrics(RayTelemetry(ENERGY_METRICS))
        meters = choose_meters(self._settings)
        for why in meters.passed_over:
            log.info("energy is not measured by %s", why)
        return Meter(meters, self._settings, self._ledger_path, observe=metrics.flushed)

    def _tell(self, meter: Meter) -> None:
        if meter.fenced is not None and self._overtaken is None:
            self._overtaken = time.monotonic(), meter.generation
        if self._metrics is not None and (now_s := time.monotonic()) >= self._tell_at_s:
            self._tell_at_s = now_s + _TELL_STATE_EVERY_S
            self._metrics.told(meter.state())

    async def _ask(self, function: Callable[[Meter], T]) -> T:
        return await asyncio.wrap_future(self._thread.call(function))

    async def report(self, batch: ActivityBatch) -> Ack:
        """See `Meter.report`."""
        return await self._ask(lambda meter: meter.report(batch))

    async def record(self, records: Sequence[RequestRecord]) -> int:
        """See `Meter.record`."""
        return await self._ask(lambda meter: meter.record(records))

    async def weigh(self, tokens: Mapping[str, TokenWeights], watts: Mapping[str, float]) -> None:
        """See `Meter.weigh`."""
        await self._ask(lambda meter: meter.weigh(tokens, watts))

    async def totals(
        self, since_s: float | None = None, until_s: float | None = None, tenant: str | None = None
    ) -> Totals:
        """Totals by mode, engine, tenant and class, of one `tenant` or of all; seconds since 1970.

        Raises:
            BadRange: the range makes no sense; a caller that checks a user's with `TimeRange` first never gets it.
            sqlite3.Error: the ledger cannot be read now.
        """
        span = TimeRange(since_s, until_s)
        span.check_not_future(time.time())
        await self._ask(Meter.catch_up)
        return await self._reader.totals(span, tenant)

    async def past(self, model: str, limit: int) -> list[PastRow]:
        """The last `limit` requests of a model that an engine got, oldest first.

        Raises:
            sqlite3.Error: the ledger cannot be read now.
        """
        # Answered once the ledger is open.
        await self._ask(Meter.catch_up)
        return await self._reader.past(model, limit)

    async def request(self, request_id: str, tenant: str | None = None) -> dict[str, Any] | None:
        """See `Meter.request`; None for an unknown id, because Serve logs every exception with its traceback."""

        def ask(meter: Meter) -> dict[str, Any] | None:
            try:
                return meter.request(request_id, tenant)
            except UnknownRequest:
                return None

        return await self._ask(ask)

    async def energy(self, request_id: str, wait_s: float = 0.0) -> RequestEnergy:
        """What a request has used; waits up to `wait_s` for the last of it to be settled, then says `partial`."""
        deadline_s = time.monotonic() + wait_s
        while True:
            energy = await self._ask(lambda meter: meter.energy(request_id))
            if energy is not None and energy.status != "partial":
                return energy
            if time.monotonic() >= deadline_s:
                return energy or UNMEASURED
            await asyncio.sleep(_LOOK_FOR_FINAL_EVERY_S)

    async def state(self) -> dict[str, Any]:
        """See `Meter.state`."""
        return await self._ask(lambda meter: meter.state())

    async def check_health(self) -> None:
        """Called by Serve; raising gets the replica replaced."""
        if not self._thread.is_alive():
            raise MeterStopped(f"the energy meter stopped: {self._thread.error}")
        if self._overtaken is not None and await self._is_only_one(*self._overtaken):
            raise MeterStopped("a later meter took the ledger over and is gone")

    async def _is_only_one(self, since_s: float, generation: int) -> bool:
        """Whether the meter that overtook this one has come to nothing."""
        if time.monotonic() - since_s < _OVERTAKEN_FOR_S:
            return False
        with contextlib.suppress(sqlite3.Error):
            return not await self._reader.later_meter_works(generation, time.time() - _OVERTAKEN_FOR_S)
        return False

    def __del__(self) -> None:
        # What was settled goes to the ledger before the next meter begins.
        with contextlib.suppress(Exception):
            self._thread.stop(_CLOSE_WITHIN_S)
            self._reader.close()
