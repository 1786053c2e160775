"""Self-check of the energy figures: `python -m app.energy.check [--seconds 5] [--device GPU-...]`.

It loads the device for a few seconds, lets the meter's own accounting watch, and prints how the energy counter, the
integrated power and the accounts agree. It needs no serving application: only pynvml and torch on a machine with an
NVIDIA GPU, and psutil elsewhere.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from app.energy.activity import Slice, Work
from app.energy.attribution import Settlement, TokenWeights
from app.energy.samplers.base import MeterUnavailable, Sampler
from app.energy.samplers.nvml import NvmlSampler, open_gpus
from app.energy.samplers.rapl import RaplSampler
from app.energy.track import Track

_IDLE_S = 3.0
_CALM_DOWN_S = 1.0
"""Clocks stay up for a while after the first touch of the device."""
_SLICE_S = 0.05
_MATRIX = 4096


@dataclass
class Load:
    """Work for the device on a thread of its own, and when it ran."""

    work: Callable[[], None]
    seconds: float
    slices: list[Slice] = field(default_factory=list)

    def __call__(self) -> None:
        until_s = time.monotonic() + self.seconds
        start_s = time.monotonic()
        while start_s < until_s:
            while time.monotonic() - start_s < _SLICE_S:
                self.work()
            end_s = time.monotonic()
            self.slices.append(Slice(start_s, end_s, end_s - start_s, (Work("load", 0, 1),)))
            start_s = end_s


def find_samplers(device: str | None) -> list[Sampler]:
    """GPUs, or the CPU's counters, or the model; says what was passed over.

    Raises:
        MeterUnavailable: nothing at all, or the named device is not there.
    """
    try:
        return list(open_gpus([device] if device else ()))
    except MeterUnavailable as why:
        if device:
            raise
        print(f"passed over nvml: {why}")
    try:
        return [RaplSampler()]
    except MeterUnavailable as why:
        print(f"passed over rapl: {why}")
    try:
        from app.energy.samplers.modelled import ModelledSampler
    except ImportError as why:
        raise MeterUnavailable(f"modelled: {why}") from why
    return [ModelledSampler()]


def gpu_work(uuid: str) -> Callable[[], None] | None:
    """A matrix product on the GPU with this UUID, or None where torch cannot reach it."""
    try:
        import torch
    except ImportError:
        return None
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if str(torch.cuda.get_device_properties(index).uuid) in uuid:
            return partial(_multiply, torch.randn(_MATRIX, _MATRIX, device=f"cuda:{index}", dtype=torch.float16))
    return None


def _multiply(matrix: Any) -> None:
    import torch

    _ = matrix @ matrix
    torch.cuda.synchronize(matrix.device)


def watch(sampler: Sampler, seconds: float) -> bool:
    """Idle, load, idle; prints the comparison. True when the accounts close within 1 %."""
    info = sampler.info
    print(f"device      {info.device} ({info.name})\nmethod      {info.method.value}\nscope       {info.scope}")
    for name, has in info.capabilities.items():
        print(f"{name:<16}{'yes' if has else 'no'}")
    for note in info.notes:
        print(f"note        {note}")
    child: subprocess.Popen[bytes] | None = None
    if isinstance(sampler, NvmlSampler):
        work = gpu_work(info.device)
        if work is None:
            print("no load     torch with CUDA does not reach this device; only idle is checked")
    else:
        # A process of its own, so that the load does not hold this interpreter's lock. It sleeps until it is told.
        code = "import sys\nfor line in sys.stdin:\n  sum(i * i for i in range(2 * 10**5))\n  print(flush=True)"
        child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        work = _ask(child)
        sampler.watch("load", child.pid)
    if work is not None:
        # Starting up is not idling.
        work()
        time.sleep(_CALM_DOWN_S)
    try:
        return _account(sampler, work, seconds)
    finally:
        if child is not None:
            child.kill()
            child.wait()


def _ask(child: subprocess.Popen[bytes]) -> Callable[[], None]:
    def ask() -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()

    return ask


def _account(sampler: Sampler, work: Callable[[], None] | None, seconds: float) -> bool:
    track = Track(sampler, TokenWeights(0.1, 1.0))
    average = _Trapezoid()
    instant = _Trapezoid()
    load = Load(work, seconds) if work else None
    thread = threading.Thread(target=load) if load else None
    begun_s = time.monotonic()
    settlements: list[Settlement] = []
    events: list[str] = []
    cpu_before_s = time.thread_time()
    while (now_s := time.monotonic()) - begun_s < 2 * _IDLE_S + seconds:
        if thread and thread.ident is None and now_s - begun_s >= _IDLE_S:
            thread.start()
        if event := track.look(now_s):
            events.append(event)
        if isinstance(sampler, NvmlSampler):
            average.add(now_s, sampler.average_power_w())
            instant.add(now_s, track.last_power_w)
        time.sleep(sampler.period_s)
    used = (time.thread_time() - cpu_before_s) / (time.monotonic() - begun_s)
    if load and thread:
        thread.join()
        track.add("load", load.slices)
    settlements += track.settle(time.monotonic())
    return _print(settlements, average, instant, events, used)


def _print(
    settlements: Sequence[Settlement], average: _Trapezoid, instant: _Trapezoid, events: Sequence[str], used: float
) -> bool:
    if not settlements:
        print(f"FAILED      nothing was settled; events: {', '.join(events) or 'none'}")
        return False
    measured_j = sum(s.window.measured_j for s in settlements)
    length_s = settlements[-1].window.end_s - settlements[0].window.start_s
    idle_j = sum(s.idle_j or 0.0 for s in settlements)
    credited_j = sum(s.credited_j for s in settlements)
    residual_j = sum(s.residual_j for s in settlements)
    print(f"measured    {measured_j:.2f} J in {length_s:.2f} s ({measured_j / length_s:.2f} W)")
    for name, integral in (("average", average), ("instant", instant)):
        if integral.length_s > 0 and measured_j > 0:
            per_s = integral.energy_j / integral.length_s
            print(f"{name:<12}{per_s * length_s:.2f} J from power ({per_s * length_s / measured_j:.3f} of measured)")
    print(f"idle        {idle_j:.2f} J\ncredited    {credited_j:.2f} J")
    share = abs(residual_j) / measured_j if measured_j > 0 else 0.0
    print(f"residual    {residual_j:+.2f} J ({share:.2%} of measured; at most 1 % is expected)")
    print(f"sampling    {used:.2%} of a core")
    for event in events:
        print(f"event       {event}")
    return share <= 0.01


@dataclass
class _Trapezoid:
    energy_j: float = 0.0
    length_s: float = 0.0
    last: tuple[float, float] | None = None

    def add(self, at_s: float, power_w: float | None) -> None:
        if power_w is not None and self.last is not None:
            self.energy_j += (self.last[1] + power_w) / 2 * (at_s - self.last[0])
            self.length_s += at_s - self.last[0]
        self.last = None if power_w is None else (at_s, power_w)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 when the accounts close within 1 %, 1 when not, 2 when nothing can be measured."""
    parser = argparse.ArgumentParser(prog="python -m app.energy.check", description="Check the energy figures.")
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds of load (default 5)")
    parser.add_argument("--device", help="UUID of one GPU (default: all)")
    options = parser.parse_args(arguments)
    try:
        samplers = find_samplers(options.device)
    except MeterUnavailable as why:
        print(f"nothing can be measured: {why}; energy figures will be null")
        return 2
    good = [watch(sampler, options.seconds) for sampler in samplers]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
