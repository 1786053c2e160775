"""The device lease: one engine at a time may start on a device.

Engines that start together count each other's memory, and on a small machine they starve each other. The lease is
granted in order of asking, records the device's free memory before and after, and is taken back when its holder's
process is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from app.config import Settings
from app.processor import processor_name

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

log = logging.getLogger("ray.serve")
_LOOK_AT_HOLDER_EVERY_S = 1.0
_WAIT_FOR_FIRST_S = 20.0
_RELEASE_WITHIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that asks for the lease; its start time tells it from a later one with the same id."""

    name: str
    pid: int
    created_s: float

    @classmethod
    def here(cls, name: str) -> Holder:
        process = psutil.Process()
        return cls(name, process.pid, process.create_time())

    def alive(self) -> bool:
        try:
            return bool(psutil.Process(self.pid).create_time() == self.created_s)
        except psutil.Error:
            return False


@dataclass(frozen=True, slots=True)
class Reading:
    """Free memory of the device in bytes, or of the host where there is no GPU; None when it cannot be read."""

    free_bytes: int | None
    total_bytes: int | None


@dataclass(frozen=True, slots=True)
class _Begun:
    reading: Reading
    at_s: float


class HolderGone(RuntimeError):
    """The process that waits for the lease has ended; nobody needs the answer."""


class Lease:
    """The queue itself, without Ray: first come, first served, one holder."""

    def __init__(self) -> None:
        self._queue: list[Holder] = []
        self._changed = asyncio.Condition()

    @property
    def holder(self) -> Holder | None:
        return self._queue[0] if self._queue else None

    def ask(self, holder: Holder) -> None:
        """Join the queue without waiting. A holder that asks again keeps its place."""
        if holder not in self._queue:
            self._queue.append(holder)

    async def acquire(self, holder: Holder) -> None:
        """Join the queue and wait for the turn.

        Raises:
            HolderGone: it died while it waited.
        """
        self.ask(holder)
        async with self._changed:
            while self.holder != holder:
                if holder not in self._queue:
                    raise HolderGone(f"{holder.name} (process {holder.pid}) ended while it waited for the device")
                # No event tells of a foreign process's death, so look at the one in front from time to time.
                try:
                    await asyncio.wait_for(self._changed.wait(), _LOOK_AT_HOLDER_EVERY_S)
                except TimeoutError:
                    self._drop_dead()

    async def release(self, holder: Holder) -> None:
        """Give it back, or leave the queue; without effect for a stranger."""
        async with self._changed:
            if holder in self._queue:
                self._queue.remove(holder)
                self._changed.notify_all()

    def _drop_dead(self) -> None:
        dead = [holder for holder in self._queue if not holder.alive()]
        if dead:
            self._queue = [holder for holder in self._queue if holder not in dead]
            self._changed.notify_all()


class Device:
    """The lease as a Serve deployment of its own: one replica on the device's node.

    Serve starts all engines' replicas at once and in no order. The first engine of the configuration is the one that
    answers when no mode is named, so the others let it go first, unless it does not come.
    """

    def __init__(self, settings: Settings) -> None:
        self._platform = settings.platform
        self._first = settings.engine_specs[0].name
        self._first_asked = asyncio.Event()
        self._lease = Lease()
        self._before: dict[Holder, _Begun] = {}

    async def acquire(self, holder: Holder) -> Reading:
        """Wait for the lease; returns the reading at its start."""
        if holder.name == self._first:
            self._lease.ask(holder)
        else:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._first_asked.wait(), _WAIT_FOR_FIRST_S)
        self._first_asked.set()
        await self._lease.acquire(holder)
        reading = self.read()
        self._before[holder] = _Begun(reading, time.monotonic())
        return reading

    async def release(self, holder: Holder) -> Reading:
        """Give the lease back; returns the reading at its end and logs what changed."""
        await self._lease.release(holder)
        after = self.read()
        begun = self._before.pop(holder, None)
        if begun and begun.reading.free_bytes and after.free_bytes:
            taken_gib = (begun.reading.free_bytes - after.free_bytes) / 2**30
            held_s = time.monotonic() - begun.at_s
            log.info("%s held the device for %.1f s and took %.2f GiB", holder.name, held_s, taken_gib)
        return after

    def read(self) -> Reading:
        """Free memory now. On a GPU through NVML, which needs no CUDA context."""
        if self._platform == "cpu":
            memory = psutil.virtual_memory()
            return Reading(memory.available, memory.total)
        return _read_nvml()

    def identify(self) -> str:
        """The hardware's name, as profiles state what they were measured on."""
        if self._platform == "cpu":
            return f"{processor_name()}, {psutil.cpu_count(logical=True)} cores"
        return _gpu_name()


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """`pynvml`, initialised; NVML counts how often, so this nests."""
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _read_nvml() -> Reading:
    import pynvml

    try:
        with _nvml() as nvml:
            memory = nvml.nvmlDeviceGetMemoryInfo(_visible_device(nvml))
            return Reading(int(memory.free), int(memory.total))
    except pynvml.NVMLError as error:
        log.warning("NVML cannot be read: %s", error)
        return Reading(None, None)


def _gpu_name() -> str:
    import pynvml

    try:
        with _nvml() as nvml:
            return str(nvml.nvmlDeviceGetName(_visible_device(nvml)))
    except pynvml.NVMLError as error:
        log.warning("NVML cannot tell the GPU's name: %s", error)
        return "unknown GPU"


def visible_gpu_uuid() -> str:
    """UUID of the GPU that this process runs on, as the energy meter names it: for a MIG slice, of the whole GPU.

    Raises:
        pynvml.NVMLError: there is none, or NVML cannot tell.
    """
    with _nvml() as nvml:
        handle = _visible_device(nvml)
        if nvml.nvmlDeviceIsMigDeviceHandle(handle).value:
            handle = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        return str(nvml.nvmlDeviceGetUUID(handle))


def _visible_device(nvml: Any) -> Any:
    """NVML's handle of this process's first CUDA device, which may be a MIG slice.

    `CUDA_VISIBLE_DEVICES` names it by UUID (`GPU-...`, perhaps cut short, or `MIG-...`) or by an index, which is
    NVML's only because engines run with `CUDA_DEVICE_ORDER=PCI_BUS_ID` (`app/engines/environment.py`). Where nothing
    is named, as for the lease's own actor, which has no share of a GPU, it is the node's first.

    Raises:
        pynvml.NVMLError: no such device.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
    if named.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(named))
    try:
        return nvml.nvmlDeviceGetHandleByUUID(named)
    except nvml.NVMLError_NotFound:
        gpus = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        begin_so = [gpu for gpu in gpus if named.startswith("GPU-") and nvml.nvmlDeviceGetUUID(gpu).startswith(named)]
        if len(begin_so) != 1:
            raise
        return begin_so[0]


@asynccontextmanager
async def leased(device: DeploymentHandle, holder: Holder) -> AsyncIterator[Any]:
    """`async with leased(device, Holder.here("fp16")):` around a start.

    What was started stays, even if the lease cannot be given back: its actor died or was replaced meanwhile, and the
    next one does not know of it.
    """
    try:
        yield await device.acquire.remote(holder)
    finally:
        try:
            await asyncio.wait_for(device.release.remote(holder), _RELEASE_WITHIN_S)
        except Exception as error:
            log.warning("%s could not give the device back: %s", holder.name, str(error) or type(error).__name__)
