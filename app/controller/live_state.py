"""The snapshot that decisions are made on, from what the engines last said and the controller's own counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from app.controller.links import EngineLink
from app.routing.snapshot import EngineView, Residency, Snapshot
from app.routing.traffic import Traffic
from app.wire import EngineState, EngineStatus

_RESIDENCY = {
    EngineState.QUEUED: Residency.STARTING,
    EngineState.STARTING: Residency.STARTING,
    EngineState.READY: Residency.RESIDENT,
    EngineState.FAILED: Residency.FAILED,
}
_DEFAULT_MAX_RUNNING = 64
STALE_AFTER_S = 6.0
"""Engines report every half second while they work and every five when they do not."""


def take_snapshot(
    links: Iterable[EngineLink],
    now_s: float,
    queue_limit: int,
    *,
    tripped_modes: frozenset[str] = frozenset(),
    device: tuple[int | None, int | None] = (None, None),
    corrections: Mapping[str, float] | None = None,
    accepted_per_step: Mapping[str, float] | None = None,
    traffic: Traffic | None = None,
) -> Snapshot:
    """All engines at `now_s` (monotonic seconds). `device` is total and free bytes."""
    return Snapshot(
        engines={link.name: view(link, now_s, queue_limit) for link in links},
        tripped_modes=tripped_modes,
        device_total_bytes=device[0],
        device_free_bytes=device[1],
        stale_after_s=STALE_AFTER_S,
        corrections=corrections or {},
        accepted_per_step=accepted_per_step or {},
        mean_prompt_tokens=traffic.prompt_tokens if traffic else 0.0,
        mean_seen_tokens=traffic.seen_tokens if traffic else 0.0,
        mean_output_tokens=traffic.output_tokens if traffic else 0.0,
        arrivals_per_s=traffic.arrivals_per_s(now_s) if traffic else 0.0,
        mean_output_shares=traffic.output_shares if traffic else {},
    )


def residency(status: EngineStatus | None) -> Residency:
    """Whether the model is on the device; an engine that is out of reach has failed."""
    return Residency.FAILED if status is None else _RESIDENCY[status.state]


def view(link: EngineLink, now_s: float, queue_limit: int) -> EngineView:
    """One engine. One that is out of reach is unhealthy and nothing more is known of it."""
    status, in_flight = link.status, link.in_flight
    if status is None:
        return EngineView(
            engine=link.name,
            epoch=link.epoch,
            healthy=False,
            residency=residency(status),
            in_flight=len(in_flight),
            queue_limit=queue_limit,
        )
    token_ms = status.step_ms and status.step_ms / (1.0 + (status.accepted_per_step or 0.0))
    return EngineView(
        engine=link.name,
        epoch=link.epoch,
        healthy=status.state is not EngineState.FAILED,
        residency=residency(status),
        in_flight=len(in_flight),
        max_running=status.max_running or _DEFAULT_MAX_RUNNING,
        queue_limit=queue_limit,
        running=status.running,
        waiting=status.waiting,
        kv_use=status.kv_cache_usage,
        kv_capacity_tokens=status.kv_capacity_tokens,
        prefix_hit_rate=status.prefix_hits_tokens / status.prefix_queries_tokens
        if status.prefix_queries_tokens
        else None,
        step_ms=status.step_ms,
        accepted_per_step=status.accepted_per_step,
        pending_prefill_tokens=in_flight.pending_prefill_tokens,
        pending_output_tokens=in_flight.pending_output_tokens(now_s, token_ms),
        completions_per_s=in_flight.completions_per_s(now_s) if len(in_flight) >= queue_limit else None,
        age_s=max(0.0, now_s - link.heard_s),
    )
