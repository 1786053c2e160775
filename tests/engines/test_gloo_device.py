"""Groups share a device. In a process of its own, since what is replaced is torch's."""

import subprocess
import sys

_GROUPS = """
import sys, tempfile, time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from app.engines.gloo_device import register


def device_threads(at_least):
    # A thread has its name once it runs.
    until_s = time.monotonic() + 30
    while True:
        names = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
        found = names.count("gloo_tcp_loop")
        if found >= at_least or time.monotonic() > until_s:
            return found
        time.sleep(0.01)


if sys.argv[1] == "shared":
    register()
    register()
with tempfile.NamedTemporaryFile() as store:
    dist.init_process_group("gloo", init_method=f"file://{store.name}", rank=0, world_size=1)
    groups = [dist.new_group([0], backend="gloo", timeout=timedelta(seconds=5)) for _ in range(3)]
    print(device_threads(int(sys.argv[2])))
    dist.destroy_process_group(groups[0])
    sums = torch.ones(2)
    dist.all_reduce(sums, group=groups[1])
    dist.barrier(groups[2])
    assert sums.tolist() == [1.0, 1.0]
    dist.destroy_process_group()
"""


def _device_threads(how: str, at_least: int) -> int:
    command = [sys.executable, "-c", _GROUPS, how, str(at_least)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)


def test_all_groups_share_one_device_and_outlive_each_other() -> None:
    assert _device_threads("shared", 1) == 1


def test_torch_alone_makes_one_for_each_group() -> None:
    assert _device_threads("alone", 4) == 4
