"""Alerts and dashboard ask for metrics and labels that exist, by the names that Ray exports them under."""

import json
import re
from typing import NamedTuple

import pytest
import yaml
from prometheus_client import generate_latest
from ray._private.telemetry.open_telemetry_metric_recorder import OpenTelemetryMetricRecorder

from app.openai_errors import ENGINE_LOST
from app.routing.decision import Ineligible
from app.telemetry import CONTROLLER_METRICS, ENERGY_METRICS

TABLE = {**CONTROLLER_METRICS, **ENERGY_METRICS}
METRIC = re.compile(r"\bray_\w+")
GROUPING = re.compile(r"\bby \(([^)]*)\)")
SELECTED = re.compile(r"(\w+)=~?\"([^\"]*)\"")


class Query(NamedTuple):
    where: str
    expr: str
    shown: frozenset[str]
    """Labels that its legend or its text names."""


def dashboard(cluster):
    return json.loads((cluster / "grafana" / "dashboards" / "modeswitch.json").read_text())


def rules(cluster):
    (group,) = yaml.safe_load((cluster / "alerts.yml").read_text())["groups"]
    return group["rules"]


@pytest.fixture(scope="module")
def queries(cluster):
    found = [
        Query(panel["title"], target["expr"], frozenset(re.findall(r"{{(\w+)}}", target["legendFormat"])))
        for panel in dashboard(cluster)["panels"]
        for target in panel["targets"]
    ]
    for rule in rules(cluster):
        text = " ".join(rule["annotations"].values())
        found.append(Query(rule["alert"], rule["expr"], frozenset(re.findall(r"\$labels\.(\w+)", text))))
    return found


@pytest.fixture(scope="module")
def exported():
    """The table's metric by each name that Ray's exporter writes for it."""
    recorder = OpenTelemetryMetricRecorder()
    for name, metric in TABLE.items():
        if metric.kind == "histogram":
            recorder.register_histogram_metric(name, metric.description, list(metric.boundaries))
        elif metric.kind == "counter":
            recorder.register_counter_metric(name, metric.description)
        else:
            recorder.register_gauge_metric(name, metric.description)
        recorder.set_metric_value(name, dict.fromkeys(metric.labels, "x"), 1.0)
    written = {line.split("{")[0].split(" ")[0] for line in generate_latest().decode().splitlines() if line[0] != "#"}
    found = {}
    for name, metric in TABLE.items():
        suffixes = ("_bucket", "_count", "_sum") if metric.kind == "histogram" else ("",)
        found |= {f"ray_{name}{suffix}": metric for suffix in suffixes}
    assert found.keys() <= written
    return found


def test_every_metric_exists(queries, exported):
    for query in queries:
        assert METRIC.findall(query.expr), query
        assert set(METRIC.findall(query.expr)) <= exported.keys(), query


def test_every_label_is_one_of_the_metric(queries, exported):
    for query in queries:
        metrics = [exported[name] for name in METRIC.findall(query.expr)]
        grouped = {label.strip() for labels in GROUPING.findall(query.expr) for label in labels.split(",")}
        for metric in metrics:
            assert grouped <= {*metric.labels, "le"}, query
        selected = {label for label, _ in SELECTED.findall(query.expr)}
        assert selected <= {label for metric in metrics for label in metric.labels}, query
        assert query.shown <= grouped, query


def test_rates_are_of_counters_and_nothing_trusts_a_histograms_sum(queries, exported):
    """Ray hands on how many are in each bucket and makes the sum up from the buckets' middles."""
    for query in queries:
        assert "_sum" not in query.expr, query
        for name in re.findall(r"(?:rate|increase)\((ray_\w+)", query.expr):
            assert exported[name].kind != "gauge", query
        for name in re.findall(r"delta\((ray_\w+)", query.expr):
            assert exported[name].kind == "gauge", query


def test_reasons_are_ones_that_requests_are_refused_for(queries):
    known = {*Ineligible, ENGINE_LOST, "deadline_exceeded"}
    named = {value for query in queries for label, value in SELECTED.findall(query.expr) if label == "reason"}
    assert named
    assert {reason for value in named for reason in value.split("|")} <= known


def test_panels_and_alerts_are_told_apart(cluster):
    panels = dashboard(cluster)["panels"]
    for key in ("id", "title"):
        assert len({panel[key] for panel in panels}) == len(panels)
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)
    alerts = [rule["alert"] for rule in rules(cluster)]
    assert len(set(alerts)) == len(alerts)


def test_the_dashboard_reads_the_source_that_is_provisioned(cluster):
    provisioned = yaml.safe_load((cluster / "grafana/provisioning/datasources/prometheus.yaml").read_text())
    (source,) = provisioned["datasources"]
    used = {target["datasource"]["uid"] for panel in dashboard(cluster)["panels"] for target in panel["targets"]}
    assert used == {source["uid"]}


def test_prometheus_loads_the_alerts_that_lie_beside_it(cluster):
    config = yaml.safe_load((cluster / "prometheus.yml").read_text())
    assert [(cluster / name).exists() for name in config["rule_files"]] == [True]
