"""What requests bring, lately: the mixture that a choice for all of them has to suit."""

from __future__ import annotations

_OVER = 32
"""Requests after which what came before counts a third."""


class Traffic:
    """Mean prompt tokens to compute and output tokens expected, over the latest requests."""

    __slots__ = ("_requests", "output_tokens", "prompt_tokens")

    def __init__(self) -> None:
        self._requests = 0
        self.prompt_tokens = 0.0
        self.output_tokens = 0.0

    def add(self, prompt_tokens: int, output_tokens: int) -> None:
        """A request goes to an engine."""
        self._requests = min(_OVER, self._requests + 1)
        self.prompt_tokens += (prompt_tokens - self.prompt_tokens) / self._requests
        self.output_tokens += (output_tokens - self.output_tokens) / self._requests
