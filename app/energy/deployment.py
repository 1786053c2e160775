"""The meter as a Serve deployment: one replica beside the device, without a share of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from ray import serve

from app.energy.activity import Ack, ActivityBatch
from app.energy.meter import Meter
from app.energy.metrics import RayMetrics
from app.energy.queries import Totals
from app.energy.request_energy import UNMEASURED, RequestEnergy
from app.energy.rows import RequestRecord
from app.energy.samplers.choose import choose_meters
from app.energy.settings import EnergySettings

log = logging.getLogger("ray.serve")
T = TypeVar("T")
_MAX_ONGOING_REQUESTS = 1024
_TELL_STATE_EVERY_S = 5.0
_LOOK_FOR_FINAL_EVERY_S = 0.05
_CLOSE_WITHIN_S = 3.0


def meter_application(settings: EnergySettings, ledger_path: Path) -> serve.Application:
    """The meter's deployment, bound. It asks for no GPU, so Ray hides all of them and CUDA is never initialised."""
    return serve.deployment(
        EnergyMeter,
        name="energy",
        num_replicas=1,
        max_ongoing_requests=_MAX_ONGOING_REQUESTS,
        graceful_shutdown_timeout_s=2 * _CLOSE_WITHIN_S,
        ray_actor_options={
            "num_cpus": settings.num_cpus,
            "num_gpus": 0,
            "resources": {settings.resource: 0.001} if settings.resource else {},
        },
    ).bind(settings, ledger_path)


class EnergyMeter:
    """Runs a `Meter` on a thread of its own. The constructor only remembers; what fails, fails in the background."""

    def __init__(self, settings: EnergySettings, ledger_path: Path) -> None:
        self._settings, self._ledger_path = settings, ledger_path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="energy-meter")
        self._meter: asyncio.Future[Meter] = asyncio.get_running_loop().create_future()
        self._life = asyncio.get_running_loop().create_task(self._live())

    async def _live(self) -> None:
        meter, metrics = await self._run(self._open)
        self._meter.set_result(meter)
        tell_at_s = 0.0
        while True:
            pause_s = await self._run(meter.tick)
            now_s = asyncio.get_running_loop().time()
            if now_s >= tell_at_s:
                tell_at_s = now_s + _TELL_STATE_EVERY_S
                metrics.told(await self._run(meter.state))
            await asyncio.sleep(pause_s)

    def _open(self) -> tuple[Meter, RayMetrics]:
        metrics = RayMetrics()
        meters = choose_meters(self._settings)
        for why in meters.passed_over:
            log.info("energy is not measured by %s", why)
        return Meter(meters, self._settings, self._ledger_path, observe=metrics.flushed), metrics

    async def _run(self, call: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)

    async def _ready(self) -> Meter:
        # Shielded: a caller that gives up must not cancel it for all.
        return await asyncio.shield(self._meter)

    async def report(self, batch: ActivityBatch) -> Ack:
        """See `Meter.report`."""
        return await self._run((await self._ready()).report, batch)

    async def record(self, records: Sequence[RequestRecord]) -> int:
        """See `Meter.record`."""
        return await self._run((await self._ready()).record, records)

    async def totals(self, since_s: float | None = None, until_s: float | None = None) -> Totals:
        """See `Meter.totals`."""
        return await self._run((await self._ready()).totals, since_s, until_s)

    async def request(self, request_id: str) -> dict[str, Any]:
        """See `Meter.request`."""
        return await self._run((await self._ready()).request, request_id)

    async def energy(self, request_id: str, wait_s: float = 0.0) -> RequestEnergy:
        """What a request has used; waits up to `wait_s` for the last of it to be settled, then says `partial`."""
        meter = await self._ready()
        deadline_s = asyncio.get_running_loop().time() + wait_s
        while True:
            energy = await self._run(meter.energy, request_id)
            if energy is not None and energy.status != "partial":
                return energy
            if asyncio.get_running_loop().time() >= deadline_s:
                return energy or UNMEASURED
            await asyncio.sleep(_LOOK_FOR_FINAL_EVERY_S)

    async def state(self) -> dict[str, Any]:
        """See `Meter.state`."""
        return await self._run((await self._ready()).state)

    async def check_health(self) -> None:
        """Called by Serve; raising gets the replica replaced."""
        if self._life.done():
            error = None if self._life.cancelled() else self._life.exception()
            raise RuntimeError(f"the energy meter stopped: {error}")

    def __del__(self) -> None:
        # What was settled goes to the ledger before the next meter begins.
        with contextlib.suppress(Exception):
            if self._meter.done():
                self._thread.submit(self._meter.result().close).result(_CLOSE_WITHIN_S)
            self._thread.shutdown(wait=False)
