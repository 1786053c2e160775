"""Names and labels of the metrics are one table, and everything that is told is in it."""

import re
from pathlib import Path

import app
from app.telemetry import CONTROLLER_METRICS, ENERGY_METRICS

TABLE = {**CONTROLLER_METRICS, **ENERGY_METRICS}
NAME = re.compile(r"\"(modeswitch_[a-z0-9_]+)\"")


def used_names():
    root = Path(app.__file__).parent
    files = [path for path in root.rglob("*.py") if path.name != "telemetry.py"]
    return {name for path in files for name in NAME.findall(path.read_text())} - {
        "modeswitch_report",
        "modeswitch_call",
    }


def test_every_metric_is_told_and_every_told_one_is_in_the_table():
    assert used_names() == set(TABLE)


def test_names_carry_their_unit_and_kind():
    for name, metric in TABLE.items():
        assert name.endswith("_total") == (metric.kind == "counter"), name
        assert (metric.kind == "histogram") == bool(metric.boundaries), name
        assert list(metric.boundaries) == sorted(metric.boundaries)
        assert metric.description


def test_labels_are_of_bounded_sets():
    bounded = {
        "mode", "request_class", "policy", "reason", "status", "engine", "tenant", "method", "device", "event",
    }  # fmt: skip
    assert {label for metric in TABLE.values() for label in metric.labels} <= bounded
