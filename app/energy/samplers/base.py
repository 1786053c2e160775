"""The contract of a sampler: one device, a cumulative energy reading, and honesty about what is unknown.

Only the standard library is imported here, so that the self-check runs where nothing of the application is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol


class Method(StrEnum):
    """How a figure came about; stated beside every figure."""

    NVML_COUNTER = "nvml_counter"
    """The GPU's own energy counter."""
    NVML_POWER = "nvml_power"
    """The integral over time of the GPU's power readings."""
    RAPL = "rapl"
    """The CPU packages' own energy counters."""
    MODELLED = "modelled"
    """CPU time times a table's watts; not a measurement."""


GPU_METHODS = frozenset({Method.NVML_COUNTER, Method.NVML_POWER})


class MeterUnavailable(RuntimeError):
    """This way of measuring does not exist here; the message says why."""


class Point(NamedTuple):
    """The device's cumulative energy at one moment, on the host's CLOCK_MONOTONIC."""

    at_s: float
    energy_j: float
    blur_s: float
    """The reading may belong to any moment within this distance of `at_s`."""
    cpu_s: Mapping[str, float] = {}
    """Cumulative CPU seconds by engine, where the sampler sees processes."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What one look at the device gave."""

    at_s: float
    point: Point | None = None
    """None while the counter has not moved or could not be read."""
    unbroken: bool = True
    """False when the energy between the previous point and this one is unknown."""
    power_w: float | None = None
    """Power at this moment; None when only an average over a window is known."""
    event: str | None = None
    """What went wrong, or came right, with this look: `lost`, `recovered`, `counter_reset`, `read_error`, ..."""


@dataclass(frozen=True, slots=True)
class MeterInfo:
    """What is measured, and how."""

    device: str
    """UUID of a GPU, or the name of the CPU."""
    name: str
    method: Method
    scope: str
    """What the joules include, in words."""
    absolute: bool = False
    """Readings go on across a restart of the meter (a counter of the device's own)."""
    blur_s: float = 0.0
    """The least blur of its points."""
    capabilities: Mapping[str, bool] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Sampler(Protocol):
    """One device. Not thread-safe: one thread samples it."""

    period_s: float
    """How often a look is worth while."""

    @property
    def info(self) -> MeterInfo: ...

    def sample(self, now_s: float) -> Sample:
        """Look at the device at `now_s`. Never raises for a fault of the device: that is an event."""
        ...

    def watch(self, engine: str, process_id: int) -> None:
        """An engine's processes are this one and its descendants. Only process-based samplers use it."""
        ...

    def close(self) -> None: ...
