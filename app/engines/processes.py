"""The operating-system processes of one engine: who they are, how they fare, and that none is left behind.

vLLM starts processes below the replica: the engine core, and workers where it has several devices. They are
recognised by a marker in their environment, which every descendant inherits and which survives the death of the
parent, unlike parent ids.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

MARKER = "MODESWITCH_ENGINE_RUN"


@dataclass(frozen=True, slots=True)
class Vitals:
    """A reading of an engine's processes: CPU seconds used by all of them, and any that are stopped or gone."""

    cpu_seconds: float
    stopped: tuple[int, ...]
    gone: tuple[int, ...]


def find_marked(marker: str) -> list[psutil.Process]:
    """All live processes that carry this marker, whoever their parent is now."""
    found = []
    for process in psutil.process_iter():
        # Processes end while one looks, and those of other users cannot be read.
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARKER) == marker and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def kill_marked(marker: str, spare: int | None = None) -> int:
    """Kill every process that carries this marker, but for the process id `spare`. Returns how many were killed."""
    killed = 0
    for process in find_marked(marker):
        if process.pid != spare:
            with contextlib.suppress(psutil.Error):
                process.kill()
                killed += 1
    return killed


class EngineProcesses:
    """The engine's processes below this one, found once it has started."""

    def __init__(self, marker: str) -> None:
        self._processes = [process for process in find_marked(marker) if process.pid != os.getpid()]

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    def vitals(self) -> Vitals:
        """CPU time and state of each process; takes well under a millisecond."""
        cpu_seconds, stopped, gone = 0.0, [], []
        for process in self._processes:
            try:
                with process.oneshot():
                    status, times = process.status(), process.cpu_times()
                cpu_seconds += times.user + times.system
                if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                    stopped.append(process.pid)
                elif status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                    gone.append(process.pid)
            except psutil.Error:
                gone.append(process.pid)
        return Vitals(cpu_seconds, tuple(stopped), tuple(gone))

    def memory_bytes(self) -> tuple[int | None, int | None]:
        """Proportional resident size now and the sum of the peaks, this process included; None where unknown.

        Pages that processes share are divided among them in the first figure and counted in each in the second,
        which is therefore an upper bound.
        """
        resident, peak = 0, 0
        for pid in (os.getpid(), *self.ids):
            try:
                resident += _kib(Path(f"/proc/{pid}/smaps_rollup"), "Pss:")
                peak += _kib(Path(f"/proc/{pid}/status"), "VmHWM:")
            except OSError:
                return None, None
        return resident, peak


def _kib(path: Path, field: str) -> int:
    """Bytes behind `field` in a /proc file that counts in kB."""
    for line in path.read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"{path} has no {field}")


def start_reaper(marker: str) -> subprocess.Popen[bytes]:
    """Start the watcher that kills the engine's processes when this process ends, by whatever signal.

    Keep the returned object: the watcher waits for its standard input to close.
    """
    env = {key: value for key, value in os.environ.items() if key not in (MARKER, "LD_PRELOAD")}
    return subprocess.Popen(
        [sys.executable, "-m", "app.engines.reaper", marker],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=env,
        start_new_session=True,
    )
