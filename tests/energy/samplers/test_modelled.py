"""Joules modelled from CPU time."""

import os
import subprocess
import sys

import pytest

from app.energy.samplers.base import MeterUnavailable
from app.energy.samplers.core_watts import FALLBACK_WATTS_PER_CORE, watts_per_core
from app.energy.samplers.modelled import ModelledSampler
from app.energy.samplers.process_tree import ProcessTree

BURN = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\nprint(flush=True)\ninput()"


@pytest.fixture
def burner():
    child = subprocess.Popen([sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield child
    child.kill()
    child.wait()


def test_nothing_is_known_before_an_engine_is_watched():
    assert ModelledSampler().sample(0.0).point is None


def test_cpu_time_of_descendants_times_watts(burner):
    sampler = ModelledSampler({"my cpu": 10.0}, model_name="my cpu 3000")
    sampler.watch("fp16", os.getpid())
    first = sampler.sample(0.0).point
    burner.stdout.readline()
    last = sampler.sample(100.0).point
    used_s = last.cpu_s["fp16"] - first.cpu_s["fp16"]
    assert used_s >= 0.29
    watts = (last.energy_j - first.energy_j) / used_s
    assert watts == pytest.approx(10.0) or watts == pytest.approx(5.0)  # two threads may share a core
    assert sampler.info.method == "modelled"


def test_an_ended_process_stays_counted(burner):
    tree = ProcessTree(burner.pid)
    tree.read(0.0)
    burner.stdout.readline()
    used_s = tree.read(1.0)
    assert used_s > 0
    burner.kill()
    burner.wait()
    assert tree.read(2.0) == used_s


def test_a_new_root_of_an_engine_goes_on_from_the_old_ones_time(burner):
    sampler = ModelledSampler({".": 10.0})
    sampler.watch("fp16", burner.pid)
    sampler.sample(0.0)
    burner.stdout.readline()
    before = sampler.sample(1.0).point.energy_j
    sampler.watch("fp16", 2**22 + 1)
    assert sampler.sample(2.0).point.energy_j >= before > 0


def test_it_looks_less_often_while_nothing_runs(burner):
    sampler = ModelledSampler({".": 10.0})
    sampler.watch("fp16", burner.pid)
    sampler.sample(0.0)
    often_s = sampler.period_s
    burner.stdout.readline()
    sampler.sample(0.5)
    assert sampler.period_s == often_s
    sampler.sample(1.0)
    assert sampler.period_s > often_s


def test_the_table_and_its_overrides():
    assert watts_per_core("AMD EPYC 7763 64-Core Processor", {})[0] == 4.4
    assert watts_per_core("AMD EPYC 7763 64-Core Processor", {"7763": 3.0}) == (3.0, "settings: '7763'")
    assert watts_per_core("unheard of", {})[0] == FALLBACK_WATTS_PER_CORE
    with pytest.raises(MeterUnavailable, match="watts_per_core"):
        ModelledSampler({"(": 1.0})
