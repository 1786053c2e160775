"""Policies side by side: what a comparison's rows say. Pure: rows in, figures and sentences out.

Only requests that every policy has answered are compared, each with itself: the same place of the same trace.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, NamedTuple, Self

import numpy as np

from loadgen.statistics import (
    Interval,
    Statistic,
    paired_bootstrap,
    percentile,
    ratio_of_means,
    ratio_of_p95,
    ratio_of_pairs,
    total,
)

LIGHT, SATURATING = "light", "saturating"
STATIC = "static:"
ORACLE = "hindsight oracle"
RULES = "rules"
_RESAMPLES = 2000


class Place(NamedTuple):
    """One request of the recipe's traces, whoever serves it."""

    round: int
    position: int
    name: str
    """Its class in the recipe."""


@dataclass(frozen=True, slots=True)
class Row:
    """One request under one policy. Unknown is None; `latency_ms` counts from when the request was due."""

    policy: str
    name: str
    tag: str
    mode: str | None
    rate: str
    round: int
    index: int
    status: str
    latency_ms: float
    ttft_ms: float | None
    energy_j: float | None
    output_tokens: int | None
    started_s: float

    def as_json(self) -> dict[str, Any]:
        row = asdict(self)
        row["class"] = row.pop("name")
        return row

    @classmethod
    def read(cls, item: Mapping[str, Any]) -> Self:
        """From `as_json`. Raises KeyError or TypeError for another form."""
        values = {**item, "name": item["class"]}
        return cls(**{name: values[name] for name in cls.__slots__})

    @property
    def ok(self) -> bool:
        return self.status == "ok"


Latencies = dict[str, dict[Place, float]]
"""Latencies in ms by policy, over the same places for each."""


def common_latencies(rows: Iterable[Row], rate: str) -> Latencies:
    """Latencies at one rate of the requests that every policy there has answered.

    A policy that has answered none is left out: it would leave nothing to compare for the others.
    """
    found: Latencies = {}
    for row in rows:
        if row.rate == rate and row.ok:
            found.setdefault(row.policy, {})[Place(row.round, row.index, row.name)] = row.latency_ms
    common = set.intersection(*(set(places) for places in found.values())) if found else set()
    return {policy: {place: places[place] for place in sorted(common)} for policy, places in found.items()}


def hindsight(latencies: Latencies, statics: Sequence[str]) -> dict[Place, float]:
    """The fastest static mode's latency of each request, known afterwards only.

    It takes the luck of each measurement too, so it is a bound that no policy reaches.
    """
    return {place: min(latencies[policy][place] for policy in statics) for place in latencies[statics[0]]}


def class_oracle(latencies: Latencies, statics: Sequence[str]) -> dict[Place, float]:
    """Latencies with the best static mode of each class, chosen by its mean: a bound without the luck."""
    places = list(latencies[statics[0]])
    best = {
        name: min(statics, key=lambda policy: fmean(latencies[policy][place] for place in places if place.name == name))
        for name in {place.name for place in places}
    }
    return {place: latencies[best[place.name]][place] for place in places}


def headroom_share(
    latencies: Mapping[Place, float], best_static: Mapping[Place, float], oracle: Mapping[Place, float], seed: int = 0
) -> Interval | None:
    """Which share of what the oracle saves over the best static mode a policy saves; 1 is all, negative is a loss.

    None where the oracle saves nothing. The interval resamples requests.
    """
    ours, static, bound = (
        np.array([of[place] for place in latencies], dtype=np.float64) for of in (latencies, best_static, oracle)
    )
    if not len(ours) or static.mean() - bound.mean() <= 1e-9:
        return None
    estimate = float((static.mean() - ours.mean()) / (static.mean() - bound.mean()))
    draws = np.random.default_rng(seed).integers(0, len(ours), size=(_RESAMPLES, len(ours)))
    saved, possible = (static - ours)[draws].mean(axis=1), (static - bound)[draws].mean(axis=1)
    shares = saved[possible > 0] / possible[possible > 0]
    low, high = np.percentile(shares, (2.5, 97.5)) if len(shares) > 1 else (-math.inf, math.inf)
    return Interval(estimate, float(low), float(high), len(ours))


def ratio(
    left: Mapping[Place, float],
    right: Mapping[Place, float],
    name: str | None = None,
    statistic: Statistic = ratio_of_pairs,
) -> Interval | None:
    """Left against right over the requests (of one class); below 1 is faster. None without any.

    By default the geometric mean of each request's ratio. The interval resamples requests: those of a busy run wait for
    one another, so there it is narrower than what more rounds would show.
    """
    places = [place for place in left if name is None or place.name == name]
    if not places:
        return None
    return paired_bootstrap(
        [left[place] for place in places], [right[place] for place in places], statistic, resamples=_RESAMPLES
    )


@dataclass(frozen=True, slots=True)
class PolicyFigures:
    """One policy at one rate."""

    requests: int
    errors: int
    mean_ms: float | None
    p95_ms: float | None
    tokens_per_s: float | None
    """Output tokens of answered requests over the time from the first due one to the last end; mean over rounds."""
    energy_j: float | None
    """Mean of the requests whose joules are known; None where none's are."""
    energy_requests: int
    """How many requests that are."""
    modes: dict[str, int]


def policy_figures(rows: Sequence[Row], latencies: Mapping[Place, float]) -> PolicyFigures:
    """Figures of one policy's rows at one rate; its latencies are of the requests that all policies answered."""
    values = list(latencies.values())
    joules = [row.energy_j for row in rows if row.ok and row.energy_j is not None]
    rates = round_rates(rows).values()
    return PolicyFigures(
        requests=len(rows),
        errors=sum(not row.ok for row in rows),
        mean_ms=fmean(values) if values else None,
        p95_ms=percentile(values, 95) if values else None,
        tokens_per_s=fmean(rates) if rates else None,
        energy_j=fmean(joules) if joules else None,
        energy_requests=len(joules),
        modes=dict(Counter(row.mode for row in rows if row.mode)),
    )


def round_rates(rows: Sequence[Row]) -> dict[int, float]:
    """Output tokens/s of each round, but for those in which an answer's tokens are unknown."""
    found = {}
    for number in sorted({row.round for row in rows}):
        answered = [row for row in rows if row.round == number and row.ok]
        tokens = total(row.output_tokens for row in answered)
        if answered and tokens is not None:
            begin_s = min(row.started_s for row in answered)
            end_s = max(row.started_s + row.latency_ms / 1000 for row in answered)
            found[number] = tokens / max(1e-6, end_s - begin_s)
    return found


def rate_summary(rows: Sequence[Row], rate: str, allowed: Sequence[str]) -> dict[str, Any] | None:
    """All figures at one rate, ready for JSON; None when no request was answered by all policies.

    allowed: static policies that count for the best static mode and the oracle.
    """
    latencies = common_latencies(rows, rate)
    if not latencies or not next(iter(latencies.values())):
        return None
    of = {policy: [row for row in rows if row.rate == rate and row.policy == policy] for policy in latencies}
    figures = {policy: policy_figures(of[policy], latencies[policy]) for policy in latencies}
    summary: dict[str, Any] = {
        "compared_requests": len(next(iter(latencies.values()))),
        "policies": {policy: asdict(one) for policy, one in figures.items()},
    }
    statics = [policy for policy in latencies if policy in allowed]
    if not statics:
        return summary
    best = min(statics, key=lambda policy: fmean(latencies[policy].values()))
    oracle, by_class = hindsight(latencies, statics), class_oracle(latencies, statics)
    names = sorted({place.name for place in oracle})
    summary |= {
        "best_static": best,
        "oracle_ms": fmean(oracle.values()),
        "class_oracle_ms": fmean(by_class.values()),
        "best_static_by_class": {
            name: min(statics, key=lambda one: fmean(ms for at, ms in latencies[one].items() if at.name == name))
            for name in names
        },
        "against_best_static": {
            policy: _against(policy, best, latencies, of)
            | {
                "mean_ratio_by_class": {
                    name: _json(ratio(latencies[policy], latencies[best], name, ratio_of_means)) for name in names
                },
                "headroom_share": _json(headroom_share(latencies[policy], latencies[best], oracle)),
                "class_headroom_share": _json(headroom_share(latencies[policy], latencies[best], by_class)),
            }
            for policy in latencies
            if policy != best
        },
    }
    if RULES in latencies:
        summary["against_rules"] = {
            policy: _against(policy, RULES, latencies, of) for policy in latencies if policy != RULES
        }
    return summary


def _against(policy: str, other: str, latencies: Latencies, of: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    """A policy's figures as ratios to another's, with their intervals; latencies below 1 and throughput above win."""
    ours, theirs = latencies[policy], latencies[other]
    return {
        "mean_ratio": _json(ratio(ours, theirs, statistic=ratio_of_means)),
        "p95_ratio": _json(ratio(ours, theirs, statistic=ratio_of_p95)),
        "throughput_ratio": _json(_throughput_ratio(of[policy], of[other])),
        "latency_ratio": _json(ratio(ours, theirs)),
    }


def _throughput_ratio(left: Sequence[Row], right: Sequence[Row]) -> Interval | None:
    """Of the means over rounds. The interval resamples rounds, of which there are few: it has no ends for one."""
    ours, theirs = round_rates(left), round_rates(right)
    rounds = sorted(number for number in ours.keys() & theirs.keys() if ours[number] > 0 and theirs[number] > 0)
    if not rounds:
        return None
    return paired_bootstrap([ours[number] for number in rounds], [theirs[number] for number in rounds], ratio_of_means)


def _json(interval: Interval | None) -> dict[str, Any] | None:
    return None if interval is None else interval.as_json()


def sentences(summary: Mapping[str, Any]) -> list[str]:
    """What came out, in words: every policy that chooses, at both rates."""
    words = []
    for rate in (LIGHT, SATURATING):
        found = summary.get(rate)
        if found is None or "best_static" not in found:
            continue
        choosing = (policy for policy in found["against_best_static"] if not policy.startswith(STATIC))
        words += [_sentence(rate, policy, found) for policy in choosing]
    return words


def _sentence(rate: str, policy: str, found: Mapping[str, Any]) -> str:
    best, against = found["best_static"], found["against_best_static"][policy]
    ours, theirs = found["policies"][policy], found["policies"][best]
    text = (
        f"{rate.capitalize()} load: {policy} takes {ours['mean_ms']:.0f} ms on average (P95 {ours['p95_ms']:.0f}), "
        f"{best}, the best single mode, {theirs['mean_ms']:.0f} ms (P95 {theirs['p95_ms']:.0f}): "
        f"{_ratios(rate, against)}"
    )
    if rate == LIGHT and against["headroom_share"] is not None:
        text += (
            f"; it saves {percent_words(against['headroom_share'])} of what the hindsight oracle saves over {best}"
            f" ({percent_words(against['class_headroom_share'])} of what the best mode by class saves)"
        )
    by_class = against["mean_ratio_by_class"]
    if rate == LIGHT and by_class:
        worst = max(by_class, key=lambda name: by_class[name]["estimate"])
        text += f"; of the classes it does worst on {worst}, {ratio_words(by_class[worst])} times the mean latency"
    if (against_rules := found.get("against_rules", {}).get(policy)) is not None:
        text += f"; against {RULES}: {_ratios(rate, against_rules)}"
    sent = ", ".join(f"{mode} {count}" for mode, count in sorted(ours["modes"].items(), key=lambda item: -item[1]))
    return f"{text}. It sent: {sent or 'unknown'}."


def _ratios(rate: str, against: Mapping[str, Any]) -> str:
    text = f"{ratio_words(against['mean_ratio'])} times the mean, {ratio_words(against['p95_ratio'])} times the P95"
    if rate == SATURATING and against["throughput_ratio"] is not None:
        text += f", {ratio_words(against['throughput_ratio'])} times the throughput"
    return text


def ratio_words(interval: Mapping[str, Any] | None) -> str:
    """A ratio of a summary with its interval."""
    return _formatted(interval, lambda value: f"{value:.2f}")


def percent_words(interval: Mapping[str, Any] | None) -> str:
    """A share of a summary with its interval."""
    return _formatted(interval, lambda value: f"{100 * value:.0f} %")


def _formatted(interval: Mapping[str, Any] | None, form: Callable[[float], str]) -> str:
    if interval is None:
        return "nothing"
    if interval["low"] is None or interval["high"] is None:
        return f"{form(interval['estimate'])} [no interval from one pair]"
    return f"{form(interval['estimate'])} [{form(interval['low'])}, {form(interval['high'])}]"


def training_rows(
    rows: Iterable[Row], features: Mapping[tuple[str, int, int], Mapping[str, Any]], seed: int
) -> list[dict[str, Any]]:
    """One row a prompt: its features, and what each fixed mode made of it.

    features: by (rate, round, index). A group is one prompt: splits by group keep a prompt out of train and test at
    once. Prompts that are measured at both rates are one group.
    """
    found: dict[tuple[str, int, int], dict[str, Any]] = {}
    for row in rows:
        key = (row.rate, row.round, row.index)
        if not row.ok or not row.policy.startswith(STATIC) or key not in features:
            continue
        entry = found.setdefault(
            key,
            {"group": f"{row.name}/{seed + row.round}/{row.index}", "features": dict(features[key]), "modes": {}},
        )
        mode = row.policy.removeprefix(STATIC)
        entry["modes"][mode] = {"latency_ms": row.latency_ms, "energy_j": row.energy_j}
    return list(found.values())
