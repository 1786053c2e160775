"""The ledger read beside its writer."""

import os
import sqlite3

import pytest

from app.energy.activity import boot_id
from app.energy.ledger import Ledger
from app.energy.ledger_reader import LedgerReader, later_meter_works, read
from app.energy.queries import TimeRange, totals
from app.energy.rows import IntervalRow


@pytest.fixture
def path(tmp_path):
    return tmp_path / "an energy#1.sqlite"


def interval(end_s):
    return IntervalRow(
        end_s - 2, end_s, "GPU-0", "nvml_counter", "whole GPU", 10.0, 4.0, 5.0, 1.0, 0.0, 0.0, 2.0, "boot", end_s, 1.0
    )


async def test_a_reader_sees_what_is_written_and_writes_nothing(path):
    writer = Ledger(path)
    reader = LedgerReader(path)
    assert (await reader.totals(TimeRange())).measured_j is None
    writer.write([interval(100)], [], [])
    assert (await reader.totals(TimeRange())).measured_j == 10
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        read(path, lambda connection: connection.execute("DELETE FROM intervals"))
    reader.close()


def test_an_answer_is_of_one_moment(path):
    writer = Ledger(path)
    writer.write([interval(100)], [], [])

    def twice(connection):
        first = totals(connection, TimeRange()).measured_j
        writer.write([interval(102)], [], [])
        return first, totals(connection, TimeRange()).measured_j

    assert read(path, twice) == (10, 10)


async def test_a_file_that_was_replaced_is_read_anew(path):
    reader = LedgerReader(path)
    with pytest.raises(sqlite3.OperationalError):
        await reader.totals(TimeRange())
    Ledger(path).write([interval(100)], [], [])
    assert (await reader.totals(TimeRange())).measured_j == 10
    reader.close()


def later(path, generation, since_s=0.0):
    return read(path, lambda connection: later_meter_works(connection, generation, since_s))


def test_a_later_meter_works_while_it_writes_or_its_process_lives(path):
    first = Ledger(path)
    assert not later(path, first.generation)
    second = Ledger(path)
    assert later(path, first.generation)
    second.write([interval(100)], [], [])
    connection = second.connection
    for boot, pid, started_s, lives in [
        (boot_id(), os.getpid(), 1e12, True),
        (boot_id(), os.getpid(), 0.0, False),  # the number is another process's now
        (boot_id(), 2**22 + 1, 1e12, False),
        ("another host", 2**22 + 1, 1e12, True),
    ]:
        connection.execute(
            "UPDATE generations SET boot = ?, pid = ?, started_s = ? WHERE generation = 2", (boot, pid, started_s)
        )
        assert later(path, first.generation, since_s=101) is lives
        assert later(path, first.generation, since_s=99)
        assert not later(path, second.generation)
