"""Who used the joules of one window of time. Pure: no clock, no device, no state.

    measured = idle + credited + residual

Idle is the calibrated baseline times the window's length. What was measured above it is credited to the engines that
were active in the window, by work; a window in which nobody was active credits nothing, so all it measured above idle
is residual: energy that no report explains. An engine's joules go to its requests slice by slice, by weighted tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from app.energy.activity import Slice


class Basis(StrEnum):
    """By what the joules of a window were split over engines."""

    NONE = "none"
    """Nobody was active."""
    ALONE = "alone"
    """One engine was active; nothing had to be split."""
    PROCESS_CPU = "process_cpu"
    """CPU time of each engine's processes."""
    BUSY_POWER = "busy_power"
    """Busy time, times each engine's own power as learned from windows before."""
    BUSY_TIME = "busy_time"
    """The same, but not every engine's power is known yet: a poor guess, or all alike. Approximate."""
    TOKEN_SHARE = "token_share"
    """Weighted tokens, because an engine could not tell how long it was busy. Approximate."""


APPROXIMATE = frozenset({Basis.BUSY_TIME, Basis.TOKEN_SHARE})


class TokenWeights(NamedTuple):
    """What a token costs, relative to the others of its engine; in joules where they were measured."""

    prefill: float
    decode: float


class PowerEstimate(NamedTuple):
    """Watts above idle while busy, by engine, and the engines for which there is evidence enough."""

    watts: Mapping[str, float]
    known: frozenset[str]


class Placed(NamedTuple):
    """A slice of an engine's activity on the device in question."""

    engine: str
    slice: Slice


class Window(NamedTuple):
    """A stretch of time and what the device used in it."""

    start_s: float
    end_s: float
    measured_j: float
    end_energy_j: float = 0.0
    """The device's cumulative reading at the end."""


class Credit(NamedTuple):
    """Joules of one request, or (request None) of an engine for itself."""

    engine: str
    request_id: str | None
    energy_j: float
    prefill_tokens: float
    decode_tokens: float


@dataclass(frozen=True, slots=True)
class Settlement:
    """The account of one window.

    `idle_j` is None while no baseline is known and an engine is active; idle is then inside the credits.
    """

    window: Window
    idle_j: float | None
    credits: tuple[Credit, ...]
    residual_j: float
    basis: Basis
    busy_s: Mapping[str, float]
    """By engine, within the window."""

    @property
    def credited_j(self) -> float:
        return sum(credit.energy_j for credit in self.credits)


def settle(
    window: Window,
    placed: Sequence[Placed],
    idle_w: float | None,
    weights: TokenWeights,
    power: PowerEstimate | None = None,
    cpu_s: Mapping[str, float] | None = None,
    measured: Mapping[str, TokenWeights] | None = None,
) -> Settlement:
    """Split a window's joules.

    `power` is what engines draw above idle while busy, `cpu_s` their processes' CPU seconds within the window.
    `measured` are the weights of single engines in joules per token; `weights` are those of the others.
    """
    parts = [part for item in placed if (part := _clip(item, window))]
    idle_j = None if idle_w is None else idle_w * (window.end_s - window.start_s)
    if idle_j is None and not parts:
        # The baseline's first second: nothing to check it against yet, and nobody to blame it on.
        idle_j = window.measured_j
    above_idle_j = window.measured_j - (idle_j or 0.0)
    by_engine: dict[str, list[_Part]] = defaultdict(list)
    for part in parts:
        by_engine[part.engine].append(part)
    own_weights = {engine: (measured or {}).get(engine, weights) for engine in by_engine}
    # Joules may be compared between engines; with mere ratios of one of them, all have to be weighed alike.
    alike = own_weights if by_engine.keys() <= (measured or {}).keys() else dict.fromkeys(by_engine, weights)
    shares, basis = _engine_shares(by_engine, alike, power or PowerEstimate({}, frozenset()), cpu_s or {})
    credited_j = max(above_idle_j, 0.0) if shares else 0.0
    credits: list[Credit] = []
    for engine, share in shares.items():
        credits += _credit_requests(engine, by_engine[engine], share * credited_j, own_weights[engine])
    busy_s = {engine: sum(part.busy_s or 0.0 for part in own) for engine, own in by_engine.items()}
    return Settlement(window, idle_j, tuple(credits), above_idle_j - credited_j, basis, busy_s)


def share_idle(idle_j: float, resident_bytes: Mapping[str, int | None]) -> dict[str, float]:
    """Idle joules over the resident engines by the memory each holds, or equally where one's is unknown."""
    if not resident_bytes:
        return {}
    sizes = list(resident_bytes.values())
    known = [size for size in sizes if size]
    if len(known) < len(sizes):
        return dict.fromkeys(resident_bytes, idle_j / len(sizes))
    return {engine: idle_j * (size or 0) / sum(known) for engine, size in resident_bytes.items()}


class _Part(NamedTuple):
    """What of a slice lies within the window."""

    engine: str
    busy_s: float | None
    length_s: float
    fraction: float
    slice: Slice

    def tokens(self, weights: TokenWeights) -> float:
        work = self.slice.work
        prefill, decode = sum(w.prefill_tokens for w in work), sum(w.decode_tokens for w in work)
        return self.fraction * (weights.prefill * prefill + weights.decode * decode)


def _clip(item: Placed, window: Window) -> _Part | None:
    piece = item.slice
    length_s = piece.end_s - piece.start_s
    inside_s = min(piece.end_s, window.end_s) - max(piece.start_s, window.start_s)
    if length_s <= 0:
        # A moment belongs to the one window that it begins in.
        inside = window.start_s <= piece.start_s < window.end_s
        return _Part(item.engine, 0.0, 0.0, 1.0, piece) if inside else None
    if inside_s <= 0:
        return None
    fraction = inside_s / length_s
    busy_s = None if piece.busy_s is None else piece.busy_s * fraction
    return _Part(item.engine, busy_s, inside_s, fraction, piece)


def _engine_shares(
    by_engine: Mapping[str, Sequence[_Part]],
    weights: Mapping[str, TokenWeights],
    power: PowerEstimate,
    cpu_s: Mapping[str, float],
) -> tuple[dict[str, float], Basis]:
    """Shares that sum to 1, and what they rest on. The same measure for all engines of a window, or none of it."""
    if not by_engine:
        return {}, Basis.NONE
    if len(by_engine) == 1:
        return dict.fromkeys(by_engine, 1.0), Basis.ALONE
    used_cpu_s = {engine: cpu_s.get(engine, 0.0) for engine in by_engine}
    if all(engine in cpu_s for engine in by_engine) and sum(used_cpu_s.values()) > 0:
        return _normal(used_cpu_s), Basis.PROCESS_CPU
    if all(part.busy_s is not None for own in by_engine.values() for part in own):
        busy_s = {engine: sum(part.busy_s or 0.0 for part in own) for engine, own in by_engine.items()}
        drawn_j = {engine: busy * power.watts.get(engine, 0.0) for engine, busy in busy_s.items()}
        if all(engine in power.watts for engine in by_engine) and sum(drawn_j.values()) > 0:
            return _normal(drawn_j), Basis.BUSY_POWER if power.known >= by_engine.keys() else Basis.BUSY_TIME
        if sum(busy_s.values()) > 0:
            return _normal(busy_s), Basis.BUSY_TIME
    tokens = {engine: sum(part.tokens(weights[engine]) for part in own) for engine, own in by_engine.items()}
    if sum(tokens.values()) > 0:
        return _normal(tokens), Basis.TOKEN_SHARE
    return dict.fromkeys(by_engine, 1 / len(by_engine)), Basis.TOKEN_SHARE


def _credit_requests(engine: str, own: Sequence[_Part], energy_j: float, weights: TokenWeights) -> list[Credit]:
    measure = [part.busy_s if part.busy_s is not None else part.length_s for part in own]
    total = sum(measure)
    sums: dict[str | None, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for part, size in zip(own, measure, strict=True):
        part_j = energy_j * (size / total if total > 0 else 1 / len(own))
        tokens = part.tokens(weights)
        # Work without tokens (a step whose tokens were all rejected or cached) still belongs to its requests.
        for work in part.slice.work:
            weighted = part.fraction * (weights.prefill * work.prefill_tokens + weights.decode * work.decode_tokens)
            sum_ = sums[work.request_id]
            sum_[0] += part_j * (weighted / tokens if tokens > 0 else 1 / len(part.slice.work))
            sum_[1] += part.fraction * work.prefill_tokens
            sum_[2] += part.fraction * work.decode_tokens
        if not part.slice.work:
            sums[None][0] += part_j
    return [Credit(engine, request_id, *values) for request_id, values in sums.items()]


def _normal(measure: Mapping[str, float]) -> dict[str, float]:
    total = sum(measure.values())
    return {engine: value / total for engine, value in measure.items()}
