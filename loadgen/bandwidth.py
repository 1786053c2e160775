"""How fast this machine reads memory: what bounds decoding at one stream, which reads all weights for each step."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

_BUFFER_BYTES = 2**29
"""Many times what caches hold, so that every pass comes from memory."""
_PASSES = 7
_GPU_READS = 20
"""Reads in one pass on a GPU, where one takes little longer than its launch."""
_NVIDIA = Path("/dev/nvidiactl")


class ReadBandwidth(NamedTuple):
    """The median of several passes. `threads` is None on a GPU."""

    bytes_per_s: float
    device: str
    threads: int | None


def read_bandwidth(threads: int) -> ReadBandwidth | None:
    """Of the NVIDIA GPU where there is one, else of the CPU with `threads` threads; None where it cannot be measured.

    A GPU needs torch and room for the buffer. Takes about a second; nothing else should run meanwhile.
    """
    return _of_gpu() if _NVIDIA.exists() else of_cpu(threads)


def of_cpu(threads: int, buffer_bytes: int = _BUFFER_BYTES) -> ReadBandwidth:
    """Each thread reads its own part of one buffer."""
    # Ones, since pages of a buffer that nobody wrote to are all one and the same page of zeros. Bytes, since their
    # maximum takes the fewest instructions for what is read.
    parts = np.array_split(np.ones(buffer_bytes, dtype=np.uint8), threads)
    with ThreadPoolExecutor(threads) as pool:

        def read() -> None:
            # NumPy lets go of the interpreter meanwhile.
            for _ in pool.map(np.max, parts):
                pass

        return ReadBandwidth(buffer_bytes / _median_s(read), "cpu", threads)


def _of_gpu() -> ReadBandwidth | None:
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    try:
        took_s = _gpu_pass_s(torch)
    except torch.OutOfMemoryError:
        return None
    torch.cuda.empty_cache()
    return ReadBandwidth(_GPU_READS * _BUFFER_BYTES / took_s, str(torch.cuda.get_device_name()), None)


def _gpu_pass_s(torch: Any) -> float:
    buffer = torch.ones(_BUFFER_BYTES // 4, dtype=torch.float32, device="cuda")

    def read() -> None:
        for _ in range(_GPU_READS):
            buffer.sum()
        torch.cuda.synchronize()

    return _median_s(read)


def _median_s(read: Callable[[], None]) -> float:
    """Of one pass, after one that is not counted."""
    read()
    took_s = []
    for _ in range(_PASSES):
        began = time.perf_counter()
        read()
        took_s.append(time.perf_counter() - began)
    return median(took_s)
