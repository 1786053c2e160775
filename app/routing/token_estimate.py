"""Tokens of a text too long to tokenise within the routing budget, from characters, corrected online."""

from __future__ import annotations

from math import ceil

FIRST_CHARS_PER_TOKEN = (4.0, 1.5)
"""ASCII text, other text: what a fresh estimator assumes."""
MIN_CHARS_PER_TOKEN = 0.25
MAX_CHARS_PER_TOKEN = 16.0
_WEIGHT_OF_NEWEST = 0.05


class TokenEstimator:
    """Characters per token of the served model's tokenizer, learned from prompts that were tokenised.

    Text with characters outside ASCII has a ratio of its own. An estimate must be marked as one
    (`RequestFeatures.prompt_exact` is false).
    """

    __slots__ = ("_chars_per_token", "_samples")

    def __init__(self) -> None:
        self._chars_per_token = list(FIRST_CHARS_PER_TOKEN)
        self._samples = [0, 0]

    def observe(self, text: str, tokens: int) -> None:
        """A text that turned out to have `tokens` tokens. Empty texts teach nothing."""
        if tokens <= 0 or not text:
            return
        kind = 0 if text.isascii() else 1
        ratio = min(MAX_CHARS_PER_TOKEN, max(MIN_CHARS_PER_TOKEN, len(text) / tokens))
        self._samples[kind] += 1
        # A plain mean at first, then an exponential one.
        weight = max(_WEIGHT_OF_NEWEST, 1 / self._samples[kind])
        self._chars_per_token[kind] += weight * (ratio - self._chars_per_token[kind])

    def estimate(self, text: str) -> int:
        """Estimated tokens; at least 1 for a text that is not empty."""
        return ceil(len(text) / self._chars_per_token[0 if text.isascii() else 1])
