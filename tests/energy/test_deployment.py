"""The deployment's class in an event loop, without Ray's actors."""

import asyncio
import pickle
import sqlite3
import subprocess
import sys
import threading
import time

import pytest

from app.energy import queries
from app.energy.activity import ActivityRecorder, Labels, Work
from app.energy.client import ActivitySender
from app.energy.deployment import EnergyMeter, meter_application
from app.energy.meter_thread import MeterStopped
from app.energy.queries import BadRange
from app.energy.request_energy import UNMEASURED
from app.energy.rows import Context, RequestRecord
from app.energy.settings import EnergySettings


@pytest.fixture
def stub_gpu(stub):
    stub.trace(stub.add(), [(-10, 100)])  # on the real clock, since the test sets none


async def test_from_a_report_to_an_answer(stub_gpu, tmp_path):
    meter = EnergyMeter(EnergySettings(source="nvml", flush_s=0.2), tmp_path / "energy.sqlite")
    recorder = ActivityRecorder("fp16")
    sender = ActivitySender(recorder, meter)
    await asyncio.sleep(0.3)
    recorder.begin("r1", Labels("fp16", "default", "standard"))
    await asyncio.sleep(0.3)
    recorder.stepped([Work("r1", 10, 5)])
    recorder.end("r1")
    await sender.flush()
    energy = await meter.energy("r1", wait_s=10)
    assert energy.status == "final"
    assert energy.energy_j > 0
    assert (await meter.totals()).methods == ("nvml_counter",)
    assert (await meter.state())["measuring"]
    assert await meter.energy("r9") == UNMEASURED
    assert await meter.request("r9") is None
    await meter.check_health()
    meter.__del__()


async def test_a_machine_without_a_meter_answers_null(tmp_path):
    meter = EnergyMeter(EnergySettings(source="none"), tmp_path / "energy.sqlite")
    assert (await meter.totals()).measured_j is None
    assert not (await meter.state())["measuring"]
    meter.__del__()


async def test_a_meter_that_stops_is_unhealthy_and_says_so(tmp_path, monkeypatch):
    def broken(meter):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("app.energy.meter.Meter.tick", broken)
    meter = EnergyMeter(EnergySettings(source="none"), tmp_path / "energy.sqlite")
    with pytest.raises(MeterStopped, match="a bug"):
        await meter.state()
    with pytest.raises(MeterStopped, match="a bug"):
        await meter.totals()
    meter._thread.join(5)
    with pytest.raises(MeterStopped, match="a bug"):
        await meter.check_health()


@pytest.mark.parametrize(
    ("since_s", "until_s"), [(5, 5), (6, 5), (float("nan"), None), (-1, None), (None, float("inf")), (4e12, None)]
)
async def test_a_range_that_makes_no_sense(tmp_path, since_s, until_s):
    meter = EnergyMeter(EnergySettings(source="none"), tmp_path / "energy.sqlite")
    with pytest.raises(BadRange):
        await meter.totals(since_s, until_s)
    meter.__del__()


async def test_the_past_of_a_ledger_that_cannot_be_opened_is_an_error(tmp_path):
    (tmp_path / "folder").write_text("a file where a folder should be")
    meter = EnergyMeter(EnergySettings(source="none"), tmp_path / "folder" / "energy.sqlite")
    with pytest.raises(sqlite3.Error):
        await meter.past("tiny", 5)
    meter.__del__()


async def test_a_long_question_does_not_hold_the_meter_up(tmp_path, monkeypatch):
    asked, answer = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slow(connection, span, tenant):
        loop.call_soon_threadsafe(asked.set)
        assert answer.wait(10)
        return queries.totals(connection, span, tenant)

    monkeypatch.setattr("app.energy.ledger_reader.totals", slow)
    meter = EnergyMeter(EnergySettings(source="none"), tmp_path / "energy.sqlite")
    asking = asyncio.create_task(meter.totals())
    await asyncio.wait_for(asked.wait(), 10)
    assert (await asyncio.wait_for(meter.state(), 5))["generation"] == 1
    assert await asyncio.wait_for(meter.record([]), 5) == 0
    answer.set()
    assert (await asking).measured_j is None
    meter.__del__()


async def test_an_overtaken_meter_is_replaced_when_the_later_one_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr("app.energy.deployment._OVERTAKEN_FOR_S", 0.2)
    path = tmp_path / "energy.sqlite"
    meter = EnergyMeter(EnergySettings(source="none", flush_s=0.05), path)
    await meter.check_health()
    code = f"from pathlib import Path\nfrom app.energy.ledger import Ledger\nLedger(Path({str(path)!r}))\ninput()"
    later = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    async with asyncio.timeout(30):
        while (await meter.state())["fenced"] is None:
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)
    await meter.check_health()
    later.kill()
    later.wait()
    with pytest.raises(MeterStopped, match="took the ledger over and is gone"):
        await meter.check_health()
    meter.__del__()


async def test_what_is_said_and_answered_can_be_sent(tmp_path):
    """Ray pickles it on its way."""
    meter = EnergyMeter(EnergySettings(source="none"), tmp_path / "energy.sqlite")
    recorder = ActivityRecorder("fp16")
    recorder.begin("r1", Labels("fp16", "default", "standard"))
    recorder.stepped([Work("r1", 10, 5)])
    batch = pickle.loads(pickle.dumps(recorder.take()))
    context = Context("c", '{"model": "tiny"}')
    said = RequestRecord("r1", time.time(), "fp16", "fp16", "default", "standard", "ok", context=context)
    answers = [
        await meter.report(batch),
        await meter.record([pickle.loads(pickle.dumps(said))]),
        await meter.totals(),
        await meter.energy("r1"),
        await meter.request("r1"),
        await meter.past("tiny", 5),
        await meter.state(),
    ]
    assert [row.recorded_s for row in answers[-2]] == [said.recorded_s]
    assert pickle.loads(pickle.dumps(answers)) == answers
    with pytest.raises(BadRange) as refused:
        await meter.totals(5, 4)
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)
    meter.__del__()


def test_one_replica_without_a_gpu_beside_its_device(tmp_path):
    settings = EnergySettings(resource="gpu_node")
    deployment = meter_application(settings, tmp_path / "energy.sqlite")._bound_deployment
    assert deployment.num_replicas == 1
    assert deployment.max_ongoing_requests > 5
    options = deployment.ray_actor_options
    assert (options["num_gpus"], options["resources"]) == (0, {"gpu_node": 0.001})
    assert 0 < options["num_cpus"] < 0.1


@pytest.mark.parametrize(
    ("own", "devices", "resources"),
    [(None, None, {}), (None, "gpu", {"gpu": 0.001}), ("meters", "gpu", {"meters": 0.001})],
)
def test_the_meter_stays_with_the_device(tmp_path, own, devices, resources):
    application = meter_application(EnergySettings(resource=own), tmp_path / "energy.sqlite", devices)
    assert application._bound_deployment.ray_actor_options["resources"] == resources


def test_the_meters_process_never_loads_torch():
    code = "import sys, app.energy.deployment\nsys.exit(', '.join({'torch', 'vllm'} & sys.modules.keys()) or None)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
