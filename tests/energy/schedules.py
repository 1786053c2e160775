"""Schedules of engines with their true power: the ground truth that attribution never sees.

A burst states when an engine works, how many watts above idle the device draws for it, and on which requests. The
power trace of the device and the true joules of everyone follow from these watts alone; what the meter gets is the
trace through the stub NVML and, through the recorder's slices, times and tokens.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

from app.energy.activity import Slice, Work
from app.energy.attribution import TokenWeights
from app.energy.engine_power import EnginePower
from app.energy.samplers.nvml import open_gpus
from app.energy.track import Track

IDLE_W = 80.0


@dataclass(frozen=True)
class Burst:
    engine: str
    start_s: float
    end_s: float
    watts: float
    requests: tuple[str, ...] = ("r",)


def trace(bursts, idle_w=IDLE_W, cap_w=None):
    """Breakpoints of the device's power. With `cap_w`, what all draw together is limited and scaled down."""
    moments = sorted({-10.0, *(b.start_s for b in bursts), *(b.end_s for b in bursts)})
    steps = []
    for moment in moments:
        above = sum(b.watts for b in bursts if b.start_s <= moment < b.end_s)
        steps.append((moment, idle_w + (min(above, cap_w) if cap_w else above)))
    return steps


def true_joules(bursts, cap_w=None):
    """Joules above idle by engine; under a cap each gets its proportion."""
    joules = defaultdict(float)
    moments = sorted({*(b.start_s for b in bursts), *(b.end_s for b in bursts)})
    for start_s, end_s in pairwise(moments):
        active = [b for b in bursts if b.start_s <= start_s < b.end_s]
        above_w = sum(b.watts for b in active)
        scale = min(1.0, cap_w / above_w) if cap_w and above_w else 1.0
        for burst in active:
            joules[burst.engine] += burst.watts * scale * (end_s - start_s)
    return dict(joules)


def slices(burst, slice_s=0.05):
    """What the engine reports of a burst: slices of its steps, some tokens in each."""
    found = []
    at_s = burst.start_s
    while at_s < burst.end_s - 1e-9:
        end_s = min(at_s + slice_s, burst.end_s)
        tokens = max(1, round((end_s - at_s) * 40))
        found.append(Slice(at_s, end_s, end_s - at_s, tuple(Work(r, 0, tokens) for r in burst.requests)))
        at_s = end_s
    return found


def play(
    stub,
    bursts,
    until_s,
    *,
    cap_w=None,
    interval_s=0.05,
    jitter=None,
    report_every_s=0.25,
    prepare=None,
    engine_watts=None,
    unreported=None,
):
    """Run a track over the schedule. Returns the track, its settlements and the sampler's events."""
    device = stub.add()
    stub.trace(device, trace(bursts, cap_w=cap_w))
    if prepare:
        prepare(device)
    stub.set_time(0.0)
    (sampler,) = open_gpus(["GPU-0"], period_s=interval_s)
    track = Track(sampler, TokenWeights(0.1, 1.0), power=EnginePower(engine_watts))
    reported = [b for b in bursts if b.engine != unreported]
    waiting = sorted(((piece, b.engine) for b in reported for piece in slices(b)), key=lambda item: item[0].end_s)
    settlements, events = [], []
    known_s, tick = 0.0, 0
    while (now_s := tick * interval_s + (jitter(tick) if jitter else 0.0)) <= until_s + 1.0:
        tick += 1
        stub.set_time(now_s)
        if event := track.look(now_s):
            events.append((now_s, event))
        if now_s - known_s >= report_every_s:
            known_s = now_s
            while waiting and waiting[0][0].end_s <= known_s:
                piece, engine = waiting.pop(0)
                track.add(engine, [piece])
            # A slice under way holds the horizon back, as a recorder's `through_s` does.
            under_way = [piece.start_s for piece, _ in waiting if piece.start_s < known_s]
            settlements += track.settle(min([known_s, *under_way]))
    return track, settlements, events


def credited(settlements):
    joules = defaultdict(float)
    for settlement in settlements:
        for credit in settlement.credits:
            joules[credit.engine] += credit.energy_j
    return dict(joules)


def errors(bursts, settlements, cap_w=None):
    """Relative error of each engine's joules."""
    got = credited(settlements)
    return {engine: got.get(engine, 0.0) / joules - 1 for engine, joules in true_joules(bursts, cap_w).items()}


def worst_residual(settlements, span_s=10.0):
    """The largest |residual| / measured over any stretch of `span_s` (whole windows)."""
    worst, first = 0.0, 0
    residual = measured = 0.0
    for last in settlements:
        residual += last.residual_j
        measured += last.window.measured_j
        while last.window.end_s - settlements[first].window.end_s >= span_s:
            residual -= settlements[first].residual_j
            measured -= settlements[first].window.measured_j
            first += 1
        if last.window.end_s - settlements[first].window.start_s >= span_s * 0.95:
            worst = max(worst, abs(residual) / measured)
    return worst
