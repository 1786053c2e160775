"""One look for all figures. matplotlib without its global state: a figure is made, drawn on and encoded."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from textwrap import fill
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

# Names come from files, and a dollar sign in one is no formula.
mpl.rcParams["text.parse_math"] = False

INCH_WIDE = 9.5
_DPI = 130
_CAPTION_CHARACTERS = 165
_GRID = "#d9d9d9"
UNKNOWN = "#bbbbbb"

# Neighbours differ in lightness too, so that they are told apart in grey.
_COLOURS = (
    "#4477aa",
    "#ee6677",
    "#228833",
    "#ccbb44",
    "#66ccee",
    "#aa3377",
    "#a6761d",
    "#1b3a5c",
    "#f4a582",
    "#7fbf7b",
    "#7b6fb0",
    "#444444",
)
_MODES = (
    # Their order in the paper, which gives each the same colour in every figure.
    "gptq",
    "int8",
    "speculative",
    "awq",
    "prefix_caching",
    "gptq_prefix_caching",
    "int8_continuous_batching",
    "fp16",
    "chunked_prefill",
    "continuous_batching",
    "cuda_graphs",
    "kv_cache_compression",
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p", "<", ">", "h", "d")


@dataclass(frozen=True, slots=True)
class Picture:
    """A finished figure. `caption` names units, n and what the bars are."""

    name: str
    title: str
    caption: str
    png: bytes


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """Known modes have their own colour; other names take those that are left, in order."""
    wanted = list(dict.fromkeys(names))
    known = {name: _COLOURS[_MODES.index(name)] for name in wanted if name in _MODES}
    free = [colour for colour in _COLOURS if colour not in known.values()] or list(_COLOURS)
    others = [name for name in wanted if name not in known]
    return {name: known.get(name) or free[others.index(name) % len(free)] for name in wanted}


def new_figure(rows: int, columns: int, inch_high: float, **more: Any) -> tuple[Figure, list[Axes]]:
    """A figure of the page's width and its panels, row by row."""
    figure = Figure(figsize=(INCH_WIDE, inch_high), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, **more)
    axes = [panel for line in panels for panel in line]
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=9)
        panel.set_axisbelow(True)
    return figure, axes


def grid(panel: Axes, axis: Literal["both", "x", "y"] = "both") -> None:
    panel.grid(visible=True, axis=axis, color=_GRID, linewidth=0.6)


def one(panel: Axes, axis: str) -> None:
    """The line where nothing is won: a ratio of 1."""
    draw = panel.axvline if axis == "x" else panel.axhline
    draw(1.0, color="#555555", linewidth=1.0, linestyle="--", zorder=1)


def beside(figure: Figure, handles: Sequence[object], title: str, *, where: str = "upper") -> None:
    """A legend to the right of all panels, where it hides no data."""
    words = {"title": title, "fontsize": 8, "title_fontsize": 8.5, "alignment": "left", "frameon": False}
    figure.legend(handles=handles, loc=f"outside right {where}", **words)


def logarithmic(panel: Axes, low: float, high: float) -> None:
    """A logarithmic x axis with plain numbers: powers would need the formulas that are switched off."""
    decades = math.log10(high / low)
    steps: tuple[float, ...] = (1.0,) if decades > 2.5 else (1.0, 3.0) if decades > 1.5 else (1.0, 2.0, 5.0)
    if decades < 0.7:
        steps = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
    panel.set_xscale("log")
    panel.set_xlim(low, high)
    panel.xaxis.set_major_locator(LogLocator(subs=steps, numticks=12))
    panel.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    panel.xaxis.set_minor_locator(NullLocator())


def finish(figure: Figure, name: str, title: str, caption: str) -> Picture:
    """Encodes it, with its title and caption inside: a PNG may be shown alone."""
    figure.suptitle(title, fontsize=11, fontweight="bold", x=0.01, ha="left")
    figure.supxlabel(fill(caption, _CAPTION_CHARACTERS), fontsize=8, color="#555555", x=0.01, ha="left")
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    return Picture(name, title, caption, buffer.getvalue())
