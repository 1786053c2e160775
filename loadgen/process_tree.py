"""CPU time and memory of process trees: what an application costs, whichever processes it consists of."""

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import psutil

_GONE = (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess)


@dataclass(frozen=True, slots=True)
class ProcessCost:
    """One process over an interval. PSS shares the pages that processes have in common; None where unreadable."""

    pid: int
    parent_pid: int
    name: str
    cpu_s_per_s: float
    rss_bytes: int
    pss_bytes: int | None


def title(process: psutil.Process) -> str:
    """What a process calls itself: the title that Ray and vLLM set, or its program and first arguments."""
    command = process.cmdline()
    if not command:
        return process.name()
    if len(command) == 1:
        return command[0].strip()
    return " ".join([os.path.basename(command[0]), *command[1:4]])[:80]


def tree(roots: Iterable[int]) -> list[psutil.Process]:
    """The roots and all their descendants, each once; those already gone are left out."""
    found: dict[int, psutil.Process] = {}
    for pid in roots:
        try:
            root = psutil.Process(pid)
            for process in (root, *root.children(recursive=True)):
                found.setdefault(process.pid, process)
        except _GONE:
            continue
    return list(found.values())


def measure(roots: Sequence[int], seconds: float) -> list[ProcessCost]:
    """CPU and memory of the trees under `roots` over `seconds` of waiting; one that ends meanwhile is left out."""
    before: dict[psutil.Process, float] = {}
    for process in tree(roots):
        try:
            before[process] = _cpu_s(process)
        except _GONE:
            continue
    start = time.perf_counter()
    time.sleep(seconds)
    costs = []
    for process, cpu_s in before.items():
        try:
            # A process that exits between two reads raises; one that was replaced is told apart by its start time.
            spent = (_cpu_s(process) - cpu_s) / (time.perf_counter() - start)
            memory = process.memory_info().rss
            costs.append(ProcessCost(process.pid, process.ppid(), title(process), spent, memory, _pss(process)))
        except _GONE:
            continue
    return costs


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _pss(process: psutil.Process) -> int | None:
    try:
        return int(process.memory_full_info().pss)
    except (*_GONE, AttributeError, OSError):
        return None


def start_group(command: Sequence[str], env: dict[str, str], log_path: os.PathLike[str]) -> subprocess.Popen[bytes]:
    """Starts `command` in a session of its own, output to `log_path`. Raises OSError when it cannot be started."""
    with open(log_path, "wb") as log:
        return subprocess.Popen(
            command, env=env, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
        )


def stop_group(process: subprocess.Popen[bytes], *, grace_s: float = 20.0) -> None:
    """Ends a process and every descendant that it has or had: politely first, then for certain."""
    members = tree([process.pid])
    for number in (signal.SIGINT, signal.SIGTERM):
        if process.poll() is None:
            os.killpg(process.pid, number)
        _, alive = psutil.wait_procs(members, timeout=grace_s / 2)
        if not alive:
            break
    # Children may have started others while they were ending, and may have left the group: look again.
    left = {*alive, *tree(item.pid for item in members)}
    for member in left:
        try:
            member.kill()
        except _GONE:
            continue
    process.wait()
    psutil.wait_procs(list(left), timeout=grace_s)
