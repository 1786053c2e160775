"""How busy each engine is and what the engines do to one another: what all modes of an engine share in a decision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from app.routing.coefficients import MAX_BATCH
from app.routing.corrections import engine_correction
from app.routing.features import RequestFeatures
from app.routing.snapshot import EngineView, Residency, Snapshot

Interference = Mapping[str, Mapping[str, float]]
"""`interference[engine][other]`: how many times slower `engine` is while `other` generates; 1 where unknown."""


class Beside(NamedTuple):
    """What one engine and another do to each other while both generate."""

    ours: float = 0.0
    """Share by which the one is slower."""
    theirs: float = 0.0
    """Share by which the other is slower."""
    added: float = 0.0
    """What a millisecond of the other's work adds to the time until the one, and that work, are done."""
    pace: float = 1.0
    """Milliseconds of the one's work that are done in the time of one of the other's."""


Hindrance = Mapping[str, Mapping[str, Beside]]
"""`hindrance[engine][other]`."""


def hindrance(interference: Interference) -> Hindrance:
    """Both directions of an interference together, as decisions read it."""
    engines = interference.keys() | {other for others in interference.values() for other in others}

    def beside(one: str, other: str) -> Beside:
        slower, other_slower = (interference.get(a, {}).get(b, 1.0) for a, b in ((one, other), (other, one)))
        pace = other_slower / slower
        # The other's work takes so much longer, and all the while the one goes on at 1 / slower of its speed.
        return Beside(slower - 1.0, other_slower - 1.0, other_slower - pace, pace)

    return {one: {other: beside(one, other) for other in engines if other != one} for one in engines}


class EngineLoad(msgspec.Struct, frozen=True, gc=False):
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
    correction: float
    """Observed/predicted latency of such a request here, as learned; 1 while nothing is."""


def engine_loads(features: RequestFeatures, snapshot: Snapshot, hindrance: Hindrance) -> dict[str, EngineLoad]:
    """All engines of the snapshot, by name, as the request would find them."""
    views = snapshot.engines
    loads = snapshot.loads()
    active = []
    for name, load in loads.items():
        if load:
            most = views[name].max_running
            if most > MAX_BATCH:
                most = MAX_BATCH
            active.append((name, load if load < most else most))
    stale_after_s = snapshot.stale_after_s
    corrections = snapshot.corrections
    sequences = features.sequences
    of_tag = ":" + features.tag
    found = {}
    for name, view in views.items():
        load = loads[name]
        most = view.max_running if view.max_running < MAX_BATCH else MAX_BATCH
        slowdown = burden = 0.0
        if active:
            others = hindrance.get(name, _NOTHING)
            for other, running in active:
                beside = others.get(other)
                if beside is not None:
                    slowdown += beside.ours
                    burden += running * beside.theirs
        batch = load + sequences
        wait_share = left_tokens = 0.0
        if load:
            # Both by the controller's count: the engine's has each sequence of a request.
            left_tokens = view.pending_output_tokens / (view.in_flight or load)
            if batch > most:
                wait_share = (batch - most) / most
            if view.kv_capacity_tokens and view.age_s <= stale_after_s:
                tokens = features.prompt_tokens - features.cached_tokens.get(name, 0)
                tokens += sequences * features.expected_output_tokens
                overflow = view.kv_use + tokens / view.kv_capacity_tokens - 1.0
                if overflow > 0.0:
                    wait_share += min(1.0, overflow)
        correction = 1.0
        if corrections:
            correction = corrections.get(name + of_tag, 0.0) or engine_correction(corrections, name)
        found[name] = EngineLoad(
            view,
            load,
            load if load < most else most,
            batch if batch < most else most,
            wait_share,
            view.residency is not _RESIDENT,
            left_tokens,
            slowdown,
            burden,
            correction,
        )
    return found


_NOTHING: Mapping[str, Beside] = {}
# Reading a member from its enumeration takes ten times as long as reading a global.
_RESIDENT = Residency.RESIDENT
