"""A meter, its engines and their device on one clock that the test moves."""

import asyncio
import time

from app.energy.activity import Ack, ActivityRecorder, Labels
from app.energy.client import ActivitySender
from app.energy.ledger_reader import read
from app.energy.meter import Meter
from app.energy.queries import TimeRange, totals
from app.energy.samplers.choose import choose_meters
from app.energy.settings import EnergySettings
from tests.energy.schedules import slices, trace

WALL_OFFSET_S = 1_700_000_000.0
_STEP_S = 0.01


def labels(burst, request):
    return Labels(f"{burst.engine}_mode", request.split(":")[0], "standard")


class World:
    """Plays bursts: requests begin and end with them, engines step through them, senders report every 0.25 s."""

    def __init__(self, stub, ledger_path, bursts, settings=None, devices=None):
        self.now_s = 0.0
        self.stub, self.ledger_path, self.bursts = stub, ledger_path, bursts
        self.settings = settings or EnergySettings(source="nvml", ledger_path=ledger_path)
        for uuid, own in (devices or {"GPU-0": bursts}).items():
            stub.trace(stub.add(uuid), trace(own))
        stub.set_time(0.0)
        self.meters = []
        self.meter_cpu_s = 0.0
        """CPU time of all that is called of meters."""
        self.lose_next = 0
        """So many reports get lost on their way, without the sender's knowing."""
        self.recorders, self.senders = {}, {}
        for engine in sorted({burst.engine for burst in bursts}):
            self.recorders[engine] = ActivityRecorder(engine, clock=lambda: self.now_s)
            self.senders[engine] = ActivitySender(self.recorders[engine], self, clock=lambda: self.now_s)
        self._begins = sorted(bursts, key=lambda burst: burst.start_s)
        pieces = [(piece, burst) for burst in bursts for piece in slices(burst)]
        self._pieces = sorted(pieces, key=lambda item: item[0].end_s)
        self._ends = sorted(bursts, key=lambda burst: burst.end_s)

    def wall(self):
        return WALL_OFFSET_S + self.now_s

    def start_meter(self, **others):
        meter = Meter(
            choose_meters(self.settings),
            self.settings,
            self.ledger_path,
            clock=lambda: self.now_s,
            wall=self.wall,
            cpu_clock=lambda: self.meter_cpu_s,
            seed=len(self.meters),
            **others,
        )
        self.meters.append([meter, self.now_s])
        return meter

    def stop_meter(self, meter):
        meter.close()
        self.forget_meter(meter)

    def forget_meter(self, meter):
        """It is gone without a word, as after a crash."""
        self.meters = [item for item in self.meters if item[0] is not meter]

    # The port of the senders.

    async def report(self, batch):
        if not self.meters:
            raise ConnectionError("no meter")
        meter = self.meters[-1][0]
        if self.lose_next:
            self.lose_next -= 1
            return Ack(meter.generation, float("inf"))
        return self._timed(meter.report, batch)

    def _timed(self, call, *args):
        begun_s = time.thread_time()
        try:
            return call(*args)
        finally:
            self.meter_cpu_s += time.thread_time() - begun_s

    def totals(self, meter, since_s=None, until_s=None):
        """What the deployment answers: the ledger, read beside the meter once it has caught up."""
        meter.catch_up()
        return read(self.ledger_path, lambda connection: totals(connection, TimeRange(since_s, until_s)))

    def run(self, until_s):
        asyncio.run(self._run(until_s))

    async def _run(self, until_s):
        flush_at_s = self.now_s
        while self.now_s < until_s:
            self.now_s = round(self.now_s + _STEP_S, 6)
            self.stub.set_time(self.now_s)
            self._play()
            if self.now_s >= flush_at_s:
                flush_at_s = self.now_s + 0.25
                for sender in self.senders.values():
                    await sender.flush()
            for item in self.meters:
                if self.now_s >= item[1]:
                    item[1] = self.now_s + self._timed(item[0].tick)

    def _play(self):
        while self._begins and self._begins[0].start_s <= self.now_s:
            burst = self._begins.pop(0)
            for request in burst.requests:
                self.recorders[burst.engine].begin(request, labels(burst, request))
        while self._pieces and self._pieces[0][0].end_s <= self.now_s:
            piece, burst = self._pieces.pop(0)
            self.recorders[burst.engine].step(piece.start_s, piece.end_s, piece.work)
        while self._ends and self._ends[0].end_s <= self.now_s:
            burst = self._ends.pop(0)
            for request in burst.requests:
                self.recorders[burst.engine].end(request)
