"""The joules of a request, as the server tells them: within the answer, or afterwards in the request's record."""

import asyncio
import dataclasses
from collections.abc import Iterable
from typing import Any

from loadgen.client import INCLUDE_HEADER, Call, OpenAIClient, ServerFault
from loadgen.records import Outcome, RequestRecord

INCLUDE = "energy"
_SETTLED, _UNSETTLED = "final", "partial"
_LOOKS = 4
_PAUSE_S = 0.25
_AT_ONCE = 8


@dataclasses.dataclass(slots=True)
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
        for _ in range(_LOOKS):
            # A meter settles a request some tenths of a second after its end.
            if told is not None and told.get("status") != _UNSETTLED:
                break
            told = energy_of(await request_record(client, record))
            if told is None:
                break
            if told.get("status") == _UNSETTLED:
                await asyncio.sleep(_PAUSE_S)
        if told is None or told.get("status") != _SETTLED:
            return None
        self.method, self.scope = told.get("method"), told.get("scope")
        return _number(told.get("energy_j", told.get("joules")))

    async def note_all(self, client: OpenAIClient, records: Iterable[RequestRecord]) -> None:
        """Joules of every request that ended well, a few asked for at once."""
        slots = asyncio.Semaphore(_AT_ONCE)

        async def note(record: RequestRecord) -> None:
            async with slots:
                record.energy_j = await self.joules(client, record)

        await asyncio.gather(*(note(record) for record in records if record.outcome is Outcome.OK))


def energy_of(holder: dict[str, Any] | None) -> dict[str, Any] | None:
    """The energy object within an answer's extras or a request's record."""
    found = holder.get("energy") if holder else None
    return found if isinstance(found, dict) else None


def written_ms(record: RequestRecord) -> float:
    """When the last token had come. An answer that carries its energy ends later, once the meter has settled it."""
    if energy_of(record.extras) is not None and record.frame_ms:
        return record.frame_ms[-1]
    return record.total_ms


async def request_record(client: OpenAIClient, record: RequestRecord) -> dict[str, Any] | None:
    """What the server remembers of a finished request; None where it keeps no records, or has none of this one."""
    name = (record.extras or {}).get("request_id") or record.request_id
    if name is None:
        return None
    try:
        return await client.get_json(f"/v1/requests/{name}")
    except ServerFault:
        return None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0 else None


async def offers_energy(client: OpenAIClient, model: str) -> bool:
    """True when the server accepts the wish for an energy object."""
    return await accepts_include(client, model, INCLUDE)


async def tells_energy(client: OpenAIClient, model: str) -> bool:
    """True when the server fulfils that wish too: an answer's energy is measured, or will be."""
    told = energy_of((await _ask(client, model, INCLUDE)).extras)
    return told is not None and told.get("status") in (_SETTLED, _UNSETTLED)


async def accepts_include(client: OpenAIClient, model: str, include: str) -> bool:
    """True when the server accepts the wish for these extra objects, which a client states with a header."""
    return (await _ask(client, model, include)).outcome is Outcome.OK


async def _ask(client: OpenAIClient, model: str, include: str) -> RequestRecord:
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    plain = Call.of(body)
    return await client.send(dataclasses.replace(plain, headers={**plain.headers, INCLUDE_HEADER: include}))
