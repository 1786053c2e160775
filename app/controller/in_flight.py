"""The controller's own account of what it has sent to one engine and not got back."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_RATE_OVER = 16
"""Completions that the rate is taken over."""
_RATE_WITHIN_S = 30.0


@dataclass(slots=True)
class _Sent:
    prompt_tokens: int
    output_tokens: int
    tenant: str
    first_s: float | None = None


class InFlight:
    """Counts and sums in constant time, since a decision reads them. Times are monotonic seconds, passed in."""

    __slots__ = ("_completed_s", "_decoding", "_first_sum_s", "_held", "_output_tokens", "_prefill_tokens", "_sent")

    def __init__(self) -> None:
        self._sent: dict[str, _Sent] = {}
        self._prefill_tokens = 0
        self._output_tokens = 0
        self._decoding = 0
        self._first_sum_s = 0.0
        self._completed_s: deque[float] = deque(maxlen=_RATE_OVER)
        self._held: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._sent)

    def send(self, key: str, prompt_tokens: int, expected_output_tokens: int, tenant: str = "") -> None:
        """A request goes to the engine: its prompt tokens to compute, and what it is expected to produce."""
        self._sent[key] = _Sent(prompt_tokens, expected_output_tokens, tenant)
        self._held[tenant] = self._held.get(tenant, 0) + 1
        self._prefill_tokens += prompt_tokens
        self._output_tokens += expected_output_tokens

    def first_token(self, key: str, now_s: float) -> None:
        """The prompt is computed. Without effect when that is known, or the request is over."""
        sent = self._sent.get(key)
        if sent is not None and sent.first_s is None:
            sent.first_s = now_s
            self._prefill_tokens -= sent.prompt_tokens
            self._decoding += 1
            self._first_sum_s += now_s

    def end(self, key: str, now_s: float) -> None:
        """The request is over, in whatever way. Without effect when it is not in flight."""
        sent = self._sent.pop(key, None)
        if sent is None:
            return
        self._output_tokens -= sent.output_tokens
        self._held[sent.tenant] -= 1
        if not self._held[sent.tenant]:
            del self._held[sent.tenant]
        if sent.first_s is None:
            self._prefill_tokens -= sent.prompt_tokens
        else:
            self._decoding -= 1
            self._first_sum_s -= sent.first_s
        self._completed_s.append(now_s)

    def held_by(self, tenant: str) -> int:
        """Requests of one tenant."""
        return self._held.get(tenant, 0)

    @property
    def pending_prefill_tokens(self) -> int:
        """Prompt tokens of requests without a first token."""
        return self._prefill_tokens

    def pending_output_tokens(self, now_s: float, token_ms: float | None) -> int:
        """Output tokens still to come: what was expected, less what `token_ms` a token has produced since the first."""
        if not token_ms or not self._decoding:
            return self._output_tokens
        produced = (self._decoding * now_s - self._first_sum_s) * 1e3 / token_ms
        # One more at least for each: expectations are exceeded, too.
        return max(len(self._sent), self._output_tokens - int(produced))

    def completions_per_s(self, now_s: float) -> float | None:
        """Lately; None while nothing was completed."""
        completed_s = [moment for moment in self._completed_s if now_s - moment <= _RATE_WITHIN_S]
        if len(completed_s) < 2:
            return None
        return len(completed_s) / max(1e-3, now_s - completed_s[0])
