"""A profile made ready for the hot path: every curve an object that is read in well under a microsecond."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise

from app.routing.mode_info import ModeInfo
from app.routing.profile import ModeProfile, Points, Profile, Speculation

MAX_BATCH = 512
"""Step times are tabulated up to this batch size; a larger batch counts as this one."""


class Curve:
    """Piecewise linear through points: constant before the first, the last slope after the last, never negative."""

    __slots__ = ("_slopes", "_xs", "_ys")

    def __init__(self, points: Points) -> None:
        self._xs = tuple(float(x) for x, _ in points)
        self._ys = tuple(y for _, y in points)
        slopes = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairwise(points)]
        # Noise may let the last two measurements fall; more work never takes less than the last of them.
        self._slopes = (*slopes, max(0.0, slopes[-1]) if slopes else 0.0)

    def __call__(self, x: float) -> float:
        xs = self._xs
        place = bisect_right(xs, x) - 1
        if place < 0:
            return self._ys[0]
        return self._ys[place] + (x - xs[place]) * self._slopes[place]


class ModeCoefficients:
    """One deployed mode's coefficients. Unknown is None.

    `runs_as` is the first of the modes on its engine that were measured alike: all of them take as long as that one.
    `step_ms[b]` is for b sequences, 0 <= b <= MAX_BATCH; `step_growth_ms[b]` is what the b-th adds to the others' step,
    `step_share_ms[b]` what each takes of it.
    """

    __slots__ = (
        "accepted",
        "accepted_default",
        "decode_j",
        "mode",
        "peak_memory_bytes",
        "prefill_j",
        "prefill_ms",
        "prefill_ms_per_token",
        "runs_as",
        "step_growth_ms",
        "step_ms",
        "step_share_ms",
        "steps_per_token",
        "wake_j",
        "wake_ms",
    )

    def __init__(self, mode: ModeInfo, measured: ModeProfile, runs_as: ModeInfo | None = None) -> None:
        self.mode = mode
        self.runs_as = runs_as or mode
        self.prefill_ms = Curve(measured.prefill_ms)
        last_tokens, last_ms = measured.prefill_ms[-1]
        self.prefill_ms_per_token = last_ms / last_tokens
        step = Curve(measured.step_ms)
        self.step_ms = tuple(step(max(1, batch)) for batch in range(MAX_BATCH + 1))
        self.step_growth_ms = (0.0, *(max(0.0, after - before) for before, after in pairwise(self.step_ms)))
        self.step_share_ms = (0.0, *(ms / batch for batch, ms in enumerate(self.step_ms[1:], 1)))
        self.prefill_j = None if measured.prefill_j is None else Curve(measured.prefill_j)
        self.decode_j: tuple[float, ...] | None = None
        if measured.decode_j_per_token is not None:
            joules = Curve(measured.decode_j_per_token)
            self.decode_j = tuple(joules(max(1, batch)) for batch in range(MAX_BATCH + 1))
        self.peak_memory_bytes = measured.peak_memory_bytes
        self.wake_ms = measured.wake_ms
        self.wake_j = measured.wake_j
        speculation = measured.speculation or Speculation()
        self.accepted = dict(speculation.accepted_per_step)
        self.accepted_default = speculation.default
        self.steps_per_token = speculation.steps_per_token


def compile_profile(profile: Profile, modes: Iterable[ModeInfo]) -> dict[str, ModeCoefficients]:
    """Coefficients of every deployed mode that the profile has, by mode name."""
    found: dict[str, ModeCoefficients] = {}
    for mode in modes:
        measured = profile.modes.get(mode.name)
        if measured is not None:
            alike = (known.mode for known in found.values() if _run_alike(known.mode, mode, profile))
            found[mode.name] = ModeCoefficients(mode, measured, next(alike, None))
    return found


def _run_alike(one: ModeInfo, other: ModeInfo, profile: Profile) -> bool:
    # What speculation is accepted is learned for each mode.
    if one.engine != other.engine or one.speculative or other.speculative:
        return False
    apart = {"peak_memory_bytes": None}
    return profile.modes[one.name].model_copy(update=apart) == profile.modes[other.name].model_copy(update=apart)
