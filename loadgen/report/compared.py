"""The result of `compare` as material: policies by class and over everything, paired by request."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from loadgen.best_mode import Constraints, Score
from loadgen.compared_choices import choices_of, class_table, memory_by_mode, score_of_choices
from loadgen.comparison import ORACLE, STATIC, Place, Row, common_latencies, hindsight, ratio
from loadgen.report.material import (
    Comparison,
    Controlled,
    Estimate,
    Family,
    Latencies,
    Material,
    PolicyRow,
    Sample,
    Served,
    Timeline,
)
from loadgen.statistics import Interval, paired_bootstrap

_REFERENCE = f"{STATIC}fp16"
_TIMELINES = 4
"""Runs that are drawn in time: a comparison has dozens."""


def read_comparison(content: Any, path: Path, source: str, material: Material) -> None:
    """Adds what a `compare.json` holds. Raises KeyError, TypeError or ValueError for another form."""
    rows = [Row.read(item) for item in content["requests"]]
    policies = [str(name) for name in content["policies"]]
    memory_mb = memory_by_mode(content.get("engines"))
    for rate in dict.fromkeys(row.rate for row in rows):
        of_rate = [row for row in rows if row.rate == rate]
        present = [policy for policy in policies if any(row.policy == policy for row in of_rate)]
        reference = next((name for name in (_REFERENCE, *present) if name in present), None)
        if reference is None:
            continue
        setting = f"{rate} load"
        material.comparisons.append(
            Comparison(source, setting, reference, _policies(of_rate, rate, present, reference, memory_mb))
        )
        material.controlled += [
            Controlled(source, policy, setting, reference, _families(of_rate, rate, policy, reference))
            for policy in present
            if not policy.startswith(STATIC)
        ]
        material.latencies.append(Latencies(f"{source}, {setting}", _samples(of_rate, present)))
    material.timelines += list(_timelines(rows, source))[:_TIMELINES]


def _policies(
    rows: Sequence[Row], rate: str, policies: Sequence[str], reference: str, memory_mb: Mapping[str, float]
) -> list[PolicyRow]:
    latencies = common_latencies(rows, rate)
    scores = _scores(rows, rate, reference, memory_mb)
    statics = [policy for policy in latencies if policy.startswith(STATIC)]
    bound = fmean(hindsight(latencies, statics).values()) if statics and latencies[statics[0]] else None
    oracle = [] if bound is None else _oracle(rows, latencies, statics)
    found = []
    for policy in policies:
        of_policy = [row for row in rows if row.policy == policy]
        ours = latencies.get(policy) or {}
        interval = ratio(ours, latencies[reference]) if ours and reference in latencies else None
        found.append(
            PolicyRow(
                policy,
                len(of_policy),
                _speedup(interval),
                _energy(rows, policy, reference, None),
                None if bound is None or not ours else bound / fmean(ours.values()),
                scores[policy].oracle_match if policy in scores else None,
                scores[policy].unsafe if policy in scores else None,
                errors=sum(not row.ok for row in of_policy),
            )
        )
    if oracle and reference in latencies:
        fastest = {Place(row.round, row.index, row.name): row.latency_ms for row in oracle}
        found.append(
            PolicyRow(
                ORACLE,
                len(oracle),
                _speedup(ratio(fastest, latencies[reference])),
                _energy([*rows, *oracle], ORACLE, reference, None),
                oracle_share=1.0,
            )
        )
    return found


def _oracle(rows: Sequence[Row], latencies: Mapping[str, Mapping[Place, float]], statics: Sequence[str]) -> list[Row]:
    """Of each request that all answered, the row of the static mode that was fastest, known afterwards only."""
    fastest = {place: min(statics, key=lambda of: latencies[of][place]) for place in latencies[statics[0]]}
    return [
        replace(row, policy=ORACLE)
        for row in rows
        if row.ok and fastest.get(Place(row.round, row.index, row.name)) == row.policy
    ]


def _scores(rows: Sequence[Row], rate: str, reference: str, memory_mb: Mapping[str, float]) -> dict[str, Score]:
    """Of the policies that choose, where a fixed mode is the reference that constraints are stated against."""
    mode = reference.removeprefix(STATIC)
    table = {name: of for name, of in class_table(rows, rate, memory_mb).items() if mode in of}
    chosen = choices_of(rows, rate, table)
    return {policy: score_of_choices(choices, table, mode, Constraints()) for policy, choices in chosen.items()}


def _families(rows: Sequence[Row], rate: str, policy: str, reference: str) -> list[Family]:
    latencies = common_latencies(rows, rate)
    found = []
    for name in dict.fromkeys(row.name for row in rows):
        both = policy in latencies and reference in latencies
        interval = ratio(latencies[policy], latencies[reference], name) if both else None
        choices = Counter(row.mode for row in rows if row.policy == policy and row.name == name and row.mode)
        found.append(Family(name, _speedup(interval), _energy(rows, policy, reference, name), choices))
    return found


def _speedup(interval: Interval | None) -> Estimate | None:
    return None if interval is None else Estimate.read(interval._asdict()).inverse


def _energy(rows: Sequence[Row], policy: str, reference: str, name: str | None) -> Estimate | None:
    """Geometric mean of the joules against the reference's, over requests where both are known."""
    joules: dict[str, dict[tuple[int, int], float]] = {policy: {}, reference: {}}
    for row in rows:
        if row.policy in joules and row.ok and row.energy_j and (name is None or row.name == name):
            joules[row.policy][row.round, row.index] = row.energy_j
    places = joules[policy].keys() & joules[reference].keys()
    if not places:
        return None
    left, right = ([joules[one][place] for place in sorted(places)] for one in (policy, reference))
    return Estimate.read(paired_bootstrap(left, right)._asdict())


def _samples(rows: Sequence[Row], policies: Sequence[str]) -> list[Sample]:
    found = []
    for policy in policies:
        good = [row for row in rows if row.policy == policy and row.ok]
        if good:
            ttft_ms = [row.ttft_ms for row in good if row.ttft_ms is not None]
            found.append(Sample(policy, [row.latency_ms for row in good], ttft_ms))
    return found


def _timelines(rows: Sequence[Row], source: str) -> Iterator[Timeline]:
    """The first round of each policy that chooses, at each rate; each starts at its own first request."""
    first = min((row.round for row in rows), default=0)
    chosen = [row for row in rows if row.round == first and row.ok and not row.policy.startswith(STATIC)]
    for policy, rate in dict.fromkeys((row.policy, row.rate) for row in chosen):
        of_run = [row for row in chosen if (row.policy, row.rate) == (policy, rate)]
        begin_s = min(row.started_s for row in of_run)
        served = [
            Served(
                row.started_s - begin_s,
                row.started_s - begin_s + row.latency_ms / 1000,
                row.mode or "unknown",
                row.energy_j,
            )
            for row in of_run
        ]
        yield Timeline(f"{source}, {policy}, {rate} load", served)
