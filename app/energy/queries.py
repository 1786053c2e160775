"""What the ledger can be asked: totals over a time range, and one request. Times are seconds since 1970."""

from __future__ import annotations

import json
import math
import sqlite3
from dataclasses import dataclass
from typing import Any, NamedTuple

_GROUPS = ("mode", "engine", "tenant", "class")


class BadRange(ValueError):
    """A time range that makes no sense; the message says why."""


class UnknownRequest(LookupError):
    """No such request in the ledger: a wrong id, or one older than the retention."""


@dataclass(frozen=True, slots=True)
class TimeRange:
    """From `since_s` up to, not including, `until_s`; either end may be open.

    Raises:
        BadRange
    """

    since_s: float | None = None
    until_s: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("since", self.since_s), ("until", self.until_s)):
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise BadRange(f"{name} must be seconds since 1970, not {value}")
        if self.since_s is not None and self.until_s is not None and self.since_s >= self.until_s:
            raise BadRange(f"since ({self.since_s:.3f}) must be before until ({self.until_s:.3f})")

    def check_not_future(self, now_s: float) -> None:
        """Raises: BadRange, when all of it lies ahead."""
        if self.since_s is not None and self.since_s > now_s:
            raise BadRange(f"since ({self.since_s:.3f}) is in the future; it is now {now_s:.3f}")

    @property
    def bounds(self) -> tuple[float, float]:
        return (self.since_s or 0.0, 1e18 if self.until_s is None else self.until_s)


class Share(NamedTuple):
    """Joules of one mode, engine, tenant or class. `name` None: not told, or an engine's own work."""

    name: str | None
    energy_j: float
    idle_share_j: float
    prefill_tokens: float
    decode_tokens: float
    j_per_output_token: float | None


@dataclass(frozen=True, slots=True)
class Totals:
    """The account of a time range. Joules are None when nothing was measured in it.

    Of one tenant there are its credits; what the device used, and what of it is nobody's, is None.
    """

    since_s: float | None
    until_s: float | None
    measured_j: float | None
    idle_j: float | None
    credited_j: float | None
    residual_j: float | None
    approximate_j: float | None
    """The part of the credits that was split by a fallback (token share, or powers not known yet)."""
    unmeasured_s: float | None
    methods: tuple[str, ...]
    scopes: tuple[str, ...]
    devices: tuple[str, ...]
    by: dict[str, tuple[Share, ...]]


def totals(connection: sqlite3.Connection, span: TimeRange, tenant: str | None = None) -> Totals:
    """Totals by mode, engine, tenant and class, of one `tenant` or of all.

    A flush (2 s by default) counts where it ended.
    """
    where, bounds = "WHERE end_s >= ? AND end_s < ?", span.bounds
    account = connection.execute(
        "SELECT sum(measured_j), sum(idle_j), sum(credited_j), sum(residual_j), sum(approximate_j), sum(unmeasured_s) "
        f"FROM intervals {where}",
        bounds,
    ).fetchone()
    measured_j, idle_j, credited_j, residual_j, approximate_j, unmeasured_s = account
    methods, scopes, devices = (
        tuple(row[0] for row in connection.execute(f"SELECT DISTINCT {column} FROM intervals {where}", bounds))
        for column in ("method", "scope", "device")
    )
    if tenant is not None:
        # The remainder of a device's joules would tell what the others used.
        idle_j = residual_j = approximate_j = None
        credits_j = "SELECT total(energy_j) FROM credits WHERE end_s >= ? AND end_s < ? AND tenant = ?"
        (own_j,) = connection.execute(credits_j, (*bounds, tenant)).fetchone()
        credited_j, measured_j = None if measured_j is None else own_j, None
    by = {group: _shares(connection, group, span, tenant) for group in _GROUPS}
    return Totals(
        since_s=span.since_s,
        until_s=span.until_s,
        measured_j=measured_j,
        idle_j=idle_j,
        credited_j=credited_j,
        residual_j=residual_j,
        approximate_j=approximate_j,
        unmeasured_s=unmeasured_s,
        methods=methods,
        scopes=scopes,
        devices=devices,
        by=by,
    )


def _shares(connection: sqlite3.Connection, group: str, span: TimeRange, tenant: str | None) -> tuple[Share, ...]:
    # An engine on several devices reports its tokens on each: its joules add up over them, its tokens do not.
    rows = connection.execute(
        f'WITH by_device AS (SELECT "{group}" AS name, engine, device, sum(energy_j) AS energy_j, '
        "  sum(idle_share_j) AS idle_share_j, sum(prefill_tokens) AS prefill, sum(decode_tokens) AS decode "
        "  FROM credits WHERE end_s >= ? AND end_s < ? AND (? IS NULL OR tenant = ?) GROUP BY name, engine, device), "
        "by_engine AS (SELECT name, sum(energy_j) AS energy_j, sum(idle_share_j) AS idle_share_j, "
        "  max(prefill) AS prefill, max(decode) AS decode FROM by_device GROUP BY name, engine) "
        "SELECT name, sum(energy_j), sum(idle_share_j), sum(prefill), sum(decode) FROM by_engine "
        "GROUP BY name ORDER BY name",
        (*span.bounds, tenant, tenant),
    )
    return tuple(
        Share(name, energy_j, idle_share_j, prefill, decode, energy_j / decode if decode else None)
        for name, energy_j, idle_share_j, prefill, decode in rows
    )


def newest_named(connection: sqlite3.Connection, name: str, tenant: str | None = None) -> str | None:
    """The ledger's id of the latest request that a client called `name` (see `RequestRecord.request_id`).

    Of one `tenant` or of all: two tenants may use the same name.
    """
    # From "name." up to, not including, "name/": '/' is the character after '.'.
    found = connection.execute(
        "SELECT request_id FROM requests WHERE (request_id = ? OR (request_id >= ? AND request_id < ?)) "
        "AND (? IS NULL OR tenant = ?) ORDER BY recorded_s DESC LIMIT 1",
        (name, f"{name}.", f"{name}/", tenant, tenant),
    ).fetchone()
    return found[0] if found else None


def request_row(connection: sqlite3.Connection, request_id: str) -> dict[str, Any] | None:
    """The controller's record of a request, its JSON decoded; None where there is none."""
    cursor = connection.execute("SELECT * FROM requests WHERE request_id = ?", (request_id,))
    found = cursor.fetchone()
    if found is None:
        return None
    row = dict(zip((column[0] for column in cursor.description), found, strict=True))
    for name in ("features", "snapshot", "decision", "outcome"):
        row[name] = json.loads(row[name])
    return row


class PastRow(NamedTuple):
    """A request that an engine got, as its row has it; the last three are JSON as it lies there, damaged or not."""

    recorded_s: float
    mode: str
    status: str
    features: bytes
    decision: bytes
    outcome: bytes


def past_rows(connection: sqlite3.Connection, model: str, limit: int) -> list[PastRow]:
    """The last `limit` requests of a model that an engine got, oldest first."""
    of_model = "CASE WHEN json_valid(content) THEN json_extract(content, '$.model') END = ?"
    contexts = connection.execute(f"SELECT context FROM contexts WHERE {of_model}", (model,)).fetchall()
    # By insertion, since the clock may have jumped; by context, since the index has both: however many rows there are
    # of other models or from before, they are not looked at.
    numbers: list[int] = []
    for context in contexts:
        found = connection.execute(
            "SELECT rowid FROM requests WHERE context = ? AND mode IS NOT NULL ORDER BY rowid DESC LIMIT ?",
            (*context, limit),
        )
        numbers += [number for (number,) in found]
    row = (
        "SELECT recorded_s, mode, status, CAST(features AS BLOB), CAST(decision AS BLOB), CAST(outcome AS BLOB) "
        "FROM requests WHERE rowid = ?"
    )
    return [PastRow(*connection.execute(row, (number,)).fetchone()) for number in sorted(numbers)[-limit:]]


class RequestSums(NamedTuple):
    """What the ledger holds of a request's joules."""

    energy_j: float
    approximate_j: float
    prefill_tokens: float
    decode_tokens: float
    final: bool
    methods: tuple[str, ...]
    scopes: tuple[str, ...]


def request_sums(connection: sqlite3.Connection, request_id: str) -> RequestSums | None:
    """A request's joules in the ledger; None when none were written."""
    rows = connection.execute(
        "SELECT energy_j, approximate_j, prefill_tokens, decode_tokens, final, method, scope FROM request_credits "
        "WHERE request_id = ?",
        (request_id,),
    ).fetchall()
    if not rows:
        return None
    scopes = sorted({row[6] for row in rows})
    prefill = max(sum(row[2] for row in rows if row[6] == scope) for scope in scopes)
    decode = max(sum(row[3] for row in rows if row[6] == scope) for scope in scopes)
    methods = tuple(sorted({row[5] for row in rows}))
    energy_j, approximate_j = sum(row[0] for row in rows), sum(row[1] for row in rows)
    return RequestSums(energy_j, approximate_j, prefill, decode, any(row[4] for row in rows), methods, tuple(scopes))
