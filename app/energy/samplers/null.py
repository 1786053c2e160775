"""No meter at all: every figure is None."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.energy.samplers.base import Sampler


@dataclass(frozen=True, slots=True)
class Meters:
    """The samplers of this machine, and why the better ways to measure are not among them."""

    samplers: Sequence[Sampler]
    passed_over: tuple[str, ...] = ()


def no_meter(*reasons: str) -> Meters:
    """Nothing is measured; `reasons` are shown wherever a figure would be."""
    return Meters((), reasons)
