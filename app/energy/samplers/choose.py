"""Picks the way to measure: by capability in the order counter, CPU counter, model; or what the settings demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from app.energy.samplers.base import MeterUnavailable, Sampler
from app.energy.samplers.modelled import ModelledSampler
from app.energy.samplers.null import Meters, no_meter
from app.energy.samplers.nvml import open_gpus
from app.energy.samplers.rapl import RaplSampler
from app.energy.settings import EnergySettings


def choose_meters(settings: EnergySettings) -> Meters:
    """The samplers to use. Never raises: a machine without a meter still serves, with null for joules."""
    ways: dict[str, Callable[[], Sequence[Sampler]]] = {
        "nvml": lambda: open_gpus(settings.devices, settings.mig_scope == "parent", settings.interval_ms / 1000),
        "rapl": lambda: [RaplSampler(settings.rapl_root, settings.interval_ms / 1000)],
        "modelled": lambda: [ModelledSampler(settings.watts_per_core)],
    }
    if settings.source == "none":
        return no_meter("energy.source is none")
    wanted = list(ways) if settings.source == "auto" else [settings.source]
    if settings.devices and settings.source == "auto":
        # Named GPUs that cannot be measured must not turn into a model of the CPU behind the user's back.
        wanted = ["nvml"]
    passed_over: list[str] = []
    for way in wanted:
        try:
            return Meters(tuple(ways[way]()), tuple(passed_over))
        except MeterUnavailable as why:
            passed_over.append(f"{way}: {why}")
    return no_meter(*passed_over)
