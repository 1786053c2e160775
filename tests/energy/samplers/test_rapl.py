"""RAPL counters from a folder like the kernel's."""

import pytest

from app.energy.samplers.base import MeterUnavailable
from app.energy.samplers.rapl import RaplSampler

RANGE_UJ = 262143328850


def domain(root, folder, name, energy_uj):
    path = root / folder
    path.mkdir()
    (path / "name").write_text(f"{name}\n")
    (path / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
    (path / "energy_uj").write_text(f"{energy_uj}\n")
    return path / "energy_uj"


@pytest.fixture
def package(tmp_path):
    domain(tmp_path, "intel-rapl:0:0", "core", 10)
    return domain(tmp_path, "intel-rapl:0", "package-0", 1_000_000)


def test_joules_since_the_first_look(tmp_path, package):
    sampler = RaplSampler(tmp_path)
    package.write_text("3500000\n")
    assert sampler.sample(1.0).point.energy_j == pytest.approx(2.5)
    assert sampler.info.method == "rapl"


def test_the_counter_wraps_around(tmp_path, package):
    package.write_text(f"{RANGE_UJ - 1_000_000}\n")
    sampler = RaplSampler(tmp_path)
    package.write_text("999999\n")
    assert sampler.sample(1.0).point.energy_j == pytest.approx(2.0)


def test_memory_counts_beside_the_package_and_cores_do_not(tmp_path, package):
    dram = domain(tmp_path, "intel-rapl:0:1", "dram", 0)
    sampler = RaplSampler(tmp_path)
    package.write_text("2000000\n")
    dram.write_text("500000\n")
    assert sampler.sample(1.0).point.energy_j == pytest.approx(1.5)
    assert sampler.info.scope == "whole CPU: package-0, dram"


def test_a_failed_read_is_a_break(tmp_path, package):
    sampler = RaplSampler(tmp_path)
    package.write_text("garbage")
    assert sampler.sample(1.0).event.startswith("read_error")
    package.write_text("3000000")
    assert not sampler.sample(2.0).unbroken


def test_a_machine_without_it(tmp_path):
    with pytest.raises(MeterUnavailable, match="no CPU package"):
        RaplSampler(tmp_path)
    with pytest.raises(MeterUnavailable):
        RaplSampler(tmp_path / "missing")
