"""Metrics add up to the accounts, with the labels that their table names."""

from collections import defaultdict

import pytest

from app.energy.accounts import Rows
from app.energy.metrics import _MOST_TENANTS, EnergyMetrics
from app.energy.rows import CreditRow, IntervalRow
from app.telemetry import ENERGY_METRICS
from tests.energy.schedules import IDLE_W, Burst
from tests.energy.world import World

BURSTS = [Burst("A", 4, 6, 300, ("alice:1", "bob:1")), Burst("B", 5, 9, 150, ("alice:2",))]
DEVICE = ("GPU-0", "nvml_counter")


class Kept:
    """Telemetry that a test can read; labels must be as many as the table has."""

    def __init__(self):
        self.values = defaultdict(dict)

    def count(self, name, *labels, by=1.0):
        assert ENERGY_METRICS[name].kind == "counter"
        assert by >= 0
        self._put(name, labels, self.values[name].get(labels, 0.0) + by)

    def set(self, name, value, *labels):
        assert ENERGY_METRICS[name].kind == "gauge"
        self._put(name, labels, value)

    def _put(self, name, labels, value):
        assert len(labels) == len(ENERGY_METRICS[name].labels)
        self.values[name][labels] = value


@pytest.fixture
def kept():
    return Kept()


def test_a_flush_adds_its_joules_with_their_labels(stub, tmp_path, kept):
    world = World(stub, tmp_path / "e.sqlite", BURSTS)
    meter = world.start_meter(observe=EnergyMetrics(kept).flushed)
    world.run(14)
    totals = world.totals(meter)
    joules = kept.values["modeswitch_energy_joules_total"]
    assert joules.keys() == {
        ("A", "A_mode", "alice", "standard", "nvml_counter"),
        ("A", "A_mode", "bob", "standard", "nvml_counter"),
        ("B", "B_mode", "alice", "standard", "nvml_counter"),
    }
    assert sum(joules.values()) == pytest.approx(totals.credited_j)
    for name, value in {
        "modeswitch_energy_measured_joules_total": totals.measured_j,
        "modeswitch_energy_idle_joules_total": totals.idle_j,
        "modeswitch_energy_approximate_joules_total": totals.approximate_j,
        "modeswitch_energy_residual_joules": totals.residual_j,
        "modeswitch_energy_unmeasured_seconds_total": 0.0,
    }.items():
        assert kept.values[name] == {DEVICE: pytest.approx(value)}
    assert kept.values["modeswitch_energy_idle_watts"] == {DEVICE: pytest.approx(IDLE_W, rel=0.02)}


def test_an_engines_own_joules_are_nobodys(stub, tmp_path, kept):
    world = World(stub, tmp_path / "e.sqlite", [Burst("A", 4, 6, 300, ())])
    meter = world.start_meter(observe=EnergyMetrics(kept).flushed)
    world.run(9)
    meter.flush()
    assert kept.values["modeswitch_energy_joules_total"] == {
        ("A", "none", "none", "none", "nvml_counter"): pytest.approx(600, rel=0.02)
    }


def test_the_state_shows_what_goes_wrong(kept):
    state = {
        "lost_reports": 1,
        "dropped_reports": 2,
        "dropped_slices": 3,
        "cpu_share": 0.01,
        "devices": [{"device": "GPU-0", "late_busy_s": 0.5}],
        "sampler_events": {"lost": 4},
    }
    EnergyMetrics(kept).told(state)
    assert kept.values == {
        "modeswitch_energy_lost_reports": {(): 1},
        "modeswitch_energy_dropped_reports": {(): 2},
        "modeswitch_energy_dropped_slices": {(): 3},
        "modeswitch_energy_meter_cpu_share": {(): 0.01},
        "modeswitch_energy_late_busy_seconds": {("GPU-0",): 0.5},
        "modeswitch_energy_sampler_events": {("lost",): 4},
    }


def test_a_meters_own_state_is_told(stub, tmp_path, kept):
    """Before anything ran there is no share to tell, and no device went wrong."""
    meter = World(stub, tmp_path / "e.sqlite", []).start_meter()
    EnergyMetrics(kept).told(meter.state())
    assert kept.values == {
        "modeswitch_energy_lost_reports": {(): 0},
        "modeswitch_energy_dropped_reports": {(): 0},
        "modeswitch_energy_dropped_slices": {(): 0},
        "modeswitch_energy_late_busy_seconds": {("GPU-0",): 0.0},
    }


def test_tenants_with_a_label_of_their_own_are_bounded(kept):
    metrics = EnergyMetrics(kept)
    credits = [
        CreditRow(1.0, "cpu", "fp16", "fp16", f"tenant {number % (5 * _MOST_TENANTS)}", "standard", 1.0, 0.0, 1.0, 1.0)
        for number in range(10 * _MOST_TENANTS)
    ]
    interval = IntervalRow(
        0.0, 1.0, "cpu", "modelled", "package", 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, None, "boot", 1.0, None
    )
    metrics.flushed(Rows([interval], credits, []))
    tenants = {labels[2] for labels in kept.values["modeswitch_energy_joules_total"]}
    assert tenants == {"other", *(f"tenant {number}" for number in range(_MOST_TENANTS))}
