"""Which way of measuring is taken; a machine without one still serves."""

from app.energy.samplers.choose import choose_meters
from app.energy.settings import EnergySettings


def methods(meters):
    return [sampler.info.method.value for sampler in meters.samplers]


def test_a_gpu_is_measured_by_its_counter(stub):
    stub.trace(stub.add(), [(-10, 100)])
    stub.set_time(0.0)
    assert methods(choose_meters(EnergySettings())) == ["nvml_counter"]


def test_no_gpu_and_no_counter_is_modelled_and_says_why(stub, tmp_path):
    meters = choose_meters(EnergySettings(rapl_root=tmp_path))
    assert methods(meters) == ["modelled"]
    assert [why.split(":")[0] for why in meters.passed_over] == ["nvml", "rapl"]


def test_a_named_gpu_never_becomes_a_model(stub):
    meters = choose_meters(EnergySettings(devices=("GPU-9",)))
    assert meters.samplers == ()
    assert "GPU-9" in meters.passed_over[0]


def test_a_demanded_source_has_no_substitute(tmp_path):
    assert choose_meters(EnergySettings(source="rapl", rapl_root=tmp_path)).samplers == ()


def test_none_is_none():
    assert choose_meters(EnergySettings(source="none")).passed_over == ("energy.source is none",)
