"""Fairness among tenants: virtual token counters, which become the request's priority.

Source: Sheng et al., Fairness in Serving Large Language Models (OSDI 2024), virtual token counter with lift; and
start-time fair queueing, from which the absolute priority and its bounded delay come. It counts prompt tokens too,
and slows a heavy tenant instead of refusing it.
"""

from __future__ import annotations

from typing import NamedTuple

PROMPT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
"""The paper's costs of a prompt and an output token."""
QUANTUM_TOKENS = 256.0
"""Weighted tokens per priority level: tenants closer than this are equal."""
MAX_IDLE_TENANTS = 10_000


class Reservation(NamedTuple):
    """One admitted request's entry in its tenant's counter; hand it back to `settle` once."""

    tenant: str
    weighted_tokens: float
    share: float
    priority: int


class _Tenant:
    __slots__ = ("counter", "in_flight")

    def __init__(self, counter: float) -> None:
        self.counter = counter
        self.in_flight = 0


class FairShares:
    """One virtual counter per tenant, in weighted tokens divided by the tenant's share.

    A request takes its tenant's counter as its priority (lower is earlier, as in vLLM) and then advances it. Counters
    only grow, so a waiting request is overtaken only until the others' counters have passed it: its delay is bounded.
    A tenant that was idle is lifted to the least counter of the active ones, so idling saves up no credit.
    """

    __slots__ = ("_active", "_floor", "_tenants")

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._active: dict[str, _Tenant] = {}
        self._floor = 0.0
        """Where the last tenant left off when all were idle."""

    def __len__(self) -> int:
        """Tenants that are known."""
        return len(self._tenants)

    def reserve(self, tenant: str, prompt_tokens: int, expected_output_tokens: int, share: float = 1.0) -> Reservation:
        """Charge a request up front and give it its priority.

        Args:
            share: weight of the tenant, above 0; with 2 it may have twice the tokens at equal priority.
        """
        state = self._tenants.get(tenant)
        if state is None:
            state = self._tenants[tenant] = _Tenant(self._lifted())
        elif not state.in_flight:
            state.counter = max(state.counter, self._lifted())
        state.in_flight += 1
        self._active[tenant] = state
        priority = int(state.counter // QUANTUM_TOKENS)
        charged = weighted_tokens(prompt_tokens, expected_output_tokens)
        state.counter += charged / share
        self._forget_idle()
        return Reservation(tenant, charged, share, priority)

    def settle(self, reservation: Reservation, prompt_tokens: int, output_tokens: int) -> None:
        """Replace the expected tokens by the real ones when a request has ended, in whatever way."""
        state = self._tenants.get(reservation.tenant)
        if state is None:
            return
        real = weighted_tokens(prompt_tokens, output_tokens)
        # By the share that it was charged by, which may be another by now.
        state.counter = max(0.0, state.counter + (real - reservation.weighted_tokens) / reservation.share)
        state.in_flight = max(0, state.in_flight - 1)
        if not state.in_flight:
            self._active.pop(reservation.tenant, None)
            if not self._active:
                self._floor = max(self._floor, state.counter)

    def forget(self, tenant: str) -> bool:
        """Drop a tenant's counter; False where it has requests under way. One that is unknown is forgotten already."""
        if tenant in self._active:
            return False
        self._tenants.pop(tenant, None)
        return True

    def counters(self) -> dict[str, float]:
        """Every known tenant's counter."""
        return {name: state.counter for name, state in self._tenants.items()}

    def _lifted(self) -> float:
        """The counter at which a tenant that was idle begins."""
        return max(self._floor, min([state.counter for state in self._active.values()], default=0.0))

    def _forget_idle(self) -> None:
        if len(self._tenants) <= MAX_IDLE_TENANTS:
            return
        # Those at or below the floor lose nothing by it: they would be lifted to it anyway.
        lifted = self._lifted()
        idle = [name for name, state in self._tenants.items() if not state.in_flight]
        behind = [name for name in idle if self._tenants[name].counter <= lifted]
        for name in (behind or idle)[: max(1, len(idle) // 2)]:
            del self._tenants[name]


def weighted_tokens(prompt_tokens: int, output_tokens: int) -> float:
    """Cost of a request in weighted tokens."""
    return PROMPT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * output_tokens
