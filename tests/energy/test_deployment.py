"""The deployment's class in an event loop, without Ray's actors."""

import asyncio
import pickle
import subprocess
import sys
import time

import pytest

from app.energy.activity import ActivityRecorder, Labels, Work
from app.energy.client import ActivitySender
from app.energy.deployment import EnergyMeter, meter_application
from app.energy.meter_thread import MeterStopped
from app.energy.queries import BadRange
from app.energy.request_energy import UNMEASURED
from app.energy.rows import RequestRecord
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


async def test_what_is_said_and_answered_can_be_sent(tmp_path):
    """Ray pickles it on its way."""
    meter = EnergyMeter(EnergySettings(source="none"), tmp_path / "energy.sqlite")
    recorder = ActivityRecorder("fp16")
    recorder.begin("r1", Labels("fp16", "default", "standard"))
    recorder.stepped([Work("r1", 10, 5)])
    batch = pickle.loads(pickle.dumps(recorder.take()))
    said = RequestRecord("r1", time.time(), "fp16", "fp16", "default", "standard", "ok")
    answers = [
        await meter.report(batch),
        await meter.record([pickle.loads(pickle.dumps(said))]),
        await meter.totals(),
        await meter.energy("r1"),
        await meter.request("r1"),
        await meter.state(),
    ]
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


def test_the_meters_process_never_loads_torch():
    code = "import sys, app.energy.deployment\nsys.exit(', '.join({'torch', 'vllm'} & sys.modules.keys()) or None)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
