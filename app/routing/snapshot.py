"""The live state that a decision is made on: an immutable view of the engines and the device."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from app.routing.json_record import JsonRecord


class Residency(StrEnum):
    RESIDENT = "resident"
    ASLEEP = "asleep"
    WAKING = "waking"
    STARTING = "starting"
    FAILED = "failed"


class EngineView(JsonRecord, frozen=True, kw_only=True):
    """One engine. What the engine itself reports is `age_s` old; the controller's own counts are exact.

    Unknown is None.
    """

    engine: str
    epoch: int = 0
    """Counts the engine's starts; its caches live as long as one epoch."""
    healthy: bool = True
    residency: Residency = Residency.RESIDENT
    in_flight: int = 0
    """Requests sent and not finished, by the controller's count."""
    max_running: int = 64
    """Sequences the engine decodes at once."""
    queue_limit: int = 256
    """In-flight requests from which the engine takes no more."""
    running: int = 0
    waiting: int = 0
    kv_use: float = 0.0
    """Share of KV-cache blocks in use, 0 to 1."""
    kv_capacity_tokens: int | None = None
    prefix_hit_rate: float | None = None
    step_ms: float | None = None
    accepted_per_step: float | None = None
    """Draft tokens accepted per decode step of one sequence, lately."""
    pending_prefill_tokens: int = 0
    """Prompt tokens of in-flight requests without a first token, by the controller's count."""
    pending_output_tokens: int = 0
    """Output tokens still expected from in-flight requests, by the controller's count."""
    completions_per_s: float | None = None
    wake_ms: float | None = None
    age_s: float = 0.0


class Snapshot(JsonRecord, frozen=True, kw_only=True):
    """All engines by name, the device, and what has been learned online, as it was at one moment."""

    engines: Mapping[str, EngineView] = msgspec.field(default_factory=dict)
    tripped_modes: frozenset[str] = frozenset()
    """Modes whose circuit breaker is open."""
    device_total_bytes: int | None = None
    device_free_bytes: int | None = None
    stale_after_s: float = 2.0
    mean_prompt_tokens: float = 0.0
    mean_seen_tokens: float = 0.0
    mean_output_tokens: float = 0.0
    """What requests brought lately (see `traffic.py`); 0 while there were none."""
    mean_output_shares: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Which share of these output tokens was of which tag; empty where it is unknown."""
    arrivals_per_s: float = 0.0
    """Requests a second, lately."""
    corrections: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Observed/predicted latency by `engine`, by `engine:tag`, and of engines not seen (see `corrections.py`)."""
    accepted_per_step: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Learned draft tokens accepted per step by tag (see `acceptance.py`)."""

    def stale(self, view: EngineView) -> bool:
        """The engine's report is too old to count on."""
        return view.age_s > self.stale_after_s

    def total_load(self) -> int:
        """Requests on the device."""
        return sum(self.loads().values())

    def loads(self) -> dict[str, int]:
        """Requests on every engine, by name: the controller's count, or the engine's where that is fresh and larger."""
        # Written out, because it runs for every request, and again for every decision.
        stale_after_s = self.stale_after_s
        loads = {}
        for name, view in self.engines.items():
            load = view.in_flight
            if view.age_s <= stale_after_s:
                reported = view.running + view.waiting
                if reported > load:
                    load = reported
            loads[name] = load
        return loads

    def kv_use(self) -> float:
        """KV-cache use of the fullest engine whose report is fresh, 0 to 1."""
        stale_after_s = self.stale_after_s
        fullest = 0.0
        for view in self.engines.values():
            if view.kv_use > fullest and view.age_s <= stale_after_s:
                fullest = view.kv_use
        return fullest

    def device_free_share(self) -> float | None:
        """Free share of device memory, 0 to 1; None where it is unknown."""
        if not self.device_total_bytes or self.device_free_bytes is None:
            return None
        return self.device_free_bytes / self.device_total_bytes
