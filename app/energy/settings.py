"""What a user can set about energy accounting. `app/config.py` embeds this model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class EnergySettings(BaseModel):
    """Defaults measure whatever the machine offers; nothing has to be set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: Literal["auto", "nvml", "rapl", "modelled", "none"] = "auto"
    """`auto` takes the first that works of nvml, rapl, modelled."""
    devices: tuple[str, ...] = ()
    """UUIDs (`GPU-...`) of the GPUs to measure; empty means every GPU that NVML shows. Never an index: NVML's numbers
    are not CUDA's."""
    mig_scope: Literal["refuse", "parent"] = "refuse"
    """NVML has no energy figure for a MIG slice: refuse it, or measure the parent GPU with all of its slices."""
    interval_ms: Annotated[int, Field(ge=10, le=1000)] = 50
    rapl_root: Path = Path("/sys/class/powercap")
    watts_per_core: dict[str, Positive] = {}
    """For `modelled`: watts of one busy core by a regular expression on the CPU's model name; wins over the built-in
    table (`app/energy/samplers/core_watts.py`)."""
    idle_sharing: Literal["separate", "residency"] = "separate"
    """`separate` keeps idle energy as an account of its own. `residency` shares it over the engines that were
    resident, by the memory they hold (equally where that is unknown); it never reaches a request."""
    prefill_token_weight: Positive = 0.1
    """A prompt token's share of an engine's joules, against one generated token. Ten to one is the order of magnitude
    at small batches, where decoding is bound by memory. An engine whose joules the profile has is weighed by those."""
    decode_token_weight: Positive = 1.0
    engine_watts: dict[str, Positive] = {}
    """Power above idle of each engine while busy, to begin with; the meter goes on learning. It is the profile's where
    nothing is set. Without either, engines that are never seen apart share alike, and their figures are flagged."""
    ledger_path: Path | None = None
    """The SQLite file; None leaves the place to the application."""
    retention_days: Positive = 30.0
    """Older rows are removed. After the clock has jumped by more than a tenth of this, none are for a day."""
    flush_s: Positive = 2.0
    """How often settled joules are written; what a crash of the meter can lose where the device has no counter."""
    late_after_s: Positive = 3.0
    """An interval is settled without an engine that has not reported on it for so long."""
    num_cpus: Annotated[float, Field(ge=0)] = 0.01
    resource: str | None = None
    """A custom Ray resource that keeps the meter on the device's node; None takes `device.resource`."""

    @field_validator("devices")
    @classmethod
    def _are_uuids(cls, devices: tuple[str, ...]) -> tuple[str, ...]:
        if wrong := [device for device in devices if not device.startswith(("GPU-", "MIG-"))]:
            raise ValueError(f"not a UUID: {', '.join(wrong)}; `nvidia-smi -L` lists them (GPU-... or MIG-...)")
        if len(set(devices)) < len(devices):
            raise ValueError("a device is named twice")
        return devices

    @model_validator(mode="after")
    def _late_is_later_than_a_flush(self) -> Self:
        if self.late_after_s * 1000 < 2 * self.interval_ms:
            raise ValueError("late_after_s must be at least two sampling intervals")
        return self
