"""A circuit breaker per mode: one that fails repeatedly is taken out and tried again later."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

FAILURES_TO_OPEN = 3
FIRST_PAUSE_S = 10.0
LONGEST_PAUSE_S = 300.0
PROBE_TIMEOUT_S = 120.0
"""A probe that never reported back is given up, and another request may try."""


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    """Opens after `FAILURES_TO_OPEN` failures in a row; after a pause lets one request through as a probe.

    A probe that succeeds closes it; one that fails opens it again for twice as long. Times are seconds of one
    clock, passed in; after a jump back the pause starts anew rather than never ending.
    """

    __slots__ = ("_failures", "_opened_s", "_pause_s", "_probe_s")

    def __init__(self) -> None:
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._opened_s: float | None = None
        self._probe_s: float | None = None

    def state(self, now_s: float) -> BreakerState:
        if self._opened_s is None:
            return BreakerState.CLOSED
        self._opened_s = min(self._opened_s, now_s)
        return BreakerState.HALF_OPEN if now_s - self._opened_s >= self._pause_s else BreakerState.OPEN

    def admits(self, now_s: float) -> bool:
        """A request may go through: always while closed, one at a time while half open."""
        state = self.state(now_s)
        if state is BreakerState.HALF_OPEN:
            return self._probe_s is None or not 0 <= now_s - self._probe_s < PROBE_TIMEOUT_S
        return state is BreakerState.CLOSED

    def started(self, now_s: float) -> None:
        """A request goes through; while half open it is the probe."""
        if self.state(now_s) is BreakerState.HALF_OPEN:
            self._probe_s = now_s

    def released(self, started_s: float | None) -> None:
        """What went through at `started_s` ended without a verdict: if it was the probe, the next request is one."""
        if started_s is not None and self._probe_s == started_s:
            self._probe_s = None

    def succeeded(self) -> None:
        self._failures = 0
        self._opened_s = self._probe_s = None
        self._pause_s = FIRST_PAUSE_S

    def failed(self, now_s: float) -> None:
        """A request failed through the mode's fault (not the client's)."""
        if self._opened_s is not None:
            # Requests sent before it opened may still fail while it is open; only a probe's failure says something new.
            if self.state(now_s) is BreakerState.HALF_OPEN:
                self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
                self._opened_s, self._probe_s = now_s, None
            return
        self._failures += 1
        if self._failures >= FAILURES_TO_OPEN:
            self._opened_s = now_s

    def retry_in_s(self, now_s: float) -> float | None:
        """Seconds until it is tried again; None while closed."""
        if self._opened_s is None:
            return None
        self._opened_s = min(self._opened_s, now_s)
        return max(0.0, self._opened_s + self._pause_s - now_s)


class Breakers:
    """One breaker per mode."""

    __slots__ = ("_breakers",)

    def __init__(self, modes: Iterable[str]) -> None:
        self._breakers = {mode: CircuitBreaker() for mode in modes}

    def __getitem__(self, mode: str) -> CircuitBreaker:
        return self._breakers[mode]

    def tripped(self, now_s: float) -> frozenset[str]:
        """Modes that take no request now, for `Snapshot.tripped_modes`."""
        return frozenset([mode for mode, breaker in self._breakers.items() if not breaker.admits(now_s)])

    def pauses_s(self, now_s: float) -> dict[str, float]:
        """Seconds until it is tried again by mode whose breaker is open; how long a probe takes is not known."""
        pauses = {mode: breaker.retry_in_s(now_s) for mode, breaker in self._breakers.items()}
        return {mode: pause_s for mode, pause_s in pauses.items() if pause_s}
