"""GPUs through NVML (`pynvml`). The only file that calls it; standard library and pynvml alone.

NVML's energy counter (millijoules since the driver was loaded, renewed about every 100 ms) is the ledger where the
device has one. Its power reading is an average over about a second on most devices, of which some sample only a
quarter of the time; it is integrated only where there is no counter. Instant power, where offered, says how a
counter's joules spread over the time between two of its steps.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pynvml

from app.energy.samplers.base import MeterInfo, MeterUnavailable, Method, Point, Sample
from app.energy.samplers.step_clock import StepClock

_POWER_WINDOW_S = 1.0
"""Length of the average behind `nvmlDeviceGetPowerUsage` on devices since Ampere (the header's note on it)."""
_STALLED_AFTER_S = 2.0
"""A counter that stands still for so long does not count: even an idle GPU draws watts."""
_RETRY_FIRST_S, _RETRY_LONGEST_S = 1.0, 30.0
_ERRORS_UNTIL_LOST = 3
_DOUBTS_UNTIL_BELIEVED = 3
_HARDEST_DRAW_W = 5000.0
"""No GPU draws more; used where the device does not tell its own limit."""
_LOST = frozenset(
    {
        pynvml.NVML_ERROR_UNINITIALIZED,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_GPU_IS_LOST,
        pynvml.NVML_ERROR_RESET_REQUIRED,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
        pynvml.NVML_ERROR_NOT_FOUND,
    }
)
T = TypeVar("T")
_NOT_OFFERED = frozenset({pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND})


class Library:
    """The loaded NVML. A reloaded driver makes all handles stale, so one restart serves all devices."""

    def __init__(self) -> None:
        self.session = 0
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise MeterUnavailable(f"NVML does not start: {error}") from error

    def restart(self) -> None:
        """Raises: NVMLError."""
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
        pynvml.nvmlInit()
        self.session += 1

    def uuids(self) -> list[str]:
        """Raises: MeterUnavailable."""
        try:
            count = pynvml.nvmlDeviceGetCount()
            return [str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(i))) for i in range(count)]
        except pynvml.NVMLError as error:
            raise MeterUnavailable(f"NVML lists no devices: {error}") from error


def open_gpus(uuids: Sequence[str] = (), mig_parent: bool = False, period_s: float = 0.05) -> list[NvmlSampler]:
    """A sampler for each named GPU, or for every GPU there is.

    Raises:
        MeterUnavailable: no library, no device, a UUID that is not here, a MIG slice, or no reading at all.
    """
    library = Library()
    found = list(uuids) or library.uuids()
    if not found:
        raise MeterUnavailable("NVML shows no GPU")
    samplers = [NvmlSampler(library, uuid, mig_parent, period_s) for uuid in found]
    measured = [sampler.info.device for sampler in samplers]
    if len(set(measured)) < len(measured):
        raise MeterUnavailable(f"several MIG slices of one GPU are named; its joules would count twice: {uuids}")
    return samplers


@dataclass(frozen=True, slots=True)
class _Device:
    handle: Any
    uuid: str
    name: str
    has_counter: bool
    has_instant: bool
    limit_w: float
    notes: tuple[str, ...]


class NvmlSampler:
    """One GPU, found by its UUID. It survives a lost device, a reset counter and a reloaded driver."""

    def __init__(self, library: Library, uuid: str, mig_parent: bool = False, period_s: float = 0.05) -> None:
        self.period_s = period_s
        self._library = library
        self._uuid = uuid
        self._mig_parent = mig_parent
        try:
            self._device = self._open()
        except pynvml.NVMLError as error:
            raise MeterUnavailable(f"{uuid}: {error}") from error
        self._session = library.session
        self._counting = self._device.has_counter
        self._last_look_s: float | None = None
        self._clock = StepClock()
        self._counter_j: float | None = None
        self._moved_s: float | None = None
        self._integral_j = 0.0
        self._power: tuple[float, float] | None = None
        self._broken = False
        self._errors = 0
        self._doubts = 0
        self._retry_s: float | None = None
        self._pause_s = _RETRY_FIRST_S

    @property
    def info(self) -> MeterInfo:
        device = self._device
        method = Method.NVML_COUNTER if self._counting else Method.NVML_POWER
        blur_s = self.period_s / 2 if self._counting or device.has_instant else _POWER_WINDOW_S
        capabilities = {"energy_counter": device.has_counter, "instant_power": device.has_instant}
        scope = f"whole GPU {device.uuid}, with everything that runs on it"
        return MeterInfo(device.uuid, device.name, method, scope, self._counting, blur_s, capabilities, device.notes)

    def watch(self, engine: str, process_id: int) -> None:
        """Unused: the device is measured as a whole."""

    def close(self) -> None:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()

    def sample(self, now_s: float) -> Sample:
        if self._retry_s is not None:
            return self._try_again(now_s)
        try:
            sample = self._look(now_s)
        except pynvml.NVMLError as error:
            return self._failed(now_s, error)
        self._errors = 0
        return sample

    # Looking ----------------------------------------------------------------------------------------------------

    def _look(self, now_s: float) -> Sample:
        if self._session != self._library.session:
            # Another device's sampler restarted the library.
            self._device = self._open()
            self._session = self._library.session
        instant_w = self._instant_w() if self._device.has_instant else None
        if self._counting:
            sample = self._count(now_s, _millis(pynvml.nvmlDeviceGetTotalEnergyConsumption(self._device.handle)))
            self._last_look_s = now_s
            return replace(sample, power_w=instant_w)
        power_w = instant_w
        if power_w is None:
            power_w = _millis(pynvml.nvmlDeviceGetPowerUsage(self._device.handle))
        if not 0 <= power_w <= self._device.limit_w:
            return Sample(now_s, event=f"garbage: a power of {power_w:g} W")
        return replace(self._integrate(now_s, power_w), power_w=instant_w)

    def _count(self, now_s: float, counter_j: float) -> Sample:
        """A point when the counter has stepped; it did so at some moment since the last look."""
        before_j, before_s, moved_s = self._counter_j, self._last_look_s, self._moved_s
        if before_j is None or before_s is None or moved_s is None:
            self._counter_j, self._moved_s = counter_j, now_s
            return Sample(now_s)
        if counter_j == before_j:
            if now_s - moved_s > _STALLED_AFTER_S:
                self._counting, self._broken, self._power = False, True, None
                return Sample(now_s, event="counter_stalled: integrating power instead")
            return Sample(now_s)
        # The step may hold what was drawn since the step before it.
        since_s = now_s - moved_s + 0.5
        if counter_j < before_j or counter_j - before_j > self._device.limit_w * since_s:
            return self._doubt(now_s, before_j, counter_j)
        self._doubts = 0
        self._counter_j, self._moved_s = counter_j, now_s
        at_s, blur_s = self._clock.stepped(before_s, now_s)
        unbroken, self._broken = not self._broken, False
        return Sample(now_s, Point(at_s, counter_j, blur_s), unbroken)

    def _doubt(self, now_s: float, before_j: float, counter_j: float) -> Sample:
        """A value out of line is a glitch when the next one is in line again, else the counter began anew."""
        self._doubts += 1
        if self._doubts < _DOUBTS_UNTIL_BELIEVED:
            return Sample(now_s, event=f"garbage: the counter went from {before_j:g} to {counter_j:g} J")
        self._counter_j, self._moved_s, self._broken, self._doubts = counter_j, now_s, True, 0
        self._clock.reset()
        return Sample(now_s, event="counter_reset")

    def _integrate(self, now_s: float, power_w: float) -> Sample:
        before, self._power = self._power, (now_s, power_w)
        if before is None:
            unbroken, self._broken = not self._broken, False
        else:
            self._integral_j += (before[1] + power_w) / 2 * (now_s - before[0])
            unbroken = True
        return Sample(now_s, Point(now_s, self._integral_j, self.info.blur_s), unbroken)

    def _instant_w(self) -> float | None:
        (field,) = pynvml.nvmlDeviceGetFieldValues(self._device.handle, [pynvml.NVML_FI_DEV_POWER_INSTANT])
        if field.nvmlReturn != pynvml.NVML_SUCCESS:
            return None
        value_w = _millis(_FIELD_READERS.get(field.valueType, _no_number)(field.value))
        return value_w if 0 <= value_w <= self._device.limit_w else None

    def average_power_w(self) -> float | None:
        """Power as NVML averages it, for comparison; None where it cannot be read."""
        return _asked(lambda: _millis(pynvml.nvmlDeviceGetPowerUsage(self._device.handle)))

    # Trouble ----------------------------------------------------------------------------------------------------

    def _failed(self, now_s: float, error: pynvml.NVMLError) -> Sample:
        self._errors += 1
        self._power = None
        if not self._counting:
            self._broken = True
        if error.value in _LOST or self._errors >= _ERRORS_UNTIL_LOST:
            self._retry_s, self._pause_s = now_s + _RETRY_FIRST_S, _RETRY_FIRST_S
            return Sample(now_s, event=f"lost: {error}")
        return Sample(now_s, event=f"read_error: {error}")

    def _try_again(self, now_s: float) -> Sample:
        if self._retry_s is not None and now_s < self._retry_s:
            return Sample(now_s)
        try:
            if self._session == self._library.session:
                self._library.restart()
            self._device = self._open()
        except (pynvml.NVMLError, MeterUnavailable):
            self._pause_s = min(2 * self._pause_s, _RETRY_LONGEST_S)
            self._retry_s = now_s + self._pause_s
            return Sample(now_s)
        self._session = self._library.session
        self._retry_s, self._errors = None, 0
        self._counting = self._device.has_counter
        # The counter tells by itself whether it went on (then nothing is missing) or began anew. The first reading
        # after the gap only sets the stage: how old its value is, nobody knows.
        self._last_look_s, self._power, self._broken = now_s, None, self._broken or not self._counting
        self._clock.reset()
        return Sample(now_s, event="recovered")

    def _open(self) -> _Device:
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(self._uuid)
        except pynvml.NVMLError_NotFound as error:
            raise MeterUnavailable(f"no device {self._uuid}; there are {', '.join(self._library.uuids())}") from error
        notes: list[str] = []
        if self._uuid.startswith("MIG-") or _asked(lambda: pynvml.nvmlDeviceIsMigDeviceHandle(handle).value):
            parent = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
            parent_uuid = str(pynvml.nvmlDeviceGetUUID(parent))
            if not self._mig_parent:
                raise MeterUnavailable(
                    f"{self._uuid} is a MIG slice, and NVML has no energy figure for one; its GPU {parent_uuid} "
                    "counts all slices together: set energy.mig_scope to parent to measure that"
                )
            notes.append(f"parent of MIG slice {self._uuid}: all of its slices are in the figure")
            handle = parent
        elif (mig := _asked(lambda: pynvml.nvmlDeviceGetMigMode(handle))) and mig[0] == pynvml.NVML_DEVICE_MIG_ENABLE:
            notes.append("MIG is on: all slices are in the figure")
        return self._probe(handle, tuple(notes))

    def _probe(self, handle: Any, notes: tuple[str, ...]) -> _Device:
        has_counter = _offered(lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        has_power = _offered(lambda: pynvml.nvmlDeviceGetPowerUsage(handle))
        instant = _asked(lambda: pynvml.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_POWER_INSTANT])[0])
        has_instant = instant is not None and instant.nvmlReturn == pynvml.NVML_SUCCESS
        if not (has_counter or has_power or has_instant):
            raise MeterUnavailable(f"{self._uuid} offers neither energy nor power readings")
        limit_w = _asked(lambda: _millis(pynvml.nvmlDeviceGetEnforcedPowerLimit(handle)))
        # Short peaks pass the enforced limit.
        hardest_w = min(2 * limit_w, _HARDEST_DRAW_W) if limit_w else _HARDEST_DRAW_W
        name = _asked(lambda: str(pynvml.nvmlDeviceGetName(handle))) or "GPU"
        return _Device(handle, str(pynvml.nvmlDeviceGetUUID(handle)), name, has_counter, has_instant, hardest_w, notes)


_FIELD_READERS: dict[int, Callable[[Any], float]] = {
    pynvml.NVML_VALUE_TYPE_DOUBLE: lambda value: float(value.dVal),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: lambda value: float(value.uiVal),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: lambda value: float(value.ulVal),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: lambda value: float(value.ullVal),
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: lambda value: float(value.sllVal),
}


def _no_number(value: Any) -> float:
    return math.nan


def _millis(value: float) -> float:
    """Millijoules to joules, milliwatts to watts."""
    return value / 1000


def _offered(ask: Callable[[], Any]) -> bool:
    """Whether the device and this driver have the reading. Other errors are for the caller."""
    try:
        ask()
    except pynvml.NVMLError as error:
        if error.value in _NOT_OFFERED:
            return False
        raise
    return True


def _asked(ask: Callable[[], T]) -> T | None:
    """The answer, or None where NVML has none."""
    try:
        return ask()
    except pynvml.NVMLError:
        return None
