"""What requests bring, lately: the mixture that a choice for all of them has to suit."""

from __future__ import annotations

import math
from collections.abc import Mapping

from app.routing.tags import Tag

_OVER = 32
"""Requests after which what came before counts a third."""
_RATE_OVER_S = 60.0
"""Seconds after which an arrival counts a third in the rate."""


class Traffic:
    """Mean tokens of the latest requests: of prompts, what of them had been seen before, and of expected outputs.

    `output_shares` says how the output tokens are spread over the tags, by name; it adds up to 1, and is empty before
    any output. It is never changed: there is a new one after each request.
    """

    __slots__ = (
        "_arrivals",
        "_by_tag",
        "_last_s",
        "_requests",
        "output_shares",
        "output_tokens",
        "prompt_tokens",
        "seen_tokens",
    )

    def __init__(self) -> None:
        self._requests = 0
        self._arrivals = 0.0
        self._last_s = 0.0
        self._by_tag: dict[str, float] = {}
        self.prompt_tokens = 0.0
        self.seen_tokens = 0.0
        self.output_tokens = 0.0
        self.output_shares: Mapping[str, float] = {}

    def add(self, prompt_tokens: int, seen_tokens: int, output_tokens: int, tag: Tag, now_s: float) -> None:
        """A request goes to an engine at `now_s`, of any clock that does not go back.

        `seen_tokens` of its prompt an engine that reuses prefixes need not compute.
        """
        self._arrivals = self._fading(now_s) + 1.0
        self._last_s = now_s
        self._requests = min(_OVER, self._requests + 1)
        self.prompt_tokens += (prompt_tokens - self.prompt_tokens) / self._requests
        self.seen_tokens += (seen_tokens - self.seen_tokens) / self._requests
        self.output_tokens += (output_tokens - self.output_tokens) / self._requests
        by_tag = self._by_tag
        kept = 1.0 - 1.0 / self._requests
        for name in by_tag:
            by_tag[name] *= kept
        by_tag[tag.value] = by_tag.get(tag.value, 0.0) + output_tokens / self._requests
        total = sum(by_tag.values())
        if total > 0.0:
            self.output_shares = {name: tokens / total for name, tokens in by_tag.items()}

    def arrivals_per_s(self, now_s: float) -> float:
        """Requests a second, lately; too low in the first minute."""
        return self._fading(now_s) / _RATE_OVER_S

    def _fading(self, now_s: float) -> float:
        return self._arrivals * math.exp(min(0.0, self._last_s - now_s) / _RATE_OVER_S)
