"""How busy each engine is and what the engines do to one another: what all modes of an engine share in a decision."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from app.routing.coefficients import MAX_BATCH
from app.routing.snapshot import EngineView, Residency, Snapshot

Interference = Mapping[str, Mapping[str, float]]
"""`interference[engine][other]`: how many times slower `engine` is while `other` generates; 1 where unknown."""


class EngineLoad(msgspec.Struct, frozen=True):
    """One engine as a request that is about to join it finds it."""

    view: EngineView
    load: int
    """Requests there now."""
    batch: int
    """Sequences in a decode step once the request has joined."""
    asleep: bool
    """Not resident: to be woken first."""
    left_tokens: float
    """Output tokens still to come per request there; 0 if unknown."""
    slowdown: float
    """Share of time lost to the other active engines."""
    burdens: tuple[tuple[float, float], ...]
    """If the engine is idle, for each active one: its running requests times their added share of time, and their
    time left in ms (0 if unknown). An engine that runs already burdens them no more than before."""


def engine_loads(snapshot: Snapshot, interference: Interference) -> dict[str, EngineLoad]:
    """All engines of the snapshot, by name."""
    stale_after_s = snapshot.stale_after_s
    loads = []
    active = []
    for name, view in snapshot.engines.items():
        load = view.in_flight
        if view.age_s <= stale_after_s and view.running + view.waiting > load:
            load = view.running + view.waiting
        left_tokens = view.pending_output_tokens / load if load else 0.0
        loads.append((name, view, load, left_tokens))
        if load:
            running = min(load, view.max_running)
            active.append((name, running, left_tokens * (view.step_ms or 0.0)))
    found = {}
    for name, view, load, left_tokens in loads:
        slowdown = 0.0
        burdens: tuple[tuple[float, float], ...] = ()
        if active:
            of_this = interference.get(name, _NOTHING)
            for other, other_running, left_ms in active:
                if other != name:
                    slowdown += of_this.get(other, 1.0) - 1.0
                    if not load:
                        added = interference.get(other, _NOTHING).get(name, 1.0) - 1.0
                        burdens = (*burdens, (other_running * added, left_ms))
        batch = min(load + 1, view.max_running, MAX_BATCH)
        found[name] = EngineLoad(
            view, load, batch, view.residency is not Residency.RESIDENT, left_tokens, slowdown, burdens
        )
    return found


_NOTHING: Mapping[str, float] = {}
