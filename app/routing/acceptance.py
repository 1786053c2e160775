"""How many draft tokens speculation gets accepted per step, learned by mode and tag.

N-gram speculation doubles the speed on text that copies its prompt and slows free text, so one number per engine is
not enough.
"""

from __future__ import annotations

from collections.abc import Mapping

from app.routing.corrections import correction_key
from app.routing.tags import Tag

HALF_LIFE_TOKENS = 4_000.0
"""Output tokens after which what was learned before counts half."""
MIN_TOKENS = 64.0
"""Output tokens before a tag's rate is stated."""


class AcceptanceLearner:
    """Accepted draft tokens per decode step of one sequence; memory is bounded by modes times tags."""

    __slots__ = ("_accepted", "_rates", "_steps")

    def __init__(self) -> None:
        self._steps: dict[str, float] = {}
        self._accepted: dict[str, float] = {}
        self._rates: Mapping[str, float] = {}

    @property
    def per_step(self) -> Mapping[str, float]:
        """By `mode:tag`, for `Snapshot.accepted_per_step`. Never changed; there is a new one after each sample."""
        return self._rates

    def observe(self, mode: str, tag: Tag, output_tokens: int, accepted_tokens: int) -> None:
        """`output_tokens` were produced, `accepted_tokens` of them from drafts; every other one took a step.

        From one request, or from an engine's counters over a time when only this tag ran. Impossible counts are
        ignored.
        """
        steps = output_tokens - accepted_tokens
        if accepted_tokens < 0 or steps <= 0:
            return
        key = correction_key(mode, tag)
        keep = 0.5 ** (output_tokens / HALF_LIFE_TOKENS)
        self._steps[key] = self._steps.get(key, 0.0) * keep + steps
        self._accepted[key] = self._accepted.get(key, 0.0) * keep + accepted_tokens
        if self._steps[key] + self._accepted[key] >= MIN_TOKENS:
            self._rates = {**self._rates, key: self._accepted[key] / self._steps[key]}
