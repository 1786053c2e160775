"""Policies: what one won by kind of request, which modes it chose, how they compare, what a trained one confuses."""

from collections import Counter
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from loadgen.report.drawing import UNKNOWN, Picture, beside, colours_of, finish, grid, logarithmic, new_figure, one
from loadgen.report.material import Comparison, Confusion, Controlled, Estimate, PolicyRow

_BAR = "#4477aa"
_INCH_A_BAR = 0.34
_BEHIND_TEXT = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.8}
Values = Sequence[Estimate | None]


def by_family(found: Controlled, name: str) -> Picture:
    """Speed-up and energy ratio of one policy, family by family."""
    names = [family.name for family in found.families]
    figure, panels = new_figure(1, 2, 2.0 + _INCH_A_BAR * len(names), sharey=True)
    speedups, energies = ([getattr(of, which) for of in found.families] for which in ("speedup", "energy_ratio"))
    _bars(panels[0], names, speedups, f"speed-up against {found.reference} (times)")
    _bars(panels[1], names, energies, f"energy ratio to {found.reference}")
    words = f"{found.policy}, {found.setting}, from {found.source}. {_rests_on([*speedups, *energies])}"
    return finish(figure, name, f"The policy '{found.policy}' by kind of request, {found.setting}", words)


def _bars(panel: Axes, names: Sequence[str], values: Values, label: str) -> None:
    """Horizontal bars from the top down, each with its figure; what was not measured is said in its place."""
    known = [value for value in values if value is not None]
    most = max([value.value + value.errors[1] for value in known], default=1.0)
    for place, value in enumerate(values):
        if value is None:
            panel.text(0.02 * most, place, "unknown", va="center", fontsize=8, color="#777777")
            continue
        ends = [[end] for end in value.errors]
        has_interval = value.low is not None
        panel.barh(place, value.value, color=_BAR, height=0.7, xerr=ends if has_interval else None, capsize=2)
        at = value.value + value.errors[1] + 0.02 * most
        panel.text(at, place, f"{value.value:.2f}", va="center", fontsize=8, bbox=_BEHIND_TEXT)
    panel.set_yticks(range(len(names)), names)
    panel.set_ylim(len(names) - 0.4, -0.6)
    panel.set_xlim(0, 1.15 * max(most, 1.0))
    panel.set_xlabel(label, fontsize=9)
    one(panel, "x")
    grid(panel, "x")


def _rests_on(values: Values, resampled: str = "paired requests") -> str:
    """What the figures' intervals are of; where there are none, whether there could be some."""
    known = [value for value in values if value is not None]
    counts = [value.n for value in known if value.n is not None and value.low is not None]
    if counts:
        span = str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"
        return f"Bars: 95 % bootstrap intervals over n = {span} {resampled} each."
    if known and all(value.n == 1 for value in known):
        return "One measurement each: no interval can be given."
    return "Without intervals: the results have none."


def routing(found: Controlled, name: str) -> Picture:
    """(a) the share of each mode by family; (b) one vote a family, for the mode it got most often."""
    families = [family for family in found.families if family.choices]
    modes = list(dict.fromkeys(mode for family in families for mode in sorted(family.choices)))
    colours = colours_of(modes)
    figure, (shares, votes) = new_figure(1, 2, 2.1 + _INCH_A_BAR * max(len(families), len(modes)), width_ratios=(3, 2))
    for place, family in enumerate(families):
        total, left = sum(family.choices.values()), 0.0
        for mode in modes:
            width = 100 * family.choices.get(mode, 0) / total
            shares.barh(place, width, left=left, color=colours[mode], height=0.7)
            left += width
        shares.text(101, place, f"n={total}", va="center", fontsize=8)
    shares.set_yticks(range(len(families)), [family.name for family in families])
    shares.set_ylim(len(families) - 0.4, -0.6)
    shares.set_xlim(0, 115)
    shares.set_xticks(range(0, 101, 25))
    shares.set_xlabel("(a) share of the requests (%)", fontsize=9)
    counted = Counter(max(sorted(of.choices), key=of.choices.__getitem__) for of in families)
    for place, mode in enumerate(modes):
        votes.barh(place, counted[mode], color=colours[mode], height=0.7)
        votes.text(counted[mode] + 0.05, place, str(counted[mode]), va="center", fontsize=8)
    votes.set_yticks(range(len(modes)), modes)
    votes.set_ylim(len(modes) - 0.4, -0.6)
    votes.set_xlim(0, 1.12 * max(counted.values(), default=1))
    votes.xaxis.set_major_locator(MaxNLocator(integer=True))
    votes.set_xlabel("(b) one vote per kind of request (kinds)", fontsize=9)
    beside(figure, [Patch(color=colours[mode], label=mode) for mode in modes], "mode")
    words = (
        f"{found.policy}, {found.setting}, from {found.source}: {len(families)} kinds of requests; counts, no interval."
    )
    return finish(figure, name, f"Modes that the policy '{found.policy}' chose, {found.setting}", words)


_PANELS: tuple[tuple[str, Callable[[PolicyRow], Estimate | None]], ...] = (
    ("(a) speed-up against {reference} (times)", lambda row: row.speedup),
    ("(b) energy ratio to {reference}", lambda row: row.energy_ratio),
    ("(c) share of the oracle's speed", lambda row: _plain(row.oracle_share)),
    ("(d) time of one decision (ms)", lambda row: _plain(row.overhead_ms)),
)


def _plain(value: float | None) -> Estimate | None:
    return None if value is None else Estimate(value)


def comparison(found: Comparison, name: str) -> Picture:
    """Policies side by side; a panel that nobody has a figure for is left out."""
    panels = [(label, [pick(row) for row in found.rows]) for label, pick in _PANELS]
    shown = [(label, values) for label, values in panels if any(value is not None for value in values)]
    left_out = [label.format(reference=found.reference) for label, values in panels if not any(values)]
    lines = (len(shown) + 1) // 2
    figure, axes = new_figure(
        max(1, lines), 2, 1.3 + max(1, lines) * (0.9 + _INCH_A_BAR * len(found.rows)), sharey=True
    )
    names = [row.name for row in found.rows]
    for panel, (label, values) in zip(axes, shown, strict=False):
        _bars(panel, names, values, label.format(reference=found.reference))
        if "decision" in label:
            _logarithmic(panel, values)
    for panel in axes[len(shown) :]:
        panel.remove()
    count = found.rows[0].requests if found.rows else 0
    ratios = [value for row in found.rows for value in (row.speedup, row.energy_ratio)]
    rests_on = _rests_on(ratios, found.resampled)
    words = f"{found.setting}, from {found.source}, {count} requests to each policy. {rests_on}"
    if left_out:
        words += f" Not measured: {'; '.join(left_out)}."
    return finish(figure, name, f"Policies compared, {found.setting}", words)


def _logarithmic(panel: Axes, values: Values) -> None:
    known = [value.value for value in values if value is not None and value.value > 0]
    if not known:
        return
    left = min(known) / 3
    logarithmic(panel, left, max(known) * 8)
    for line in list(panel.lines):
        line.remove()
    for text in list(panel.texts):
        place = round(text.get_position()[1])
        value = values[place]
        if value is None:
            text.set_x(1.1 * left)
        else:
            text.set_position((value.value * 1.15, place))
            text.set_text(f"{value.value:.2g}")


def confusions(found: Sequence[Confusion], name: str) -> Picture:
    """One matrix a trained model: colour is the share of the row, the figure is the count."""
    figure, panels = new_figure((len(found) + 1) // 2, 2, 0.5 + 4.4 * ((len(found) + 1) // 2))
    for panel, one_found in zip(panels, found, strict=False):
        _confusion(panel, one_found)
    for panel in panels[len(found) :]:
        panel.remove()
    words = f"Rows: the mode that was best. Colour: share of the row; figures: requests. From {found[0].source}."
    return finish(figure, name, "What the trained routers confuse", words)


def _confusion(panel: Axes, found: Confusion) -> None:
    matrix, labels = found.matrix, found.labels
    shares = [[value / (sum(row) or 1.0) for value in row] for row in matrix]
    panel.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for line, row in enumerate(matrix):
        for column, value in enumerate(row):
            dark = shares[line][column] > 0.55
            panel.text(
                column, line, f"{value:g}", ha="center", va="center", fontsize=8, color="white" if dark else "black"
            )
    total = sum(map(sum, matrix))
    right = sum(row[place] for place, row in enumerate(matrix))
    share = f"{100 * right / total:.0f} % right" if total else "no requests"
    panel.set_title(f"{found.name}: {share}, n = {total:g}", fontsize=10)
    panel.set_xticks(range(len(labels)), labels, rotation=35, ha="right", fontsize=8)
    panel.set_yticks(range(len(labels)), labels, fontsize=8)
    panel.set_xlabel("mode predicted", fontsize=9)
    panel.set_ylabel("best mode", fontsize=9)
    panel.spines[:].set_color(UNKNOWN)
