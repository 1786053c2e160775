"""The device's NVML half on a stub NVML: whatever CUDA_VISIBLE_DEVICES says, memory and UUID are of the same GPU."""

import pynvml
import pytest

from app.config import load_settings
from app.device import Device, Reading, visible_gpu_uuid
from app.engines.environment import engine_environment

FIRST, SECOND, SLICE = "GPU-11aa", "GPU-22bb", "MIG-33cc"


@pytest.fixture
def device(stub):
    """Two GPUs, the second with a MIG slice."""
    stub.memory(stub.add(FIRST, "Stub A"), 100, 10)
    second = stub.add(SECOND, "Stub B")
    stub.memory(second, 200, 20)
    stub.memory(stub.add(SLICE, "Stub B slice", parent=second), 50, 5)
    return Device(load_settings({"preset": "a100-40gb"}))


@pytest.mark.parametrize(
    ("visible", "name", "reading", "gpu"),
    [
        (None, "Stub A", Reading(10, 100), FIRST),
        ("", "Stub A", Reading(10, 100), FIRST),
        ("0", "Stub A", Reading(10, 100), FIRST),
        ("1,0", "Stub B", Reading(20, 200), SECOND),
        (SECOND, "Stub B", Reading(20, 200), SECOND),
        ("GPU-22,GPU-11", "Stub B", Reading(20, 200), SECOND),
        (SLICE, "Stub B slice", Reading(5, 50), SECOND),
    ],
)
def test_every_form_names_one_gpu(device, monkeypatch, visible, name, reading, gpu):
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device.identify() == name
    assert device.read() == reading
    assert visible_gpu_uuid() == gpu


@pytest.mark.parametrize("visible", ["2", "-1", "NoDevFiles", "GPU-99", "GPU-", "MIG-99"])
def test_what_is_not_there_is_unknown_and_never_another_gpu(device, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device.read() == Reading(None, None)
    assert device.identify() == "unknown GPU"
    with pytest.raises(pynvml.NVMLError):
        visible_gpu_uuid()


def test_memory_that_cannot_be_read_is_unknown(stub, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    stub.add(FIRST)
    assert Device(load_settings({"preset": "a100-40gb"})).read() == Reading(None, None)


def test_cuda_counts_gpus_as_nvml_does():
    assert engine_environment(load_settings({"preset": "a100-40gb"}), "fp16")["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "CUDA_DEVICE_ORDER" not in engine_environment(load_settings({"preset": "cpu"}), "fp16")
