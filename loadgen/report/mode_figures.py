"""Modes on workloads: the screening scatter, and the heat maps of speed-up and energy."""

import math
from collections.abc import Callable, Iterator

from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.lines import Line2D

from loadgen.report.drawing import MARKERS, UNKNOWN, Picture, beside, colours_of, finish, grid, new_figure, one
from loadgen.report.material import Effect, Estimate, Screening

Pick = Callable[[Effect], Estimate | None]


def screening(found: Screening, name: str) -> Picture:
    """Speed-up against energy ratio; speed-up alone where energy was not measured."""
    if any(effect.energy_ratio for effect in found.effects if effect.mode != found.reference):
        return _scatter(found, name)
    return _dots(found, name)


def _scatter(found: Screening, name: str) -> Picture:
    figure, (panel,) = new_figure(1, 1, 6.4)
    colours, markers = colours_of(found.modes), _markers(found)
    points = [effect for effect in found.effects if effect.mode != found.reference and effect.energy_ratio]
    for effect in points:
        assert effect.energy_ratio is not None
        panel.errorbar(
            effect.speedup.value,
            effect.energy_ratio.value,
            xerr=[[end] for end in effect.speedup.errors],
            yerr=[[end] for end in effect.energy_ratio.errors],
            fmt=markers[effect.workload],
            color=colours[effect.mode],
            markersize=8,
            markeredgecolor="white",
            markeredgewidth=0.5,
            elinewidth=0.8,
        )
    one(panel, "x")
    one(panel, "y")
    grid(panel)
    panel.set_xlabel(f"latency speed-up against {found.reference} (times; right is faster)")
    panel.set_ylabel(f"energy ratio to {found.reference}, J per output token\n(below 1 saves energy)")
    beside(figure, _swatches(found), "mode")
    beside(figure, _shapes(found), "workload", where="lower")
    return finish(figure, name, "Fixed modes: speed-up and energy", _caption(found, points))


def _dots(found: Screening, name: str) -> Picture:
    """One line a mode, one dot a workload, beside one another so that their bars do not overlap."""
    modes, workloads = found.modes, found.workloads
    figure, (panel,) = new_figure(1, 1, 1.6 + 0.32 * max(1, len(modes)) * max(1.5, len(workloads) / 3))
    colours, markers = colours_of(modes), _markers(found)
    points = [effect for effect in found.effects if effect.mode != found.reference]
    for effect in points:
        offset = (workloads.index(effect.workload) + 0.5) / len(workloads) - 0.5
        panel.errorbar(
            effect.speedup.value,
            modes.index(effect.mode) + 0.75 * offset,
            xerr=[[end] for end in effect.speedup.errors],
            fmt=markers[effect.workload],
            color=colours[effect.mode],
            markersize=6,
            markeredgecolor="white",
            elinewidth=1.2,
        )
    one(panel, "x")
    grid(panel, "x")
    panel.set_yticks(range(len(modes)), modes)
    panel.set_ylim(len(modes) - 0.5, -0.5)
    panel.set_xlabel(f"latency speed-up against {found.reference} (times; right is faster)")
    beside(figure, _shapes(found), "workload × streams")
    words = _caption(found, points) + " Energy was not measured here, so it has no axis."
    return finish(figure, name, "Fixed modes: speed-up", words)


def _markers(found: Screening) -> dict[str, str]:
    return {workload: MARKERS[place % len(MARKERS)] for place, workload in enumerate(found.workloads)}


def _swatches(found: Screening) -> list[Line2D]:
    colours = colours_of(found.modes)
    return [Line2D([], [], color=colours[mode], linewidth=5, label=mode) for mode in found.modes]


def _shapes(found: Screening) -> list[Line2D]:
    return [
        Line2D([], [], color="#555555", marker=marker, linestyle="none", label=workload)
        for workload, marker in _markers(found).items()
    ]


def _caption(found: Screening, points: list[Effect]) -> str:
    return f"n = {len(points)} points from {found.source}. {interval_words(points)}"


def interval_words(points: list[Effect]) -> str:
    """What the bars are, and how many rounds they rest on."""
    rounds = [effect.speedup.n for effect in points if effect.speedup.n is not None]
    if not rounds:
        return "One measurement each: no interval can be given."
    return f"Bars: 95 % bootstrap intervals over {_span(min(rounds), max(rounds))} interleaved rounds."


def _span(least: int, most: int) -> str:
    return str(least) if least == most else f"{least} to {most}"


def heat_maps(found: Screening, name: str) -> Iterator[Picture]:
    """Modes by workloads: the speed-up, and the energy ratio where it was measured."""
    yield _heat_map(found, f"{name}_speedup", "Latency speed-up", "times, above 1 is faster", lambda of: of.speedup)
    if any(effect.energy_ratio for effect in found.effects if effect.mode != found.reference):
        words = "J per output token, below 1 saves energy"
        yield _heat_map(found, f"{name}_energy", "Energy ratio", words, lambda of: of.energy_ratio)


def _heat_map(found: Screening, name: str, title: str, unit: str, pick: Pick) -> Picture:
    modes, workloads = found.modes, found.workloads
    figure, (panel,) = new_figure(1, 1, 1.9 + 0.52 * len(modes))
    cells = {(of.mode, of.workload): value for of in found.effects if (value := pick(of)) and of.mode in modes}
    widest = max([abs(math.log(cell.value)) for cell in cells.values() if cell.value > 0], default=0.1) or 0.1
    values = [
        [cells[mode, workload].value if (mode, workload) in cells else math.nan for workload in workloads]
        for mode in modes
    ]
    panel.set_facecolor(UNKNOWN)
    # Logarithmic about 1: twice as fast and half as fast are equally far from nothing won.
    good_is_high = name.endswith("speedup")
    image = panel.imshow(
        values,
        cmap="RdYlBu" if good_is_high else "RdYlBu_r",
        norm=LogNorm(math.exp(-widest), math.exp(widest)),
        aspect="auto",
    )
    _annotate(panel, cells, modes, workloads, widest)
    panel.set_xticks(range(len(workloads)), workloads, rotation=30, ha="right")
    panel.set_yticks(range(len(modes)), modes)
    bar = figure.colorbar(image, ax=panel, pad=0.01)
    bar.set_label(f"{title.lower()} to {found.reference}\n({unit})", fontsize=9)
    ticks = [tick for tick in (0.25, 0.33, 0.5, 0.67, 1, 1.5, 2, 3, 4) if abs(math.log(tick)) <= widest]
    bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks], minor=False)
    bar.minorticks_off()
    shown = [of for of in found.effects if of.mode in modes]
    missing = len(modes) * len(workloads) - len(cells)
    intervals = interval_words(shown).replace("Bars", "Brackets")
    words = f"{len(cells)} cells from {found.source}; {missing} were not measured (grey). {intervals}"
    return finish(figure, name, f"{title} against {found.reference}", words)


def _annotate(
    panel: Axes, cells: dict[tuple[str, str], Estimate], modes: list[str], workloads: list[str], widest: float
) -> None:
    for (mode, workload), cell in cells.items():
        text = f"{cell.value:.2f}"
        if cell.low is not None and cell.high is not None:
            text += f"\n[{cell.low:.2f}, {cell.high:.2f}]"
        dark = cell.value > 0 and abs(math.log(cell.value)) > 0.62 * widest
        panel.text(
            workloads.index(workload),
            modes.index(mode),
            text,
            ha="center",
            va="center",
            fontsize=8 if "\n" not in text else 7,
            color="white" if dark else "black",
        )
