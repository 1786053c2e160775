"""The ledger: one writer at a time, nothing a user wrote, and no damage that stops serving."""

import sqlite3
from dataclasses import replace

import pytest

from app.energy.accounts import Rows
from app.energy.ledger import Fenced, Ledger, LedgerCorrupt, open_or_set_aside
from app.energy.ledger_file import LedgerFile
from app.energy.queries import TimeRange, newest_named, past_rows, request_row, request_sums, totals
from app.energy.rows import (
    CalibrationRow,
    Context,
    CreditRow,
    IntervalRow,
    RequestCreditRow,
    RequestRecord,
    RowRefused,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "energy.sqlite"


def interval(end_s, measured_j=10.0, device="GPU-0"):
    return IntervalRow(
        end_s - 2, end_s, device, "nvml_counter", "whole GPU", measured_j, 4.0, 5.0, measured_j - 9, 0.0, 0.0, 2.0,
        "boot", end_s, 1000.0,
    )  # fmt: skip


def credit(end_s, engine="fp16", mode="fp16", device="GPU-0", tenant="default"):
    return CreditRow(end_s, device, engine, mode, tenant, "standard", 5.0, 0.0, 100.0, 10.0)


def request_credit(end_s, request_id="r1", final=False):
    return RequestCreditRow(request_id, end_s, "fp16", "nvml_counter", "whole GPU", 5.0, 0.0, 100.0, 10.0, final)


def record(request_id="r1", tenant="default", recorded_s=100.0, **columns):
    return RequestRecord(request_id, recorded_s, "fp16", "fp16", tenant, "standard", "ok", **columns)


def test_history_survives_a_restart(path):
    first = Ledger(path)
    first.write([interval(100)], [credit(100)], [request_credit(100)], [CalibrationRow(100, "GPU-0", 80, {"A": 300})])
    first.record([record(decision={"mode": "fp16"})])
    first.close()
    second = Ledger(path)
    assert second.generation == first.generation + 1
    second.write([interval(102)], [credit(102)], [request_credit(102, final=True)])
    found = totals(second.connection, TimeRange())
    assert (found.measured_j, found.credited_j, found.residual_j) == (20, 10, 2)
    assert found.by["mode"][0][:2] == ("fp16", 10)
    assert request_sums(second.connection, "r1")[:5] == (10, 0, 200, 20, True)
    assert request_row(second.connection, "r1")["decision"] == {"mode": "fp16"}
    assert second.last_interval("GPU-0").end_monotonic_s == 102
    assert second.last_calibration("GPU-0").engine_watts == {"A": 300}
    assert second.last_interval("GPU-1") is None


def test_an_overtaken_writer_writes_nothing(path):
    old = Ledger(path)
    new = Ledger(path)
    for write in (lambda: old.write([interval(100)], [], []), lambda: old.record([record()])):
        with pytest.raises(Fenced, match="generation 1 was overtaken by 2"):
            write()
    with pytest.raises(Fenced):
        old.forget_before(1e12)
    assert totals(new.connection, TimeRange()).measured_j is None
    new.write([interval(100)], [], [])
    assert totals(new.connection, TimeRange()).measured_j == 10


def test_a_flush_is_all_or_nothing(path):
    ledger = Ledger(path)
    with pytest.raises(sqlite3.Error):
        ledger.write([interval(100)], [credit(100), credit(102)._replace(energy_j="a lot")], [])
    assert totals(ledger.connection, TimeRange()).measured_j is None
    ledger.write([interval(100)], [], [])


def test_a_record_sent_twice_is_one(path):
    ledger = Ledger(path)
    ledger.record([record(outcome={"tokens": 3})])
    ledger.record([record(outcome={"tokens": 99}), record("r2")])
    assert request_row(ledger.connection, "r1")["outcome"] == {"tokens": 3}
    assert request_row(ledger.connection, "r2") is not None
    assert request_row(ledger.connection, "r3") is None


@pytest.mark.parametrize(
    "columns",
    [
        {"features": {"prompt": "What is the capital of France?"}},
        {"snapshot": {"deep": [{"messages": [{"role": "user"}]}]}},
        {"decision": {"why": "x" * 501}},
        {"outcome": {"joules": float("nan")}},
        {"outcome": {"object": object()}},
    ],
)
def test_no_text_of_a_user_gets_in(path, columns):
    with pytest.raises(RowRefused):
        record(**columns).columns()
    file = LedgerFile(path, 30, lambda: 100.0)
    assert file.record([record("good"), record("bad", **columns)]) == 1
    assert request_row(file.ledger.connection, "good") is not None
    assert request_row(file.ledger.connection, "bad") is None
    assert b"France" not in path.read_bytes()


def test_counts_of_prompts_are_welcome():
    record(features={"prompt_tokens": 12, "prompt": 12, "text_hash": "ab12"}).columns()


def test_old_rows_go(path):
    ledger = Ledger(path)
    ledger.write([interval(100), interval(200)], [credit(100)], [request_credit(100)])
    ledger.record([record()])
    assert ledger.forget_before(150) == 4
    assert ledger.forget_before(150) == 0
    assert totals(ledger.connection, TimeRange()).measured_j == 10
    assert request_row(ledger.connection, "r1") is None


def contexts(ledger):
    return {row[0] for row in ledger.connection.execute("SELECT context FROM contexts")}


def test_a_context_goes_with_its_last_request(path):
    ledger = Ledger(path)
    shared, old = Context("shared", "{}"), Context("old", "{}")
    ledger.record([record("r1", context=shared), record("r2", context=old)])
    ledger.record([replace(record("r3", context=shared), recorded_s=200.0)])
    assert contexts(ledger) == {"shared", "old"}
    assert ledger.forget_before(150) == 2
    assert contexts(ledger) == {"shared"}
    ledger.record([replace(record("r4", context=old), recorded_s=200.0)])
    assert contexts(ledger) == {"shared", "old"}


def test_the_last_requests_of_a_model_that_an_engine_got(path):
    ledger = Ledger(path)
    ours, changed, other = (
        Context(name, f'{{"model": "{model}"}}') for name, model in (("a", "tiny"), ("b", "tiny"), ("c", "large"))
    )
    ledger.record(
        [
            # The clock was set back after the first.
            record("r1", recorded_s=900.0, context=ours, features={"tag": "code"}, outcome={"usage": None}),
            record("r2", recorded_s=101.0, context=other),
            record("r3", recorded_s=102.0, context=changed),
            replace(record("r4", recorded_s=103.0, context=ours), mode=None),
            record("r5", recorded_s=104.0, context=Context("d", "no JSON")),
            record("r6", recorded_s=105.0),
            record("r7", recorded_s=106.0, context=ours),
        ]
    )
    ledger.connection.execute("UPDATE requests SET decision = CAST(x'ff7b' AS TEXT) WHERE request_id = 'r3'")

    def moments(model, limit):
        return [row.recorded_s for row in past_rows(ledger.connection, model, limit)]

    assert moments("tiny", 10) == [900.0, 102.0, 106.0]
    assert moments("tiny", 2) == [102.0, 106.0]
    assert moments("large", 2) == [101.0]
    assert moments("small", 2) == []
    first, damaged, _ = past_rows(ledger.connection, "tiny", 10)
    assert first == (900.0, "fp16", "ok", b'{"tag":"code"}', b"{}", b'{"usage":null}')
    assert damaged.decision == b"\xff{"


def test_an_older_file_gets_the_index_that_this_needs(path):
    ledger = Ledger(path)
    ledger.connection.execute("DROP INDEX requests_by_context")
    ledger.close()
    plan = Ledger(path).connection.execute("EXPLAIN QUERY PLAN SELECT 1 FROM requests WHERE context = 'x'").fetchall()
    assert "requests_by_context" in plan[0][-1]


DAY_S = 86400.0


class Clocks:
    """Time passes on both; the wall clock alone jumps."""

    def __init__(self):
        self.now_s, self.wall_s = 0.0, 1e9

    def wall(self):
        return self.wall_s

    def clock(self):
        return self.now_s

    def jump(self, by_s):
        self.wall_s += by_s


@pytest.fixture
def clocks():
    return Clocks()


@pytest.fixture
def kept(path, clocks):
    """Lets days pass, an hour at a time as the meter flushes, and tells which of the first rows are still there."""
    file = LedgerFile(path, 30.0, clocks.wall, clocks.clock)

    def pass_days(days=0.0, *written):
        for _ in range(round(days * 24) or 1):
            clocks.now_s += 3601 if days else 0
            clocks.wall_s += 3601 if days else 0
            file.write(Rows([interval(end_s) for end_s in written], [], []), [])
            written = ()
        return [row[0] for row in file.ledger.connection.execute("SELECT end_s FROM intervals ORDER BY end_s")]

    return pass_days


def test_retention_works_along_with_the_flushes(path, clocks):
    file = LedgerFile(path, 1.0, clocks.wall, clocks.clock)
    file.write(Rows([interval(clocks.wall_s)], [], []), [])
    clocks.now_s += 2 * DAY_S
    clocks.wall_s += 2 * DAY_S
    file.write(Rows([interval(clocks.wall_s)], [], []), [])
    assert totals(file.ledger.connection, TimeRange()).measured_j == 10


@pytest.mark.parametrize("days", [40, 400, -40])
def test_a_clock_that_jumps_and_comes_back_removes_nothing_and_is_told_once(kept, clocks, caplog, days):
    young, old = 1e9 - 10 * DAY_S, 1e9 - 29.8 * DAY_S
    assert kept(0, young, old) == [old, young]
    clocks.jump(days * DAY_S)
    assert kept(0.7) == [old, young]
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"jumped by {days * DAY_S:+.0f} s" in line
    clocks.jump(-days * DAY_S)
    # Back where it was it is believed at once: what is old by now goes with the next look.
    assert kept(0.1) == [young]
    assert len(caplog.records) == 1


@pytest.mark.parametrize("days", [40, -40])
def test_a_clock_that_keeps_to_its_jump_is_believed_after_a_day(kept, clocks, days):
    before, after = 1e9 - 29 * DAY_S, 1e9 - 29 * DAY_S + days * DAY_S
    kept(0, before)
    clocks.jump(days * DAY_S)
    assert before in kept(0.9, after)
    # Jumped back, the rows from before lie in the future, and those since then grow old as usual.
    assert kept(1.5) == ([] if days > 0 else [before])


def test_another_jump_begins_the_day_anew(kept, clocks):
    row = 1e9 - DAY_S
    kept(0, row)
    for _ in range(4):
        clocks.jump(40 * DAY_S)
        assert kept(0.7) == [row]
    assert kept(0.5) == []


def test_small_steps_that_add_up_are_a_jump(kept, clocks, caplog):
    row = 1e9 - 27.5 * DAY_S
    assert kept(0, row) == [row]
    for _ in range(10):
        clocks.jump(0.4 * DAY_S)
        kept(0.01)
    assert kept(0.01) == []
    assert "jumped by" in caplog.text


@pytest.mark.parametrize("damage", [b"this is not a database" * 100, "middle"])
def test_a_damaged_file_is_set_aside_with_a_message(path, damage):
    ledger = Ledger(path)
    ledger.write([interval(100 + index) for index in range(2000)], [], [])
    ledger.close()
    if damage == "middle":
        content = bytearray(path.read_bytes())
        content[4096:-4096] = b"\xff" * (len(content) - 8192)
        path.write_bytes(content)
    else:
        path.write_bytes(damage)
    with pytest.raises(LedgerCorrupt):
        Ledger(path)
    fresh, message = open_or_set_aside(path)
    assert "set aside as energy.corrupt-" in message
    fresh.write([interval(100)], [], [])
    assert totals(fresh.connection, TimeRange()).measured_j == 10


def test_a_ledger_of_another_version_is_not_touched(path):
    ledger = Ledger(path)
    ledger.connection.execute("PRAGMA user_version = 99")
    ledger.close()
    with pytest.raises(LedgerCorrupt, match="version is 99"):
        Ledger(path)


def test_a_place_that_cannot_be_written_is_told_and_tried_again(tmp_path):
    (tmp_path / "folder").write_text("a file where a folder should be")
    file = LedgerFile(tmp_path / "folder" / "energy.sqlite", 30, lambda: 100.0)
    assert file.ledger is None
    assert "folder" in file.message
    with pytest.raises(sqlite3.OperationalError):
        file.record([record()])
    (tmp_path / "folder").unlink()
    assert file.record([record()]) == 0
    assert file.message is None


def test_the_account_of_a_tenant_tells_nothing_of_the_others(path):
    ledger = Ledger(path)
    ledger.write(
        [interval(100)],
        [credit(100, tenant="red"), credit(100, tenant="blue"), credit(100, mode="gptq", tenant="blue")],
        [],
    )
    red = totals(ledger.connection, TimeRange(), "red")
    assert red.by.keys() == {"mode", "engine", "tenant", "class"}
    assert [[share.energy_j for share in shares] for shares in red.by.values()] == [[5.0]] * 4
    assert (red.credited_j, red.methods) == (5.0, ("nvml_counter",))
    assert {red.measured_j, red.idle_j, red.residual_j, red.approximate_j} == {None}
    assert totals(ledger.connection, TimeRange(), "green").credited_j == 0
    assert totals(ledger.connection, TimeRange(200), "red").credited_j is None
    assert totals(ledger.connection, TimeRange()).credited_j == 5


def test_a_name_that_two_tenants_use_is_found_for_each(path):
    ledger = Ledger(path)
    ledger.record([record("order.1", "red", 100.0), record("order.2", "red", 101.0), record("order.3", "blue", 102.0)])
    found = {tenant: newest_named(ledger.connection, "order", tenant) for tenant in ("red", "blue", "green", None)}
    assert found == {"red": "order.2", "blue": "order.3", "green": None, None: "order.3"}


def test_tokens_of_two_engines_add_up_and_of_two_devices_do_not(path):
    ledger = Ledger(path)
    ledger.write([], [credit(100), credit(100, device="GPU-1"), credit(100, engine="int8", mode="int8")], [])
    (tenant,) = totals(ledger.connection, TimeRange()).by["tenant"]
    assert (tenant.energy_j, tenant.decode_tokens, tenant.j_per_output_token) == (15, 20, 0.75)
