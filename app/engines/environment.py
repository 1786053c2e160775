"""The environment an engine's processes start in: caches of its own, and on a CPU its threads and libraries.

It has to be set in the replica before vLLM is imported, because the engine's processes inherit it.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from app.config import CpuSettings, Settings

_LIBRARY_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib")

UNSET = ("OMP_NUM_THREADS",)
"""Ray sets it from `num_cpus`, which here is a share for scheduling and no number of threads."""


def engine_environment(settings: Settings, engine: str) -> dict[str, str]:
    """Variables for the engine of this name; those in `UNSET` are to be removed first."""
    own = settings.engine_settings(engine)
    cache = settings.home / "cache" / engine
    env = {
        # A cache of its own: two engines that compile at once would write the same files.
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "VLLM_NO_USAGE_STATS": "1",
    }
    if settings.platform == "cuda":
        # CUDA's own order is the fastest first; NVML counts by bus, and the two must mean the same GPU.
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    else:
        env |= _cpu_environment(settings.cpu, own.cores)
    return env | own.env


def _cpu_environment(cpu: CpuSettings, cores: str) -> dict[str, str]:
    """One process computes and schedules, as on a GPU.

    By default vLLM adds a worker process on a CPU, which costs each engine another 15 s of imports to start, half a
    GiB, and a polling loop. It does so to set what OpenMP reads (`vllm.utils.ompmultiprocessing`), which is set here.
    """
    if cores == "all":
        threads = max(1, len(os.sched_getaffinity(0)) - 1)
        binding = {}
    else:
        numbers = _numbers(cores)
        threads = len(numbers)
        listed = ",".join(map(str, numbers))
        binding = {"KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{listed}]", "GOMP_CPU_AFFINITY": listed}
    env = {
        **binding,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": str(threads),
        # Milliseconds that a thread waits for more before it sleeps, and without the processor's idle instruction.
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
        # vLLM sets it in the process that starts the engine core, too late for a copy (`app/engines/fork_server.py`).
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    if found := [path for name in cpu.preload if (path := find_library(name))]:
        env["LD_PRELOAD"] = ":".join(found)
    return env


def find_library(name: str) -> str | None:
    """Full path of a shared library: in this environment's own lib folder, or in the system's."""
    for folder in (sysconfig.get_path("data") + "/lib", *_LIBRARY_FOLDERS):
        if (path := Path(folder, name)).exists():
            return str(path)
    return None


def _numbers(cores: str) -> list[int]:
    """Core numbers of a list: `0-2,5` gives 0, 1, 2 and 5."""
    numbers: list[int] = []
    for run in cores.split(","):
        first, _, last = run.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return numbers
