"""Keeps a ledger open through trouble: a damaged file is set aside, a full disk is waited out, old rows go.

Rows are as old as the wall clock says, and it may jump. See `ClockWatch` for when it is believed.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from app.energy.accounts import Rows
from app.energy.ledger import Ledger, open_or_set_aside, set_aside
from app.energy.rows import CalibrationRow, RequestRecord, RowRefused

log = logging.getLogger("ray.serve")
_CLEAN_EVERY_S = 3600.0
_S_PER_DAY = 86400.0
_JUMP = 0.1
"""Of the retention: by so much rows may go too early or too late before anything is done about it."""


class ClockWatch:
    """Whether the wall clock may be believed: not for a day after it has jumped, unless it jumps back before.

    A jump is a move of more than `most_s` against the monotonic clock since the watch began, in one step or in many.
    """

    def __init__(self, most_s: float, offset_s: float) -> None:
        """`offset_s` is wall clock minus monotonic clock, as believed to begin with."""
        self._most_s = most_s
        self._believed_s = offset_s
        self._jumped: tuple[float, float] | None = None
        """The offset since the last jump, and the monotonic moment when it was seen."""

    def steady(self, wall_s: float, now_s: float) -> bool:
        """Whether rows may be told old by `wall_s`; `now_s` is the monotonic clock's."""
        offset_s = wall_s - now_s
        if self._near(offset_s, self._believed_s):
            self._jumped = None
            return True
        if self._jumped is None or not self._near(offset_s, self._jumped[0]):
            self._jumped = offset_s, now_s
            log.error(
                "energy ledger: the clock jumped by %+.0f s; no old rows are removed for a day, unless it jumps back",
                offset_s - self._believed_s,
            )
        if now_s - self._jumped[1] < _S_PER_DAY:
            return False
        self._believed_s, self._jumped = offset_s, None
        return True

    def _near(self, one_s: float, other_s: float) -> bool:
        return abs(one_s - other_s) <= self._most_s


class LedgerFile:
    """The meter's ledger. `ledger` is None while it cannot be opened, and `message` says why."""

    def __init__(
        self,
        path: Path,
        retention_days: float,
        wall: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self.ledger: Ledger | None = None
        self.message: str | None = None
        self._retention_s = retention_days * _S_PER_DAY
        self._wall, self._clock = wall, clock
        self._watch = ClockWatch(_JUMP * self._retention_s, wall() - clock())
        self._clean_at_s = float("-inf")
        self._open()

    def _open(self) -> bool:
        try:
            self.ledger, aside = open_or_set_aside(self.path)
        except (OSError, sqlite3.Error) as error:
            self._tell(f"{self.path}: {error}")
            return False
        self.message = aside
        return True

    def write(self, rows: Rows, calibrations: Sequence[CalibrationRow]) -> bool:
        """One flush; False when it must be tried again.

        Raises:
            Fenced
        """
        if self.ledger is None and not self._open():
            return False
        assert self.ledger is not None
        try:
            self.ledger.write(rows.intervals, rows.credits, rows.requests, calibrations)
            self._clean()
        except sqlite3.OperationalError as error:
            # Full, locked, or not writable for now.
            self._tell(f"{self.path}: {error}")
            return False
        except sqlite3.DatabaseError as error:
            self._replace(error)
            return False
        return True

    def record(self, records: Sequence[RequestRecord]) -> int:
        """Write the controller's rows; returns how many were refused because they hold text.

        Raises:
            Fenced, sqlite3.Error: none was written.
        """
        if self.ledger is None and not self._open():
            raise sqlite3.OperationalError(f"the ledger cannot be opened: {self.message}")
        assert self.ledger is not None
        kept = []
        for record in records:
            try:
                record.columns()
            except RowRefused as refused:
                log.error("request %s is not recorded: %s", record.request_id, refused)
            else:
                kept.append(record)
        self.ledger.record(kept)
        return len(records) - len(kept)

    def _clean(self) -> None:
        assert self.ledger is not None
        wall_s, now_s = self._wall(), self._clock()
        if now_s < self._clean_at_s:
            return
        if not self._watch.steady(wall_s, now_s) or self.ledger.forget_before(wall_s - self._retention_s) == 0:
            self._clean_at_s = now_s + _CLEAN_EVERY_S

    def _replace(self, error: sqlite3.DatabaseError) -> None:
        assert self.ledger is not None
        self.ledger.close()
        self.ledger = None
        aside = set_aside(self.path)
        if self._open():
            self._tell(f"{self.path} became unreadable ({error}); it was set aside as {aside.name}")

    def _tell(self, message: str) -> None:
        if message != self.message:
            log.error("energy ledger: %s", message)
        self.message = message

    def close(self) -> None:
        if self.ledger is not None:
            self.ledger.close()
