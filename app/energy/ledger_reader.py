"""Reads the ledger beside its writer: long questions must not hold up the thread that samples."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import psutil

from app.energy.activity import boot_id
from app.energy.queries import PastRow, TimeRange, Totals, past_rows, totals

T = TypeVar("T")
_WAIT_FOR_LOCK_S = 5.0


def read(path: Path, question: Callable[[sqlite3.Connection], T]) -> T:
    """Ask the ledger at `path` as it is now, over a connection of its own that cannot write.

    Raises:
        sqlite3.Error: it cannot be read.
    """
    address = f"{path.absolute().as_uri()}?mode=ro"
    with closing(sqlite3.connect(address, uri=True, timeout=_WAIT_FOR_LOCK_S, isolation_level=None)) as connection:
        # One transaction, so that what is written meanwhile is in all of an answer or in none of it.
        connection.execute("BEGIN")
        return question(connection)


class LedgerReader:
    """Answers one question after the other, on a thread of its own. The file may be replaced in between.

    Raises: sqlite3.Error, from every method, when the ledger cannot be read now.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="energy-ledger-reader")

    async def totals(self, span: TimeRange, tenant: str | None = None) -> Totals:
        """Totals by mode, engine, tenant and class, of one `tenant` or of all."""
        return await self._ask(lambda connection: totals(connection, span, tenant))

    async def past(self, model: str, limit: int) -> list[PastRow]:
        """The last `limit` requests of a model that an engine got, oldest first."""
        return await self._ask(lambda connection: past_rows(connection, model, limit))

    async def later_meter_works(self, generation: int, since_s: float) -> bool:
        """Whether a meter that came after this generation wrote since then (seconds since 1970), or still runs."""
        return await self._ask(lambda connection: later_meter_works(connection, generation, since_s))

    async def _ask(self, question: Callable[[sqlite3.Connection], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, read, self._path, question)

    def close(self) -> None:
        self._thread.shutdown(wait=False)


def later_meter_works(connection: sqlite3.Connection, generation: int, since_s: float) -> bool:
    """Whether a meter of a later generation wrote since then, or its process still runs (on another host: may run)."""
    if connection.execute(
        "SELECT 1 FROM intervals WHERE end_s >= ? AND generation > ? LIMIT 1", (since_s, generation)
    ).fetchone():
        return True
    latest = connection.execute(
        "SELECT boot, pid, started_s FROM generations WHERE generation > ? ORDER BY generation DESC LIMIT 1",
        (generation,),
    ).fetchone()
    if latest is None:
        return False
    boot, pid, started_s = latest
    if boot != boot_id():
        return True
    try:
        # A process that is younger than the meter only has its number.
        return bool(psutil.Process(pid).create_time() <= started_s)
    except psutil.Error:
        return False
