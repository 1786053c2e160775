"""Every metric of the application: name, unit, labels. `ray.util.metrics` exposes them to Prometheus.

Labels have few values: modes, classes, policies and reasons are fixed sets, and tenants are capped where they are told
(`app/energy/metrics.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol


class Metric(NamedTuple):
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    description: str
    boundaries: tuple[float, ...] = ()


_DECISION_US = (5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 5000.0)
_LATENCY_MS = (5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1e3, 2.5e3, 5e3, 1e4, 3e4, 6e4, 3e5)
_TOKENS = (1.0, 8.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 32768.0, 131072.0)
_RATIO = (0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)

CONTROLLER_METRICS: Mapping[str, Metric] = {
    "modeswitch_decisions_total": Metric(
        "counter", ("mode", "request_class", "policy", "reason"), "Requests sent to a mode, by what decided"
    ),
    "modeswitch_decision_us": Metric(
        "histogram", ("policy",), "Features and decision of one request, microseconds", _DECISION_US
    ),
    "modeswitch_queue_ms": Metric(
        "histogram", ("mode",), "From the engine's receipt to its first step, milliseconds", _LATENCY_MS
    ),
    "modeswitch_first_token_ms": Metric(
        "histogram", ("mode",), "From the controller's receipt to the first token, milliseconds", _LATENCY_MS
    ),
    "modeswitch_token_ms": Metric("histogram", ("mode",), "Mean time between tokens, milliseconds", _LATENCY_MS),
    "modeswitch_request_ms": Metric(
        "histogram", ("mode",), "From the controller's receipt to the end, milliseconds", _LATENCY_MS
    ),
    "modeswitch_predicted_ratio": Metric(
        "histogram", ("mode",), "Observed / predicted latency of requests to modes that are in the profile", _RATIO
    ),
    "modeswitch_prompt_tokens": Metric("histogram", ("mode",), "Prompt tokens of a request", _TOKENS),
    "modeswitch_output_tokens": Metric("histogram", ("mode",), "Output tokens of a request", _TOKENS),
    "modeswitch_generated_tokens_total": Metric(
        # A histogram's sum is no substitute: Ray makes it up from the middles of its buckets.
        "counter",
        ("mode",),
        "Output tokens of all requests that ended, whichever way",
    ),
    "modeswitch_requests_total": Metric("counter", ("mode", "status"), "Requests that ended, by how"),
    "modeswitch_reroutes_total": Metric("counter", ("engine",), "Requests moved away from an engine that failed them"),
    "modeswitch_refusals_total": Metric("counter", ("reason",), "Requests refused, by reason code"),
    "modeswitch_breaker_open": Metric("gauge", ("mode",), "1 while the mode's circuit breaker is open"),
    "modeswitch_engine_ready": Metric("gauge", ("engine",), "1 while the engine takes requests, else 0"),
    "modeswitch_kv_cache_use": Metric("gauge", ("engine",), "Share of the engine's KV cache that is in use, 0 to 1"),
    "modeswitch_in_flight": Metric("gauge", ("engine",), "Requests sent to the engine and not finished"),
    "modeswitch_records_dropped": Metric("gauge", (), "Records that never reached the ledger"),
}

ENERGY_METRICS: Mapping[str, Metric] = {
    "modeswitch_energy_joules_total": Metric(
        "counter", ("engine", "mode", "tenant", "request_class", "method"), "Joules above idle, credited"
    ),
    "modeswitch_energy_approximate_joules_total": Metric(
        "counter", ("device", "method"), "Part of the credited joules that a fallback split over engines"
    ),
    "modeswitch_energy_measured_joules_total": Metric("counter", ("device", "method"), "Joules the device used"),
    "modeswitch_energy_idle_joules_total": Metric("counter", ("device", "method"), "Joules of the idle baseline"),
    "modeswitch_energy_residual_joules": Metric(
        "gauge", ("device", "method"), "Measured - idle - credited, summed since the meter began; may be negative"
    ),
    "modeswitch_energy_idle_watts": Metric("gauge", ("device", "method"), "Calibrated idle power"),
    "modeswitch_energy_unmeasured_seconds_total": Metric(
        "counter", ("device", "method"), "Time whose energy is unknown (lost device, counter reset)"
    ),
    "modeswitch_energy_lost_reports": Metric("gauge", (), "Activity reports that never arrived"),
    "modeswitch_energy_dropped_reports": Metric("gauge", (), "Activity reports that engines could keep no longer"),
    "modeswitch_energy_dropped_slices": Metric("gauge", (), "Activity that engines had no room to keep"),
    "modeswitch_energy_late_busy_seconds": Metric("gauge", ("device",), "Busy time reported after it was settled"),
    "modeswitch_energy_sampler_events": Metric("gauge", ("event",), "Sampler faults and recoveries, by kind"),
    "modeswitch_energy_meter_cpu_share": Metric("gauge", (), "Share of one core that the meter's thread uses"),
}


class Telemetry(Protocol):
    """Where figures go. Label values are given in the order of the metric's `labels`."""

    def count(self, name: str, *labels: str, by: float = 1.0) -> None: ...
    def set(self, name: str, value: float, *labels: str) -> None: ...
    def observe(self, name: str, value: float, *labels: str) -> None: ...


class RayTelemetry:
    """Ray's metrics, which the node's Prometheus endpoint shows. Needs a running Ray worker."""

    def __init__(self, table: Mapping[str, Metric]) -> None:
        from ray.util import metrics

        self._labels = {name: metric.labels for name, metric in table.items()}
        self._metrics: dict[str, Any] = {}
        for name, metric in table.items():
            if metric.kind == "histogram":
                made: Any = metrics.Histogram(name, metric.description, list(metric.boundaries), metric.labels)
            else:
                kind = metrics.Counter if metric.kind == "counter" else metrics.Gauge
                made = kind(name, metric.description, metric.labels)
            self._metrics[name] = made

    def count(self, name: str, *labels: str, by: float = 1.0) -> None:
        # Ray refuses to count 0, and a counter never falls.
        if by > 0:
            self._metrics[name].inc(by, tags=self._tags(name, labels))

    def set(self, name: str, value: float, *labels: str) -> None:
        self._metrics[name].set(value, tags=self._tags(name, labels))

    def observe(self, name: str, value: float, *labels: str) -> None:
        self._metrics[name].observe(value, tags=self._tags(name, labels))

    def _tags(self, name: str, labels: tuple[str, ...]) -> dict[str, str]:
        return dict(zip(self._labels[name], labels, strict=True))


class NoTelemetry:
    """Takes everything and shows nothing: outside a Ray worker."""

    def count(self, name: str, *labels: str, by: float = 1.0) -> None: ...
    def set(self, name: str, value: float, *labels: str) -> None: ...
    def observe(self, name: str, value: float, *labels: str) -> None: ...
