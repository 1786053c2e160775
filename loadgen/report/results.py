"""Reads a folder of results: whatever the measuring commands wrote, wherever below it lies."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from loadgen.records import Outcome, RequestRecord, read_records
from loadgen.report.compared import read_comparison
from loadgen.report.material import (
    ACCURACY,
    Accuracy,
    Comparison,
    Confusion,
    Effect,
    Estimate,
    Latencies,
    Material,
    PolicyRow,
    Sample,
    Screening,
    Served,
    Timeline,
)


def read_results(folder: Path) -> Material:
    """All results below `folder`. A file that is damaged is named in `unreadable`; the rest is read."""
    material = Material(title=f"Results of {folder.name or folder}")
    for path in sorted(folder.rglob("*.json")):
        read = _READERS.get(path.name)
        if read is None:
            continue
        try:
            read(json.loads(path.read_text()), path, str(path.relative_to(folder)), material)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
            material.unreadable.append(f"{path.relative_to(folder)}: {type(error).__name__}: {error}")
    return material


def _read_sweep(content: Any, path: Path, source: str, material: Material) -> None:
    effects = []
    for row in content["rows"]:
        ratio = row["latency"]["ratio"]
        if ratio is None:
            continue
        energy = (row.get("energy") or row.get("j_per_token") or {}).get("ratio")
        effects.append(
            Effect(
                f"{row['workload']} × {row['concurrency']}",
                str(row["mode"]),
                Estimate.read(ratio).inverse,
                None if energy is None else Estimate.read(energy),
            )
        )
    if effects:
        material.screenings.append(Screening(source, str(content["reference"]), effects))


def _read_summary(content: Any, path: Path, source: str, material: Material) -> None:
    """Several commands write a file of this name."""
    if content.get("command") == "run":
        _read_run(path, source, material)
    elif content.get("command") == "quality":
        _read_accuracy(content, source, material)


def _read_run(path: Path, source: str, material: Material) -> None:
    read = read_records(path.with_name("requests.jsonl"))
    if read.damaged_lines:
        material.unreadable.append(f"{source}: {read.damaged_lines} damaged lines of requests.jsonl are left out")
    good = [record for record in read.records if record.outcome is Outcome.OK and not record.warmup]
    if not good:
        return
    by_workload: dict[str, list[RequestRecord]] = {}
    for record in good:
        by_workload.setdefault(record.workload, []).append(record)
    material.latencies.append(Latencies(source, [_sample(name, found) for name, found in by_workload.items()]))
    material.timelines.append(Timeline(source, [_served(record) for record in good]))


def _sample(group: str, records: list[RequestRecord]) -> Sample:
    ttft_ms = [record.ttft_ms for record in records if record.ttft_ms is not None]
    return Sample(group, [record.total_ms for record in records], ttft_ms)


def _served(record: RequestRecord) -> Served:
    ended_s = record.sent_s + record.total_ms / 1000
    return Served(record.sent_s, ended_s, record.mode or "unknown", record.energy_j)


def _read_confusion(content: Any, path: Path, source: str, material: Material) -> None:
    for model in content["models"]:
        labels, matrix = [str(label) for label in model["labels"]], [[float(n) for n in row] for row in model["matrix"]]
        if len(matrix) != len(labels) or any(len(row) != len(labels) for row in matrix):
            raise ValueError(f"the matrix of {model['name']} is not {len(labels)} by {len(labels)}")
        material.confusions.append(Confusion(source, str(model["name"]), labels, matrix))


def _read_training(content: Any, path: Path, source: str, material: Material) -> None:
    """What `train` judged on held-out requests: a comparison of all, and the confusion of those that were trained.

    A learner's decision takes as long whether live signals are told or 0, so both rows have the exported model's time.
    """
    held = content["held"]
    overheads_ms = {str(name): float(of["p50_us"]) / 1000 for name, of in content.get("exported", {}).items()}
    rows = [
        PolicyRow(
            str(name),
            round(item["requests"]),
            Estimate.read(item["speedup_interval"]) if "speedup_interval" in item else Estimate(float(item["speedup"])),
            Estimate.read(item["energy_ratio"]) if item.get("energy_ratio") else None,
            oracle_share=float(item["latency_capture"]),
            oracle_match=float(item["match"]),
            unsafe=round(item["unsafe"] * item["requests"]),  # `train` gives the share
            overhead_ms=overheads_ms.get(str(name).partition(",")[0]),
        )
        for name, item in held.items()
    ]
    reference = str(content["reference"])
    material.comparisons.append(Comparison(source, "held-out requests", reference, rows, "prompt groups"))
    for name, item in held.items():
        pairs = {(str(one["oracle"]), str(one["chosen"])): float(one["requests"]) for one in item["confusion"]}
        labels = sorted({label for pair in pairs for label in pair})
        # The oracle and the fixed modes learn nothing, so there is nothing that they confuse.
        if "," in name and labels:
            matrix = [[pairs.get((best, chosen), 0.0) for chosen in labels] for best in labels]
            material.confusions.append(Confusion(source, str(name), labels, matrix))


def _read_accuracy(content: Any, source: str, material: Material) -> None:
    """Right answers of each mode, the reference among them, to the questions of each suite."""
    found = [
        Accuracy(
            str(item["mode"]),
            str(item["suite"]),
            ACCURACY,
            Estimate.percent(float(item["right_pct"]), int(item["questions"])),
        )
        for item in content["accuracy_pct"]
    ]
    if found:
        material.accuracies.append((source, found))


def _read_quality(content: Any, path: Path, source: str, material: Material) -> None:
    found = [
        Accuracy(
            str(item["mode"]),
            str(item["scope"]),
            str(item["metric"]),
            Estimate(float(item["delta"]), item.get("low"), item.get("high"), int(item.get("samples") or 0)),
            str(item["outcome"]),
        )
        for item in _evidence(content)
    ]
    if found:
        material.accuracies.append((source, found))


def _evidence(content: Any) -> Iterator[Mapping[str, Any]]:
    """Evidence that has a figure; that without one (no signal, no samples) has nothing to show."""
    for item in content["quality"] if isinstance(content, dict) else content:
        if item.get("delta") is not None:
            yield item


_READERS: dict[str, Callable[[Any, Path, str, Material], None]] = {
    "sweep.json": _read_sweep,
    "summary.json": _read_summary,
    "compare.json": read_comparison,
    "confusion.json": _read_confusion,
    "train.json": _read_training,
    "quality.json": _read_quality,
}
