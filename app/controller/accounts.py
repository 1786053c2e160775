"""What the meter's ledger is asked over HTTP: `GET /v1/energy` and `GET /v1/requests/{id}`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Protocol

from app.controller.body import request_id_of
from app.controller.errors import ApiError, invalid
from app.energy.queries import BadRange, PastRow, TimeRange, Totals


class Accounts(Protocol):
    """What is needed of the meter; any exception means that it is out of reach for now."""

    async def totals(self, since_s: float | None, until_s: float | None, tenant: str | None) -> Totals: ...
    async def request(self, request_id: str, tenant: str | None) -> dict[str, Any] | None: ...
    async def state(self) -> dict[str, Any]: ...


class HandleAccounts:
    """The meter behind a Serve deployment handle."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def totals(self, since_s: float | None, until_s: float | None, tenant: str | None) -> Totals:
        return await self._handle.totals.remote(since_s, until_s, tenant)  # type: ignore[no-any-return]

    async def request(self, request_id: str, tenant: str | None) -> dict[str, Any] | None:
        return await self._handle.request.remote(request_id, tenant)  # type: ignore[no-any-return]

    async def past(self, model: str, limit: int) -> list[PastRow]:
        """The last `limit` requests of a model that an engine got, oldest first."""
        return await self._handle.past.remote(model, limit)  # type: ignore[no-any-return]

    async def state(self) -> dict[str, Any]:
        return await self._handle.state.remote()  # type: ignore[no-any-return]


async def totals(meter: Accounts, query: Mapping[str, str], tenant: str | None = None) -> dict[str, Any]:
    """Joules by mode, engine, tenant and class over `since` to `until` (seconds since 1970), and the meter's state.

    With a `tenant` of its own requests alone: what a mode or the device took in all would tell what the others did.

    Raises:
        ApiError: 400 for a time range that makes no sense, 503 while the meter is out of reach.
    """
    try:
        span = TimeRange(_seconds(query, "since"), _seconds(query, "until"))
        span.check_not_future(time.time())
    except BadRange as error:
        raise invalid(str(error), code="bad_time_range") from None
    try:
        found, state = await meter.totals(span.since_s, span.until_s, tenant), await meter.state()
    except Exception as error:
        raise _out_of_reach(error) from error
    account = asdict(found)
    # Tuples with names become lists otherwise.
    account["by"] = {group: [share._asdict() for share in shares] for group, shares in found.by.items()}
    if tenant is not None:
        state = _how_it_measures(state)
    return {"object": "energy", "tenant": tenant, **account, "meter": state}


async def request(meter: Accounts, request_id: str, tenant: str | None = None) -> dict[str, Any]:
    """A request's decision, outcome and joules, by its name in the ledger or its client's name for it.

    With a `tenant` only of its own requests.

    Raises:
        ApiError: 404 for an unknown id, 503 while the meter is out of reach.
    """
    try:
        found = await meter.request(request_id, tenant) or await meter.request(request_id_of(request_id), tenant)
    except Exception as error:
        raise _out_of_reach(error) from error
    if found is None or (tenant is not None and (found["record"] or {}).get("tenant") != tenant):
        raise ApiError(404, f"there is no request {request_id[:128]!r} in the ledger", code="request_not_found")
    return {"object": "request", **found}


def _how_it_measures(state: Mapping[str, Any]) -> dict[str, Any]:
    """What of the meter's state says how figures came about, and nothing of how much others did."""
    devices = [
        {name: device[name] for name in ("device", "name", "method", "scope", "notes")}
        for device in state.get("devices", ())
    ]
    return {"measuring": state["measuring"], "devices": devices}


def _seconds(query: Mapping[str, str], name: str) -> float | None:
    if (text := query.get(name)) is None:
        return None
    try:
        return float(text)
    except ValueError:
        raise invalid(f"{name} must be seconds since 1970, not {text[:40]!r}", code="bad_time_range") from None


def _out_of_reach(error: Exception) -> ApiError:
    return ApiError(
        503,
        f"the energy meter is out of reach: {type(error).__name__}",
        code="meter_unavailable",
        headers={"retry-after": "5"},
    )
