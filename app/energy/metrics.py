"""Metric names of energy accounting, with unit and labels, and how a flush is turned into them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Literal, NamedTuple

from app.energy.accounts import Rows


class Metric(NamedTuple):
    kind: Literal["counter", "gauge"]
    labels: tuple[str, ...]
    description: str


METRICS: dict[str, Metric] = {
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
    "modeswitch_energy_dropped_slices": Metric("gauge", (), "Activity that engines had no room to keep"),
    "modeswitch_energy_late_busy_seconds": Metric("gauge", ("device",), "Busy time reported after it was settled"),
    "modeswitch_energy_sampler_events": Metric("gauge", ("event",), "Sampler faults and recoveries, by kind"),
    "modeswitch_energy_meter_cpu_share": Metric("gauge", (), "Share of one core that the meter uses"),
}


class RayMetrics:
    """Feeds Ray's metrics, which the node's Prometheus endpoint shows. Needs a running Ray worker."""

    def __init__(self) -> None:
        from ray.util import metrics

        kinds = {"counter": metrics.Counter, "gauge": metrics.Gauge}
        self._metrics: dict[str, Any] = {
            name: kinds[metric.kind](name, description=metric.description, tag_keys=metric.labels)
            for name, metric in METRICS.items()
        }
        self._residual_j: dict[tuple[str, str], float] = defaultdict(float)

    def flushed(self, rows: Rows) -> None:
        """Add one flush."""
        methods = {row.device: row.method for row in rows.intervals}
        for row in rows.intervals:
            tags = {"device": row.device, "method": row.method}
            self._residual_j[row.device, row.method] += row.residual_j
            self._add("modeswitch_energy_measured_joules_total", row.measured_j, tags)
            self._add("modeswitch_energy_idle_joules_total", row.idle_j or 0.0, tags)
            self._add("modeswitch_energy_approximate_joules_total", row.approximate_j, tags)
            self._add("modeswitch_energy_unmeasured_seconds_total", row.unmeasured_s, tags)
            self._set("modeswitch_energy_residual_joules", self._residual_j[row.device, row.method], tags)
            if row.idle_w is not None:
                self._set("modeswitch_energy_idle_watts", row.idle_w, tags)
        for credit in rows.credits:
            tags = {
                "engine": credit.engine,
                "mode": credit.mode or "none",
                "tenant": credit.tenant or "none",
                "request_class": credit.request_class or "none",
                "method": methods[credit.device],
            }
            self._add("modeswitch_energy_joules_total", credit.energy_j, tags)

    def told(self, state: dict[str, Any]) -> None:
        """Show the meter's own state (`Meter.state`)."""
        self._set("modeswitch_energy_lost_reports", state["lost_reports"], {})
        self._set("modeswitch_energy_dropped_slices", state["dropped_slices"], {})
        if state["cpu_share"] is not None:
            self._set("modeswitch_energy_meter_cpu_share", state["cpu_share"], {})
        for device in state["devices"]:
            self._set("modeswitch_energy_late_busy_seconds", device["late_busy_s"], {"device": device["device"]})
        for event, count in state["sampler_events"].items():
            self._set("modeswitch_energy_sampler_events", count, {"event": event})

    def _add(self, name: str, value: float, tags: dict[str, str]) -> None:
        # Ray refuses to count 0, and a counter never falls.
        if value > 0:
            self._metrics[name].inc(value, tags=tags)

    def _set(self, name: str, value: float, tags: dict[str, str]) -> None:
        self._metrics[name].set(value, tags=tags)
