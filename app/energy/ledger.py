"""The append-only record of decisions and joules, in SQLite. The meter's process is its only writer.

During an update two meters may overlap. Each takes a generation number when it opens the ledger, and every write
checks in its own transaction that no later one exists: a meter that was overtaken can write nothing more, and the new
one goes on from the last account that was written. So no joule is lost or counted twice.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from app.energy.activity import boot_id
from app.energy.rows import CalibrationRow, CreditRow, IntervalRow, LastInterval, RequestCreditRow, RequestRecord
from app.energy.schema import LATER_INDEX, SCHEMA, VERSION

log = logging.getLogger("ray.serve")
_WAIT_FOR_LOCK_S = 5.0
_TABLES_BY_AGE = (
    ("intervals", "end_s"),
    ("credits", "end_s"),
    ("request_credits", "end_s"),
    ("requests", "recorded_s"),
    ("calibrations", "at_s"),
)
_DELETE_AT_ONCE = 5000
"""Retention works in pieces, so that a flush never waits long for it."""


class Fenced(RuntimeError):
    """A later meter has taken the ledger over; this one must stop."""


class LedgerCorrupt(RuntimeError):
    """The file is not a ledger that can be read."""


class Ledger:
    """The writing end. Not thread-safe: one thread owns it.

    Raises:
        LedgerCorrupt: not a SQLite file, or damaged, or of a newer version.
        OSError, sqlite3.OperationalError: the place cannot be written.
    """

    def __init__(self, path: Path, now_s: float | None = None) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.connection = sqlite3.connect(path, timeout=_WAIT_FOR_LOCK_S, isolation_level=None, check_same_thread=False)
        try:
            self._prepare()
        except sqlite3.OperationalError:
            self.connection.close()
            raise
        except sqlite3.DatabaseError as error:
            self.connection.close()
            raise LedgerCorrupt(str(error)) from error
        except LedgerCorrupt:
            self.connection.close()
            raise
        started_s = time.time() if now_s is None else now_s
        with self._transaction(fence=False):
            cursor = self.connection.execute(
                "INSERT INTO generations (started_s, boot, pid) VALUES (?, ?, ?)", (started_s, boot_id(), os.getpid())
            )
        self.generation = int(cursor.lastrowid or 0)

    def _prepare(self) -> None:
        execute = self.connection.execute
        execute("PRAGMA journal_mode = WAL")
        # A crash of the machine may cost the last flushes; a crash of the process costs nothing.
        execute("PRAGMA synchronous = NORMAL")
        (found,) = execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise LedgerCorrupt(found)
        with self._transaction(fence=False):
            (version,) = execute("PRAGMA user_version").fetchone()
            if version == 0:
                for statement in filter(str.strip, SCHEMA.split(";")):
                    execute(statement)
                execute(f"PRAGMA user_version = {VERSION}")
            elif version != VERSION:
                raise LedgerCorrupt(f"its version is {version}, this program's is {VERSION}")
            execute(LATER_INDEX)

    @contextlib.contextmanager
    def _transaction(self, fence: bool = True) -> Iterator[None]:
        """All or nothing, and nothing once a later generation exists.

        Raises:
            Fenced
        """
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            if fence:
                (latest,) = self.connection.execute("SELECT max(generation) FROM generations").fetchone()
                if latest != self.generation:
                    raise Fenced(f"generation {self.generation} was overtaken by {latest}")
            yield
        except BaseException:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            raise
        self.connection.execute("COMMIT")

    def write(
        self,
        intervals: Sequence[IntervalRow],
        credits: Sequence[CreditRow],
        requests: Sequence[RequestCreditRow],
        calibrations: Sequence[CalibrationRow] = (),
    ) -> None:
        """One flush of the meter, in one transaction.

        Raises:
            Fenced: nothing was written.
            sqlite3.Error: nothing was written; try again.
        """
        with self._transaction():
            self._insert("intervals", IntervalRow._fields, intervals)
            columns = tuple("class" if name == "request_class" else name for name in CreditRow._fields)
            self._insert("credits", columns, credits)
            self._insert("request_credits", RequestCreditRow._fields, requests)
            encoded = [(row.at_s, row.device, row.idle_w, json.dumps(dict(row.engine_watts))) for row in calibrations]
            self._insert("calibrations", CalibrationRow._fields, encoded)

    def record(self, records: Sequence[RequestRecord]) -> None:
        """Decision records of finished requests. A request id that is there already is left as it is.

        Raises:
            RowRefused: one of them holds text; none was written.
            Fenced, sqlite3.Error: none was written.
        """
        rows = [record.columns() for record in records]
        if not rows:
            return
        with self._transaction():
            self._insert("requests", tuple(rows[0]), [tuple(row.values()) for row in rows], "OR IGNORE")
            contexts = {record.context for record in records if record.context}
            self._insert("contexts", ("context", "content"), list(contexts), "OR IGNORE")

    def _insert(self, table: str, columns: Sequence[str], rows: Sequence[Sequence[object]], verb: str = "") -> None:
        if rows:
            marks = ", ".join("?" for _ in columns)
            names = ", ".join(columns)
            self.connection.executemany(
                f"INSERT {verb} INTO {table} (generation, {names}) VALUES ({self.generation}, {marks})", rows
            )

    def last_interval(self, device: str) -> LastInterval | None:
        """Where the account of a device ends, whoever wrote it."""
        row = self.connection.execute(
            "SELECT end_monotonic_s, end_counter_j, boot, method, idle_w FROM intervals WHERE device = ? "
            "ORDER BY id DESC LIMIT 1",
            (device,),
        ).fetchone()
        return LastInterval(*row) if row else None

    def last_calibration(self, device: str) -> CalibrationRow | None:
        """What was learned of a device last."""
        row = self.connection.execute(
            "SELECT at_s, device, idle_w, engine_watts FROM calibrations WHERE device = ? ORDER BY id DESC LIMIT 1",
            (device,),
        ).fetchone()
        return CalibrationRow(row[0], row[1], row[2], json.loads(row[3])) if row else None

    def forget_before(self, moment_s: float) -> int:
        """Retention: remove some of the rows from before `moment_s`; returns how many (0: all are gone).

        Contexts go with the last request that refers to them.

        Raises:
            Fenced, sqlite3.Error
        """
        removed = 0
        with self._transaction():
            for table, column in _TABLES_BY_AGE:
                cursor = self.connection.execute(
                    f"DELETE FROM {table} WHERE rowid IN "
                    f"(SELECT rowid FROM {table} WHERE {column} < ? LIMIT {_DELETE_AT_ONCE})",
                    (moment_s,),
                )
                removed += cursor.rowcount
            self.connection.execute(
                "DELETE FROM contexts WHERE NOT EXISTS "
                "(SELECT 1 FROM requests WHERE requests.context = contexts.context)"
            )
        return removed

    def close(self) -> None:
        self.connection.close()


def open_or_set_aside(path: Path) -> tuple[Ledger, str | None]:
    """The ledger at `path`. One that cannot be read is renamed, a new one is begun, and the message says so.

    Raises:
        OSError, sqlite3.OperationalError: the place cannot be written.
    """
    try:
        return Ledger(path), None
    except LedgerCorrupt as error:
        aside = set_aside(path)
        message = f"the energy ledger {path} cannot be read ({error}); it was set aside as {aside.name}"
        log.error("%s", message)
        return Ledger(path), message


def set_aside(path: Path) -> Path:
    """Rename a damaged ledger and its journal; returns its new path."""
    aside = path.with_name(f"{path.stem}.corrupt-{time.time_ns()}{path.suffix}")
    for ending in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.rename(f"{path}{ending}", f"{aside}{ending}")
    return aside
