"""The NVML sampler on scripted devices: capabilities are probed, and trouble is survived without inventing joules."""

import subprocess
import sys
from itertools import pairwise

import pynvml
import pytest

from app.energy.samplers.base import MeterUnavailable
from app.energy.samplers.nvml import open_gpus
from tests.energy.nvml_stub.stub_library import Function, build, compiler


def run(stub, samplers, until_s, from_s=0.0, step_s=0.05):
    """Sample from `from_s` on; returns all samples of the first sampler."""
    found, ticks = [], round((until_s - from_s) / step_s)
    for tick in range(ticks + 1):
        now_s = from_s + tick * step_s
        stub.set_time(now_s)
        for sampler in samplers:
            sample = sampler.sample(now_s)
            if sampler is samplers[0]:
                found.append(sample)
    return found


def joules(samples):
    """Energy between the first and the last point, leaving out what is unknown."""
    points = [(s.point, s.unbroken) for s in samples if s.point]
    pairs = pairwise(points)
    return sum(after.energy_j - before.energy_j for (before, _), (after, unbroken) in pairs if unbroken)


def measured_s(samples):
    points = [(s.point, s.unbroken) for s in samples if s.point]
    pairs = pairwise(points)
    return sum(after.at_s - before.at_s for (before, _), (after, unbroken) in pairs if unbroken)


def events(samples):
    return [s.event for s in samples if s.event]


@pytest.fixture
def gpu(stub):
    """One GPU at a constant 100 W."""
    device = stub.add("GPU-0")
    stub.trace(device, [(-10, 100)])
    stub.set_time(0.0)
    return device


def test_the_counter_is_the_ledger(stub, gpu):
    (sampler,) = open_gpus()
    samples = run(stub, [sampler], 10)
    assert sampler.info.method == "nvml_counter"
    assert sampler.info.device == "GPU-0"
    assert joules(samples) == pytest.approx(100 * measured_s(samples), rel=0.01)
    assert events(samples) == []


def test_no_counter_means_integrated_power(stub, gpu):
    stub.support(gpu, Function.COUNTER, False)
    (sampler,) = open_gpus()
    assert sampler.info.method == "nvml_power"
    assert not sampler.info.capabilities["energy_counter"]
    assert joules(run(stub, [sampler], 10)) == pytest.approx(1000)


def test_neither_counter_nor_power_is_no_meter(stub, gpu):
    for function in (Function.COUNTER, Function.POWER, Function.INSTANT):
        stub.support(gpu, function, False)
    with pytest.raises(MeterUnavailable, match="neither energy nor power"):
        open_gpus()


def test_a_device_is_found_by_uuid(stub):
    for index, watts in enumerate((100, 200)):
        stub.trace(stub.add(f"GPU-{index}"), [(-10, watts)])
    stub.set_time(0.0)
    (sampler,) = open_gpus(["GPU-1"])
    samples = run(stub, [sampler], 10)
    assert joules(samples) == pytest.approx(200 * measured_s(samples), rel=0.01)


def test_several_gpus_are_measured_each(stub):
    for index, watts in enumerate((100, 200)):
        stub.trace(stub.add(f"GPU-{index}"), [(-10, watts)])
    stub.set_time(0.0)
    assert [sampler.info.device for sampler in open_gpus()] == ["GPU-0", "GPU-1"]


def test_an_unknown_uuid_names_what_there_is(stub, gpu):
    with pytest.raises(MeterUnavailable, match=r"GPU-9.*there are GPU-0"):
        open_gpus(["GPU-9"])


def test_a_mig_slice_is_refused_with_the_way_out(stub, gpu):
    stub.add("MIG-a", parent=gpu)
    with pytest.raises(MeterUnavailable, match=r"MIG-a is a MIG slice.*GPU-0.*mig_scope"):
        open_gpus(["MIG-a"])


def test_the_parent_of_a_mig_slice_says_what_it_includes(stub, gpu):
    stub.add("MIG-a", parent=gpu)
    stub.add("MIG-b", parent=gpu)
    (sampler,) = open_gpus(["MIG-a"], mig_parent=True)
    assert sampler.info.device == "GPU-0"
    assert any("all of its slices" in note for note in sampler.info.notes)
    with pytest.raises(MeterUnavailable, match="count twice"):
        open_gpus(["MIG-a", "MIG-b"], mig_parent=True)


def test_mig_mode_is_noted(stub, gpu):
    stub.mig_mode(gpu, True)
    (sampler,) = open_gpus()
    assert sampler.info.notes == ("MIG is on: all slices are in the figure",)


def test_a_counter_reset_loses_its_moment_only(stub, gpu):
    stub.reset_counter(gpu, 5.02)
    (sampler,) = open_gpus()
    samples = run(stub, [sampler], 10)
    assert "counter_reset" in events(samples)
    assert joules(samples) == pytest.approx(100 * measured_s(samples), rel=0.01)
    assert measured_s(samples) >= 9.2


def test_a_lost_device_comes_back_and_its_counter_bridges_the_gap(stub, gpu):
    for function in (Function.COUNTER, Function.HANDLE):
        stub.fault(gpu, function, pynvml.NVML_ERROR_GPU_IS_LOST, 3.0, 6.0)
    (sampler,) = open_gpus()
    samples = run(stub, [sampler], 15)
    assert [event.split(":")[0] for event in events(samples)] == ["lost", "recovered"]
    assert joules(samples) == pytest.approx(1480, rel=0.01)


def test_a_driver_reload_starts_the_counter_anew(stub, gpu):
    stub.fault(gpu, Function.COUNTER, pynvml.NVML_ERROR_UNINITIALIZED, 3.0, 3.2)
    stub.fault(gpu, Function.INIT, pynvml.NVML_ERROR_DRIVER_NOT_LOADED, 3.0, 5.0)
    stub.reset_counter(gpu, 5.0)
    (sampler,) = open_gpus()
    samples = run(stub, [sampler], 15)
    assert [event.split(":")[0] for event in events(samples)] == [
        "lost",
        "recovered",
        *["garbage"] * 2,
        "counter_reset",
    ]
    assert joules(samples) == pytest.approx(100 * measured_s(samples), rel=0.01)
    assert measured_s(samples) <= 15 - 2.0


def test_a_reload_is_one_for_all_devices(stub):
    for index in range(2):
        stub.trace(stub.add(f"GPU-{index}"), [(-10, 100)])
    stub.fault(0, Function.COUNTER, pynvml.NVML_ERROR_UNINITIALIZED, 3.0, 3.2)
    stub.set_time(0.0)
    samplers = open_gpus()
    second = []
    for tick in range(200):
        stub.set_time(tick * 0.05)
        samplers[0].sample(tick * 0.05)
        second.append(samplers[1].sample(tick * 0.05))
    assert events(second) == []
    assert joules(second) == pytest.approx(100 * measured_s(second), rel=0.01)


def test_an_error_of_one_look_is_no_loss(stub, gpu):
    stub.fault(gpu, Function.COUNTER, pynvml.NVML_ERROR_TIMEOUT, 3.0, 3.06)
    (sampler,) = open_gpus()
    samples = run(stub, [sampler], 10)
    assert [event.split(":")[0] for event in events(samples)] == ["read_error"] * 2
    assert measured_s(samples) >= 9.7
    assert joules(samples) == pytest.approx(100 * measured_s(samples), rel=0.01)


def test_without_a_counter_an_error_leaves_a_hole_and_no_guess(stub, gpu):
    stub.support(gpu, Function.COUNTER, False)
    stub.support(gpu, Function.INSTANT, False)
    stub.fault(gpu, Function.POWER, pynvml.NVML_ERROR_GPU_IS_LOST, 3.0, 4.0)
    (sampler,) = open_gpus()
    samples = run(stub, [sampler], 10)
    assert joules(samples) == pytest.approx(100 * measured_s(samples), rel=0.001)
    assert 8.5 <= measured_s(samples) <= 9.0


@pytest.mark.parametrize("garbage_mj", [0.0, 2.0**63])
def test_a_garbage_reading_is_ignored_when_the_next_is_right(stub, gpu, garbage_mj):
    (sampler,) = open_gpus()
    samples = run(stub, [sampler], 5)
    stub.override(gpu, counter_mj=garbage_mj)
    samples += run(stub, [sampler], 5.05, from_s=5.05)
    stub.override(gpu)
    samples += run(stub, [sampler], 10, from_s=5.1)
    assert [event.split(":")[0] for event in events(samples)] == ["garbage"]
    assert joules(samples) == pytest.approx(100 * measured_s(samples), rel=0.01)
    assert measured_s(samples) >= 9.7


def test_garbage_power_is_no_joules(stub, gpu):
    stub.support(gpu, Function.COUNTER, False)
    stub.support(gpu, Function.INSTANT, False)
    stub.override(gpu, power_mw=4e9)
    (sampler,) = open_gpus()
    samples = run(stub, [sampler], 1)
    assert not any(sample.point for sample in samples)
    assert set(events(samples)) == {"garbage: a power of 4e+06 W"}


def test_a_counter_that_stands_still_is_not_believed(stub, gpu):
    stub.override(gpu, counter_mj=12345.0)
    (sampler,) = open_gpus()
    samples = run(stub, [sampler], 10)
    assert events(samples) == ["counter_stalled: integrating power instead"]
    assert sampler.info.method == "nvml_power"
    assert joules(samples) == pytest.approx(100 * measured_s(samples), rel=0.001)
    assert measured_s(samples) >= 7.5


def in_a_process(code, library_folder):
    env = {"LD_LIBRARY_PATH": str(library_folder), "NVML_STUB_DEVICE": "GPU-0", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


OPEN = """
from app.energy.samplers.base import MeterUnavailable
from app.energy.samplers.nvml import open_gpus
try:
    print(open_gpus()[0].info.method.value)
except MeterUnavailable as why:
    print(why)
"""


def test_pynvml_loads_the_library_by_itself(stub_build):
    assert in_a_process(OPEN, stub_build.parent) == "nvml_counter"


def test_a_library_too_old_for_the_counter(tmp_path):
    if compiler() is None:
        pytest.skip("no C compiler to build the stub NVML with")
    build(tmp_path, too_old=True)
    assert in_a_process(OPEN, tmp_path) == "nvml_power"


def test_something_that_is_no_library(tmp_path):
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"not a library")
    assert "NVML does not start" in in_a_process(OPEN, tmp_path)
