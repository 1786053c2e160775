"""How a flush of the meter is turned into metrics (`ENERGY_METRICS` in `app/telemetry.py`)."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from app.energy.accounts import Rows
from app.telemetry import Telemetry

_MOST_TENANTS = 100
"""Tenants with a label of their own, the first ones that were seen: a label lives as long as the process."""
_OTHER_TENANTS = "other"


class EnergyMetrics:
    """Feeds the energy metrics; owned by the meter's thread."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._residual_j: dict[tuple[str, str], float] = defaultdict(float)
        self._tenants: set[str] = set()

    def flushed(self, rows: Rows) -> None:
        """Add one flush."""
        count, put = self._telemetry.count, self._telemetry.set
        methods = {row.device: row.method for row in rows.intervals}
        for row in rows.intervals:
            labels = (row.device, row.method)
            self._residual_j[labels] += row.residual_j
            count("modeswitch_energy_measured_joules_total", *labels, by=row.measured_j)
            count("modeswitch_energy_idle_joules_total", *labels, by=row.idle_j or 0.0)
            count("modeswitch_energy_approximate_joules_total", *labels, by=row.approximate_j)
            count("modeswitch_energy_unmeasured_seconds_total", *labels, by=row.unmeasured_s)
            put("modeswitch_energy_residual_joules", self._residual_j[labels], *labels)
            if row.idle_w is not None:
                put("modeswitch_energy_idle_watts", row.idle_w, *labels)
        for credit in rows.credits:
            count(
                "modeswitch_energy_joules_total",
                credit.engine,
                credit.mode or "none",
                self._tenant(credit.tenant or "none"),
                credit.request_class or "none",
                methods[credit.device],
                by=credit.energy_j,
            )

    def _tenant(self, name: str) -> str:
        if name not in self._tenants:
            if len(self._tenants) >= _MOST_TENANTS:
                return _OTHER_TENANTS
            self._tenants.add(name)
        return name

    def told(self, state: dict[str, Any]) -> None:
        """Show the meter's own state (`Meter.state`)."""
        put = self._telemetry.set
        put("modeswitch_energy_lost_reports", state["lost_reports"])
        put("modeswitch_energy_dropped_reports", state["dropped_reports"])
        put("modeswitch_energy_dropped_slices", state["dropped_slices"])
        if state["cpu_share"] is not None:
            put("modeswitch_energy_meter_cpu_share", state["cpu_share"])
        for device in state["devices"]:
            put("modeswitch_energy_late_busy_seconds", device["late_busy_s"], device["device"])
        for event, count in state["sampler_events"].items():
            put("modeswitch_energy_sampler_events", count, event)
