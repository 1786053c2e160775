"""From settled windows to the ledger and to answers: sums, flushes, and what is asked of both."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from app.energy import queries
from app.energy.accounts import Accounts, Rows
from app.energy.activity import boot_id
from app.energy.attribution import Settlement
from app.energy.ledger import Ledger
from app.energy.ledger_file import LedgerFile
from app.energy.open_requests import OpenRequests
from app.energy.request_energy import RequestEnergy, request_energy
from app.energy.rows import CalibrationRow, RequestCreditRow
from app.energy.samplers.base import MeterInfo
from app.energy.track import Track

_LONGEST_BACKLOG = 1000
"""Flushes kept while the ledger cannot be written."""


class Bookkeeper:
    """Owns what is settled and not yet written. One thread uses it."""

    def __init__(self, file: LedgerFile, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self.requests = OpenRequests()
        self.durable_s = float("-inf")
        """Activity before this moment (CLOCK_MONOTONIC) is in the ledger."""
        self.lost_flushes = 0
        self._file = file
        self._clock, self._wall = clock, wall
        self._accounts = Accounts()
        self._backlog: list[tuple[Rows, list[CalibrationRow]]] = []
        self._unmeasured_booked_s: dict[str, float] = {}

    @property
    def backlog(self) -> int:
        """Flushes that could not be written yet."""
        return len(self._backlog)

    def book(self, info: MeterInfo, settlement: Settlement, idle_shares: Mapping[str, float]) -> None:
        """One settled window of one device."""
        self._accounts.add(info, settlement, self.requests.labels, idle_shares)

    def flush(self, tracks: Sequence[Track], calibrations: list[CalibrationRow]) -> Rows:
        """Write what is settled; what cannot be written is kept for the next time. Returns what was new.

        Raises:
            Fenced: nothing more can be written.
        """
        settled_s = settled_through_s(tracks)
        final = self.requests.settled(settled_s)
        rows = self._take_rows(tracks, final)
        self.requests.forget(final)
        self._backlog.append((rows, calibrations))
        if len(self._backlog) > _LONGEST_BACKLOG:
            self.lost_flushes += 1
            del self._backlog[0]
        while self._backlog and self._file.write(*self._backlog[0]):
            del self._backlog[0]
        if not self._backlog:
            self.durable_s = max(self.durable_s, settled_s)
        return rows

    def _take_rows(self, tracks: Sequence[Track], final: set[str]) -> Rows:
        infos = [track.sampler.info for track in tracks]
        offset_s = self._wall() - self._clock()
        rows = self._accounts.take(
            offset_s, final, {info.device: track for info, track in zip(infos, tracks, strict=True)}, boot_id()
        )
        for index, row in enumerate(rows.intervals):
            new_s = row.unmeasured_s - self._unmeasured_booked_s.get(row.device, 0.0)
            self._unmeasured_booked_s[row.device] = row.unmeasured_s
            rows.intervals[index] = row._replace(unmeasured_s=new_s)
        # A request whose last joules went out with an earlier flush still needs its final mark.
        for request_id in final - {row.request_id for row in rows.requests}:
            for info in infos[:1]:
                engine = self.requests.engine(request_id)
                nothing = (0.0, 0.0, 0.0, 0.0)
                mark = (request_id, self._wall(), engine, info.method.value, info.scope, *nothing, True)
                rows.requests.append(RequestCreditRow(*mark))
        return rows

    # Questions --------------------------------------------------------------------------------------------------

    def request(self, request_id: str, settled_s: float, measuring: bool, tenant: str | None = None) -> dict[str, Any]:
        """A request's record (None while it runs) and its energy: the latest of a name, of one `tenant` or of all.

        Raises:
            UnknownRequest
            sqlite3.Error: the ledger cannot be read now.
        """
        connection = self._ledger().connection
        request_id = queries.newest_named(connection, request_id, tenant) or request_id
        record = queries.request_row(connection, request_id)
        energy = self.energy(request_id, settled_s, measuring, recorded=record is not None)
        if energy is None:
            raise queries.UnknownRequest(f"no request {request_id!r} in the ledger")
        return {"request_id": request_id, "record": record, "energy": energy.as_json()}

    def energy(
        self, request_id: str, settled_s: float, measuring: bool, recorded: bool = False
    ) -> RequestEnergy | None:
        """What a request has used so far; None when nobody has heard of it."""
        written = queries.request_sums(self._ledger().connection, request_id)
        pending = [row for rows, _ in self._backlog for row in rows.requests if row.request_id == request_id]
        pending += self._accounts.pending(request_id)
        under_way = request_id in self.requests
        if written is None and not pending and not under_way and not recorded:
            return None
        marked = any(row.final for row in pending) or (written is not None and written.final)
        ended = request_id in self.requests.settled(settled_s) if under_way else recorded
        return request_energy(written, pending, marked or ended, measuring)

    def _ledger(self) -> Ledger:
        if self._file.ledger is None:
            raise sqlite3.OperationalError(f"the ledger cannot be opened: {self._file.message}")
        return self._file.ledger


def settled_through_s(tracks: Sequence[Track]) -> float:
    """Settled on all devices up to here; without a device everything is."""
    ends = [track.settled for track in tracks]
    return min((end.at_s if end else float("-inf") for end in ends), default=float("inf"))
