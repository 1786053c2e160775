"""The joules of a request, as the server tells them: within the answer, or later from its record."""

import asyncio
import dataclasses
from dataclasses import dataclass
from typing import Any

from loadgen.client import INCLUDE_HEADER, Call, OpenAIClient, ServerFault
from loadgen.records import Outcome, RequestRecord

INCLUDE = "energy"
_SETTLED = "final"
_LOOKS = 4
_PAUSE_S = 0.25


@dataclass(slots=True)
class EnergySource:
    """Whether this server tells energy at all, and how it measures it."""

    offered: bool
    method: str | None = None
    scope: str | None = None

    async def joules(self, client: OpenAIClient, record: RequestRecord) -> float | None:
        """A finished request's joules above idle; None where they are unknown. Unknown is never 0."""
        if not self.offered:
            return None
        told = energy_of(record.extras)
        looks = 0
        # A meter settles a request some tenths of a second after its end.
        while told is not None and told.get("status") == "partial" and record.request_id and looks < _LOOKS:
            await asyncio.sleep(_PAUSE_S)
            looks += 1
            try:
                told = energy_of(await client.get_json(f"/v1/requests/{record.request_id}"))
            except ServerFault:
                return None
        if told is None or told.get("status") != _SETTLED:
            return None
        self.method, self.scope = told.get("method"), told.get("scope")
        return _number(told.get("joules", told.get("energy_j")))


def energy_of(holder: dict[str, Any] | None) -> dict[str, Any] | None:
    """The energy object within an answer's extras or a request's record."""
    found = holder.get("energy") if holder else None
    return found if isinstance(found, dict) else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0 else None


async def offers_energy(client: OpenAIClient, model: str) -> bool:
    """True when the server accepts the wish for an energy object, which a client states with a header."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    plain = Call.of(body)
    record = await client.send(dataclasses.replace(plain, headers={**plain.headers, INCLUDE_HEADER: INCLUDE}))
    return record.outcome is Outcome.OK
