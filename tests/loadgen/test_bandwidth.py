from pathlib import Path

import pytest

from loadgen import bandwidth
from loadgen.bandwidth import of_cpu, read_bandwidth


def test_a_reading_says_what_it_is_of() -> None:
    found = of_cpu(2, buffer_bytes=2**24)
    assert (found.device, found.threads) == ("cpu", 2)
    assert 1e8 < found.bytes_per_s < 1e13, "slower than a disk, or faster than any memory"


def test_a_gpu_that_cannot_be_read_is_unknown_and_not_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bandwidth, "_NVIDIA", tmp_path)
    monkeypatch.setattr(bandwidth, "_of_gpu", lambda: None)
    assert read_bandwidth(1) is None
    monkeypatch.setattr(bandwidth, "_NVIDIA", tmp_path / "missing")
    monkeypatch.setattr(bandwidth, "of_cpu", lambda threads: of_cpu(threads, 2**20))
    found = read_bandwidth(3)
    assert found is not None
    assert found.threads == 3
