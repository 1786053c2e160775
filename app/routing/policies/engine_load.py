"""How busy each engine is and what the engines do to one another: what all modes of an engine share in a decision."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from app.routing.coefficients import MAX_BATCH
from app.routing.features import RequestFeatures
from app.routing.snapshot import EngineView, Residency, Snapshot

Interference = Mapping[str, Mapping[str, float]]
"""`interference[engine][other]`: how many times slower `engine` is while `other` generates; 1 where unknown."""


class EngineLoad(msgspec.Struct, frozen=True):
    """One engine as a request that is about to join it finds it."""

    view: EngineView
    load: int
    """Requests there now."""
    running: int
    """Those of them that are decoded at once."""
    batch: int
    """Sequences in a decode step once the request has joined."""
    wait_share: float
    """What part of the requests there must finish before this one has a place in the batch and room in the KV cache."""
    asleep: bool
    """Not resident: to be woken first."""
    left_tokens: float
    """Output tokens still to come per sequence there; 0 if unknown."""
    slowdown: float
    """Share of time lost to the other active engines."""
    burden: float
    """Requests that run on other engines, each times its added share of time while this engine works."""


def engine_loads(features: RequestFeatures, snapshot: Snapshot, interference: Interference) -> dict[str, EngineLoad]:
    """All engines of the snapshot, by name, as the request would find them."""
    stale_after_s = snapshot.stale_after_s
    loads = []
    active = []
    for name, view in snapshot.engines.items():
        load = view.in_flight
        # As `Snapshot.load`, written out because it runs for every engine of every decision.
        if view.age_s <= stale_after_s:
            reported = view.running + view.waiting
            if reported > load:
                load = reported
        left_tokens = 0.0
        most = view.max_running if view.max_running < MAX_BATCH else MAX_BATCH
        if load:
            # Both by the controller's count: the engine's has each sequence of a request.
            left_tokens = view.pending_output_tokens / (view.in_flight or load)
            active.append((name, load if load < most else most, interference.get(name, _NOTHING)))
        loads.append((name, view, load, most, left_tokens))
    sequences = features.sequences
    found = {}
    for name, view, load, most, left_tokens in loads:
        slowdown = 0.0
        burden = 0.0
        if active:
            of_this = interference.get(name, _NOTHING)
            for other, running, of_other in active:
                if other != name:
                    slowdown += of_this.get(other, 1.0) - 1.0
                    burden += running * (of_other.get(name, 1.0) - 1.0)
        full = load >= most
        batch = load + sequences
        wait_share = 0.0
        if load:
            if batch > most:
                wait_share = (batch - most) / most
            if view.kv_capacity_tokens and view.age_s <= stale_after_s:
                tokens = features.prompt_tokens - features.cached_tokens.get(name, 0)
                tokens += sequences * features.expected_output_tokens
                overflow = view.kv_use + tokens / view.kv_capacity_tokens - 1.0
                if overflow > 0.0:
                    wait_share += min(1.0, overflow)
        found[name] = EngineLoad(
            view,
            load,
            most if full else load,
            batch if batch < most else most,
            wait_share,
            view.residency is not _RESIDENT,
            left_tokens,
            slowdown,
            burden,
        )
    return found


_NOTHING: Mapping[str, float] = {}
# Reading a member from its enumeration takes ten times as long as reading a global.
_RESIDENT = Residency.RESIDENT
