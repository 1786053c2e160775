"""Builds and scripts the stub NVML (`stub.c`)."""

import ctypes
import shutil
import subprocess
from enum import IntEnum
from itertools import pairwise
from pathlib import Path

SOURCE = Path(__file__).with_name("stub.c")


class Function(IntEnum):
    """What a script can switch off or let fail."""

    COUNTER = 0
    POWER = 1
    INSTANT = 2
    HANDLE = 3
    INIT = 4


def compiler():
    return shutil.which("gcc") or shutil.which("cc")


def build(folder, too_old=False):
    """Compile into `folder` under the name that pynvml loads."""
    library = Path(folder) / "libnvidia-ml.so.1"
    flags = ["-DTOO_OLD"] if too_old else []
    command = [compiler(), "-O1", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", *flags]
    subprocess.run([*command, "-o", library, SOURCE, "-lm"], check=True)
    return library


class Stub:
    """The loaded stub. Time is what the test says it is."""

    def __init__(self, library):
        self._c = ctypes.CDLL(str(library))
        for name in ("stub_set_time", "stub_reset_counter", "stub_counter", "stub_override", "stub_fault"):
            getattr(self._c, name).restype = None
        self.clear()

    @property
    def library(self):
        return self._c

    def clear(self):
        self._c.stub_clear()

    def set_time(self, now_s):
        self._c.stub_set_time(ctypes.c_double(now_s))

    def add(self, uuid="GPU-0", name="Stub GPU", parent=-1):
        return self._c.stub_add(uuid.encode(), name.encode(), parent)

    def trace(self, device, steps):
        """`steps` are (from second, watts), in order."""
        assert all(a[0] < b[0] for a, b in pairwise(steps))
        array = ctypes.c_double * len(steps)
        times, watts = array(*(t for t, _ in steps)), array(*(w for _, w in steps))
        self._c.stub_trace(device, len(steps), times, watts)

    def support(self, device, function, yes):
        self._c.stub_support(device, int(function), int(yes))

    def counter(self, device, period_s, phase_s=0.0):
        self._c.stub_counter(device, ctypes.c_double(period_s), ctypes.c_double(phase_s))

    def reset_counter(self, device, at_s):
        self._c.stub_reset_counter(device, ctypes.c_double(at_s))

    def override(self, device, counter_mj=float("nan"), power_mw=float("nan")):
        self._c.stub_override(device, ctypes.c_double(counter_mj), ctypes.c_double(power_mw))

    def mig_mode(self, device, on):
        self._c.stub_mig_mode(device, int(on))

    def memory(self, device, total_bytes, free_bytes):
        self._c.stub_memory(device, ctypes.c_uint64(total_bytes), ctypes.c_uint64(free_bytes))

    def fault(self, device, function, code, from_s=0.0, to_s=1e9):
        self._c.stub_fault(device, int(function), code, ctypes.c_double(from_s), ctypes.c_double(to_s))
