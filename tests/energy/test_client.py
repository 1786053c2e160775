"""Senders never make their caller wait, and tell a new meter what the old one had not written down."""

import asyncio
from dataclasses import replace

import pytest

from app.energy.activity import Ack, ActivityRecorder, Labels, Work
from app.energy.attribution import TokenWeights
from app.energy.client import ActivitySender, RecordSender, WeightSender
from app.energy.ledger_file import LedgerFile
from app.energy.rows import RequestRecord


class FakeMeter:
    """Remembers what it got; can be away."""

    def __init__(self):
        self.away = False
        self.generation = 1
        self.settled_s = float("-inf")
        self.batches, self.records, self.weights = [], [], []

    async def report(self, batch):
        await asyncio.sleep(0)
        if self.away:
            raise ConnectionError("no replica")
        self.batches.append(batch.seq)
        self.told_dropped = batch.dropped_batches
        return Ack(self.generation, self.settled_s)

    async def record(self, records):
        if self.away:
            raise ConnectionError("no replica")
        self.records += [record.request_id for record in records]
        return 0

    async def weigh(self, tokens, watts):
        if self.away:
            raise ConnectionError("no replica")
        self.weights.append((tokens, watts))


@pytest.fixture
def meter():
    return FakeMeter()


class Engine:
    """A recorder with one request that steps whenever told to."""

    def __init__(self, meter, **options):
        self.now_s = 0.0
        self.recorder = ActivityRecorder("fp16", clock=lambda: self.now_s)
        self.recorder.begin("r", Labels("fp16", "default", "standard"))
        self.sender = ActivitySender(self.recorder, meter, clock=lambda: self.now_s, **options)

    async def step(self):
        self.now_s += 0.25
        self.recorder.stepped([Work("r", 0, 1)])
        return await self.sender.flush()


async def test_each_batch_is_sent_once(meter):
    engine = Engine(meter)
    for _ in range(4):
        assert await engine.step()
    assert meter.batches == [0, 1, 2, 3]


async def test_what_a_meter_has_not_written_down_is_told_to_the_next_one(meter):
    engine = Engine(meter)
    for _ in range(3):
        await engine.step()
    meter.settled_s = 0.5
    await engine.step()
    meter.generation, meter.settled_s, meter.batches = 2, float("-inf"), []
    await engine.step()
    assert sorted(set(meter.batches)) == [2, 3, 4]


async def test_a_meter_that_is_away_gets_all_of_it_later(meter):
    engine = Engine(meter)
    meter.away = True
    assert [await engine.step() for _ in range(5)] == [False] * 5
    meter.away = False
    await engine.step()
    assert meter.batches == [0, 1, 2, 3, 4, 5]


async def test_the_buffer_is_bounded_and_losses_are_counted(meter):
    engine = Engine(meter, keep=3)
    meter.away = True
    for _ in range(10):
        await engine.step()
    assert engine.sender.dropped_batches == 7
    meter.away = False
    await engine.step()
    assert meter.batches == [8, 9, 10]  # the meter sees the hole
    assert meter.told_dropped == 8
    for _ in range(10):
        await engine.step()
    assert engine.sender.dropped_batches == 8


async def test_an_idle_engine_only_gives_a_sign_of_life(meter):
    engine = Engine(meter)
    engine.recorder.end("r")
    for _ in range(100):
        engine.now_s += 0.25
        await engine.sender.flush()
    assert len(meter.batches) == 3  # the end, and one every 10 s


def record(name):
    return RequestRecord(name, 1.0, None, None, None, None, "ok")


async def test_records_keep_their_order_and_wait_for_the_meter(meter):
    sender = RecordSender(meter, keep=600)
    meter.away = True
    for index in range(602):
        sender.put(record(str(index)))
    assert not await sender.flush()
    meter.away = False
    assert await sender.flush()
    assert meter.records == [str(index) for index in range(2, 602)]
    assert sender.dropped_records == 2


async def test_records_that_the_ledger_refuses_are_counted_as_dropped(meter, tmp_path):
    file = LedgerFile(tmp_path / "ledger.sqlite", 30, lambda: 100.0)

    async def write(records):
        return file.record(records)

    meter.record = write
    sender = RecordSender(meter, keep=2)
    for one in (record("first"), record("good"), replace(record("bad"), features={"prompt": "Who is it?"})):
        sender.put(one)
    assert await sender.flush()
    assert await sender.flush()
    assert sender.dropped_records == 2  # no room for the first, and text in the last
    assert file.ledger.connection.execute("SELECT request_id FROM requests").fetchall() == [("good",)]


async def test_a_hanging_meter_does_not_hold_the_caller(meter, monkeypatch):
    monkeypatch.setattr("app.energy.client._CALL_TIMEOUT_S", 0.01)

    async def hang(batch):
        await asyncio.sleep(60)

    meter.report = hang
    engine = Engine(meter)
    assert await engine.step() is False


async def test_weights_are_told_at_once_and_again_to_a_meter_that_may_be_new(meter):
    sender = WeightSender(meter, again_s=0.01)
    running = asyncio.create_task(sender.run())
    await asyncio.sleep(0.03)
    assert meter.weights == []
    meter.away = True
    weights = ({"fp16": TokenWeights(0.02, 0.2)}, {"fp16": 100.0})
    sender.put(*weights)
    await asyncio.sleep(0.03)
    meter.away = False
    async with asyncio.timeout(2):
        while len(meter.weights) < 3:
            await asyncio.sleep(0.005)
    assert all(told == weights for told in meter.weights)
    running.cancel()
