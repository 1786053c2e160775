"""How full the engines' KV caches were during a run: whether a workload that wants memory pressure had any."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

from app.routing.settings import RoutingSettings
from loadgen.client import OpenAIClient
from loadgen.server_facts import engines

WORKLOAD = "memory_pressure"
"""The workload that wants it."""
_EVERY_S = 1.0
PRESSURE = RoutingSettings().kv_pressure
"""From which routing takes memory for under pressure."""
_ADVICE = (
    f"pressure begins at {100 * PRESSURE:.0f} %. Give engines less (kv_cache_memory_bytes of engine_defaults in "
    "serve_config.yaml), or send more at once."
)


@asynccontextmanager
async def watched_kv_use(client: OpenAIClient, every_s: float = _EVERY_S) -> AsyncIterator[dict[str, float]]:
    """The highest use (0..1) of each engine's KV cache while the block runs; empty at a server that does not tell."""
    peaks: dict[str, float] = {}

    async def watch() -> None:
        while states := await engines(client):
            for state in states:
                use = state.get("kv_cache_usage")
                if isinstance(use, int | float):
                    name = str(state.get("name"))
                    peaks[name] = max(peaks.get(name, 0.0), float(use))
            await asyncio.sleep(every_s)

    task = asyncio.ensure_future(watch())
    try:
        yield peaks
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def pressure_words(peaks: Mapping[str, float]) -> str | None:
    """What to say of a run that was to be short of memory and was not; None where it was."""
    if not peaks:
        return "The server does not tell how full its KV caches were, so whether memory was short is unknown."
    engine = max(peaks, key=peaks.__getitem__)
    if peaks[engine] >= PRESSURE:
        return None
    return (
        f"Memory was not short: the fullest KV cache, of {engine}, was {100 * peaks[engine]:.0f} % full at most, and "
        f"{_ADVICE}"
    )


def pressure_words_of_each(peaks: Mapping[str, float | None]) -> str | None:
    """The same of measurements that were each to be short of memory, by their names; None where all were."""
    if peaks and all(peak is None for peak in peaks.values()):
        return pressure_words({})
    found = [
        f"{name} ({'unknown' if peak is None else f'{100 * peak:.0f} %'})"
        for name, peak in peaks.items()
        if peak is None or peak < PRESSURE
    ]
    return (
        f"Memory was not short, by the fullest that the KV cache was: {', '.join(found)}; {_ADVICE}" if found else None
    )
