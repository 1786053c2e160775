"""A tenant's token budget: a bucket of prompt and output tokens that refills with time.

Unlike fairness, which slows, a budget is a limit that an operator sets, and a request beyond it is refused with the
time after which it would fit.
"""

from __future__ import annotations


class TokenBudget:
    """Holds at most `burst_tokens` and refills at `tokens_per_s`. Times are seconds of one clock, passed in.

    Raises:
        ValueError: a figure is not above 0.
    """

    __slots__ = ("_available", "_last_s", "burst_tokens", "tokens_per_s")

    def __init__(self, tokens_per_s: float, burst_tokens: float, now_s: float) -> None:
        if not (tokens_per_s > 0 and burst_tokens > 0):
            raise ValueError(f"a token budget needs figures above 0, not {tokens_per_s}/s and {burst_tokens}")
        self.tokens_per_s = tokens_per_s
        self.burst_tokens = burst_tokens
        self._available = burst_tokens
        self._last_s = now_s

    def reserve(self, tokens: int, now_s: float) -> float:
        """Take `tokens` and return 0, or take nothing and return the seconds until they would fit.

        A request larger than the whole bucket is let through when the bucket is full, or it could never run.
        """
        self._refill(now_s)
        wanted = min(float(tokens), self.burst_tokens)
        if wanted <= self._available + 1e-9:
            self._available -= tokens
            return 0.0
        return (wanted - self._available) / self.tokens_per_s

    def settle(self, reserved_tokens: int, used_tokens: int, now_s: float) -> None:
        """Replace a reservation by what was really used; an overrun is owed."""
        self._refill(now_s)
        self._available = min(self.burst_tokens, self._available + reserved_tokens - used_tokens)

    def available_tokens(self, now_s: float) -> float:
        """Tokens that could be reserved now; negative while some are owed."""
        self._refill(now_s)
        return self._available

    def _refill(self, now_s: float) -> None:
        # A clock that jumps back refills nothing, and one that jumps ahead at most fills the bucket.
        passed_s = max(0.0, now_s - self._last_s)
        self._last_s = now_s
        self._available = min(self.burst_tokens, self._available + passed_s * self.tokens_per_s)
