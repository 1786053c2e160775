"""The environment an engine's processes start in: caches of its own, and on a CPU its threads and libraries.

It has to be set in the replica before vLLM is imported, because the engine's processes inherit it.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from app.config import CpuSettings, Settings

_LIBRARY_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib")

UNSET = ("OMP_NUM_THREADS",)
"""Ray sets it from `num_cpus`, which here is a share for scheduling and no number of threads."""


def engine_environment(settings: Settings, engine: str) -> dict[str, str]:
    """Variables for the engine of this name; those in `UNSET` are to be removed."""
    cache = settings.home / "cache" / engine
    env = {
        # A cache of its own: two engines that compile at once would write the same files.
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "VLLM_NO_USAGE_STATS": "1",
    }
    if settings.platform == "cpu":
        env |= _cpu_environment(settings.cpu)
    return env | settings.engine_settings(engine).env


def _cpu_environment(cpu: CpuSettings) -> dict[str, str]:
    cores = _ranges(os.sched_getaffinity(0)) if cpu.cores == "all" else cpu.cores
    env = {
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CPU_NUM_OF_RESERVED_CPU": str(cpu.reserved_cores),
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


def _ranges(cores: Iterable[int]) -> str:
    """Core numbers as vLLM reads them: `{0, 1, 2, 5}` gives `0-2,5`."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
