"""Requests as they were served: distributions of latency, and a run in time."""

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from loadgen.report.drawing import Picture, beside, colours_of, finish, grid, logarithmic, new_figure
from loadgen.report.material import Latencies, Sample, Served, Timeline

_STEPS = 400
Floats = NDArray[np.float64]


def distributions(found: Latencies, name: str) -> Picture:
    """Cumulative shares of total latency and, where streams were asked for, of the time to the first token."""
    with_ttft = any(sample.ttft_ms for sample in found.samples)
    figure, panels = new_figure(1, 2 if with_ttft else 1, 5.0, sharey=True)
    colours = colours_of(sample.group for sample in found.samples)
    for sample in found.samples:
        _curve(panels[0], sample.total_ms, colours[sample.group])
        if sample.ttft_ms:
            _curve(panels[1], sample.ttft_ms, colours[sample.group])
    drawn = (("latency of the request (ms)", "total_ms"), ("time to first token (ms)", "ttft_ms"))
    for panel, (label, which) in zip(panels, drawn, strict=False):
        values = [value for sample in found.samples for value in getattr(sample, which) if value > 0]
        if values:
            logarithmic(panel, 0.9 * min(values), 1.1 * max(values))
        panel.set_xlabel(label, fontsize=9)
        panel.set_ylim(0, 1.01)
        grid(panel)
        for share in (0.5, 0.95):
            panel.axhline(share, color="#777777", linewidth=0.7, linestyle=":")
    panels[0].set_ylabel("share of the requests", fontsize=9)
    beside(figure, [Line2D([], [], color=colours[of.group], label=_named(of)) for of in found.samples], "requests of")
    words = (
        f"From {found.source}; successful requests only. Shaded: 95 % bands (Dvoretzky-Kiefer-Wolfowitz). "
        "Dotted: P50 and P95."
    )
    return finish(figure, name, "Latency distributions", words)


def _named(sample: Sample) -> str:
    return f"{sample.group} (n = {len(sample.total_ms)})"


def _curve(panel: Axes, values: Sequence[float], colour: str) -> None:
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    shares = np.arange(1, len(ordered) + 1) / len(ordered)
    half_width = math.sqrt(math.log(2 / 0.05) / (2 * len(ordered)))
    panel.step(ordered, shares, where="post", color=colour, linewidth=1.6)
    low, high = np.clip(shares - half_width, 0, 1), np.clip(shares + half_width, 0, 1)
    panel.fill_between(ordered, low, high, step="post", color=colour, alpha=0.10, linewidth=0)


def timeline(found: Timeline, name: str) -> Picture:
    """Arrivals, requests in flight by mode, and the power credited to them."""
    times_s = np.linspace(0.0, max(item.ended_s for item in found.requests), _STEPS)
    modes = sorted({item.mode for item in found.requests})
    colours = colours_of(modes)
    known = [item for item in found.requests if item.energy_j is not None]
    figure, panels = new_figure(3 if known else 2, 1, 6.8 if known else 4.8, sharex=True)
    _arrivals(panels[0], found.requests, float(times_s[-1]))
    lines = [_in_flight([item for item in found.requests if item.mode == mode], times_s) for mode in modes]
    panels[1].stackplot(times_s, lines, colors=[colours[mode] for mode in modes], step="post")
    panels[1].set_ylabel("requests\nin flight", fontsize=9)
    panels[1].yaxis.set_major_locator(MaxNLocator(integer=True))
    if known:
        panels[2].step(times_s, _power_w(known, times_s), where="post", color="#222222", linewidth=1.2)
        panels[2].set_ylim(bottom=0)
        panels[2].set_ylabel("power of the\nrequests (W)", fontsize=9)
    for panel in panels:
        grid(panel)
    panels[-1].set_xlabel("time since the start of the run (s)", fontsize=9)
    beside(figure, [Patch(color=colours[mode], label=mode) for mode in modes], "mode")
    title = "A run in time: load, modes and power" if known else "A run in time: load and modes"
    return finish(figure, name, title, _caption(found, len(known)))


def _caption(found: Timeline, known: int) -> str:
    count = len(found.requests)
    words = f"From {found.source}, n = {count} answered requests; counts, so there is no interval."
    if not known:
        return f"{words} The server told no energy, so power is unknown."
    return (
        f"{words} Power: each request's joules above idle, spread evenly over its time; "
        f"{known} of {count} requests have theirs."
    )


def _arrivals(panel: Axes, requests: Sequence[Served], end_s: float) -> None:
    width_s = max(1.0, math.ceil(end_s / 60))
    edges = np.arange(0.0, end_s + width_s, width_s)
    counts, _ = np.histogram([item.started_s for item in requests], edges)
    panel.stairs(counts / width_s, edges, fill=True, color="#9aa5b1")
    panel.set_ylabel(f"arrivals per s\n(every {width_s:g} s)", fontsize=9)


def _in_flight(requests: Sequence[Served], times_s: Floats) -> Floats:
    begins, ends = (np.sort([item[place] for item in requests]) for place in (0, 1))
    found = np.searchsorted(begins, times_s, "right") - np.searchsorted(ends, times_s, "right")
    return np.asarray(found, dtype=np.float64)


def _power_w(requests: Sequence[Served], times_s: Floats) -> Floats:
    """Sum of the mean powers of the requests under way at each time: each begins and ends as a step."""
    changes = sorted(
        change
        for item in requests
        if item.energy_j is not None and item.ended_s > item.started_s
        for watts in [item.energy_j / (item.ended_s - item.started_s)]
        for change in ((item.started_s, watts), (item.ended_s, -watts))
    )
    if not changes:
        return np.zeros_like(times_s)
    levels = np.asarray([0.0, *accumulate(watts for _, watts in changes)])
    # Steps up and down do not cancel to the last digit.
    power_w: Floats = np.maximum(0.0, levels[np.searchsorted([at_s for at_s, _ in changes], times_s, "right")])
    return power_w
