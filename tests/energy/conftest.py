"""The stub NVML, loaded into the real pynvml, and schedules with known joules to play on it."""

import pynvml
import pytest

from tests.energy.nvml_stub import stub_library


@pytest.fixture(scope="session")
def stub_build(tmp_path_factory):
    if stub_library.compiler() is None:
        pytest.skip("no C compiler to build the stub NVML with")
    return stub_library.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def stub(stub_build, monkeypatch):
    """A stub without devices, as the library that pynvml has loaded."""
    loaded = stub_library.Stub(stub_build)
    monkeypatch.setattr(pynvml, "nvmlLib", loaded.library)
    monkeypatch.setattr(pynvml, "_nvmlLib_refcount", 0)
    pynvml._nvmlGetFunctionPointer_cache.clear()
    yield loaded
    loaded.clear()
    pynvml._nvmlGetFunctionPointer_cache.clear()
