"""The kit for figures: style, axes, lines, points, bars and legends, as matplotlib `Figure`s that need no display."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from attnbalance.arguments import expects
from attnbalance.errors import DataError
from attnbalance.readings.curves import Curve, head_map
from attnbalance.readings.reading import Reading, difference
from attnbalance.statistics.intervals import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#882255", "#000000")
"""Okabe and Ito's colours, with wine for their yellow, which is too light for lines on white."""
MARKERS = "osD^vPX*"
MOST_MARKED = 24
"""Lines with more layers than this have no markers, which would hide the line."""
STYLE: dict[Any, object] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
    "text.parse_math": False,  # labels may hold dollar signs
}


@contextmanager
def make_axes(
    columns: int, height: float = 3.6, *, rows: int = 1, share: bool = True
) -> Iterator[tuple[Figure, Sequence[Axes]]]:
    """A figure with `rows` x `columns` axes in this package's style; with `share` they have one y axis.

    pyplot's state is left alone.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(8, height), layout="constrained")
        yield figure, list(figure.subplots(rows, columns, squeeze=False, sharey=share and columns > 1).flat)


def label_style(index: int) -> tuple[str, str]:
    """The colour and marker of the label at an index, the same in all figures.

    >>> label_style(0)
    ('#0072b2', 'o')
    """
    cycle, colour = divmod(index, len(COLOURS))
    return COLOURS[colour], MARKERS[(colour + cycle) % len(MARKERS)]


def short_label(label: str) -> str:
    """A label of at most 32 characters: a longer one loses its middle.

    >>> short_label("finetuned on the popular half of all subjects")
    'finetuned on t…f of all subjects'
    """
    return label if len(label) <= 32 else f"{label[:14]}…{label[-17:]}"


def whiskers(intervals: Sequence[Interval], scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Means, and the lengths of their whiskers down and up; a mean without an interval has whiskers of length 0."""
    mean, low, high = (scale * np.array([getattr(x, end) for x in intervals]) for end in ("mean", "low", "high"))
    return mean, np.nan_to_num(np.abs(np.stack([mean - low, high - mean])))


def draw_curve(ax: Axes, curve: Curve, index: int, label: str) -> Line2D:
    """A curve along layers as a line with its 95% band, in the style of the label at `index`; returns the line."""
    colour, marker = label_style(index)
    ax.fill_between(curve.layers, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0)
    shown = marker if len(curve.layers) <= MOST_MARKED else None
    [line] = ax.plot(curve.layers, curve.mean, color=colour, marker=shown, markersize=5, label=label)
    return line


def draw_points(
    ax: Axes, x: np.ndarray, shares: Sequence[Interval], index: int, label: str, line: str = "none"
) -> None:
    """Shares in percent with their intervals.

    Args:
        ax: The axes to draw on.
        x: The x coordinate of each share.
        shares: The shares, from 0 to 1.
        index: The label's index among all labels of the figure, which decides colour and marker.
        label: The points' name in the legend.
        line: The matplotlib style of the line that joins the points.
    """
    mean, bars = whiskers(shares, 100)
    colour, marker = label_style(index)
    style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 5, "linestyle": line}
    ax.errorbar(x, mean, bars, capsize=2, elinewidth=1.2, label=label, **style)


def draw_bars(ax: Axes, x: np.ndarray, values: Sequence[Interval], index: int, label: str) -> None:
    """Bars with their intervals.

    Args:
        ax: The axes to draw on.
        x: The centre of each bar.
        values: The height of each bar.
        index: The label's index among all labels of the figure, which decides the colour.
        label: The bars' name in the legend.
    """
    mean, bars = whiskers(values)
    ends = {"elinewidth": 1, "ecolor": "#333333"}
    ax.bar(x, mean, 0.24, yerr=bars, color=COLOURS[index], label=label, error_kw=ends)


def layer_axis(ax: Axes, layers: Sequence[Sequence[int]]) -> None:
    """An x axis of whole layer numbers that holds the layers of all lines."""
    from matplotlib.ticker import MaxNLocator

    first, last = min(map(min, layers)), max(map(max, layers))
    ax.set(xlabel="layer", xlim=(first - 0.5, last + 0.5))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))


def legend(figure: Figure, handles: Sequence[Any]) -> None:
    """One legend above the axes, as wide as its labels allow; by handles, since labels in "_" are skipped otherwise."""
    labels = [short_label(str(handle.get_label())) for handle in handles]
    columns = max(1, min(len(labels), 90 // (6 + max(map(len, labels)))))
    rows = -(-len(labels) // columns)
    figure.legend(handles, labels, loc="outside upper center", ncols=-(-len(labels) // rows))


def save(figure: Figure, target: Any, **options: Any) -> None:
    """`figure.savefig` without a warning for each letter that matplotlib's font lacks, such as Chinese in a label.

    In an SVG such letters are text, for the browser's fonts; in a PNG they are boxes.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .*missing from")
        figure.savefig(target, **options)


@expects(curves={str: (Curve, [Curve])})
def draw_curves(curves: Mapping[str, Curve | Sequence[Curve]]) -> Figure:
    """Curves by layer, for each label a line with its 95% band (Ghosal et al. 2024, Figure 3a).

    `curves` gives each label's curve, or several: each name among them gets a panel of its own. A band says how sure
    one curve's mean is; see `difference` for whether two curves differ. Raises `DataError` without curves, and for two
    curves of one label with the same name.
    """
    panels: dict[str, dict[str, Curve]] = {}
    for label, drawn in curves.items():
        for curve in [drawn] if isinstance(drawn, Curve) else drawn:
            if label in panels.setdefault(curve.name, {}):
                raise DataError(f"{label} has two curves named {curve.name!r}; give each a name of its own")
            panels[curve.name][label] = curve
    if not panels:
        raise DataError("expected at least one curve to draw, got none")
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    handles: dict[str, Any] = {}
    with make_axes(columns, 3.6 if rows == 1 else 2.4 * rows + 0.6, rows=rows, share=False) as (figure, axes):
        for ax, (name, lines) in zip(axes, panels.items(), strict=False):
            for index, label in enumerate(curves):
                if label in lines:
                    handles.setdefault(label, draw_curve(ax, lines[label], index, label))
            layer_axis(ax, [curve.layers for curve in lines.values()])
            _show_zero(ax, list(lines.values()))
            ax.set_title(name, fontsize=10)
            ax.set_ylabel(next(iter(lines.values())).unit, fontsize=9)
        for ax in axes[len(panels) :]:
            ax.set_visible(False)
        legend(figure, [handles[label] for label in curves if label in handles])
    return figure


def _show_zero(ax: Axes, curves: Sequence[Curve]) -> None:
    """Begin the y axis at zero where nothing that is drawn is negative, and draw a line at zero where something is."""
    drawn = np.concatenate([[*curve.mean, *curve.low] for curve in curves])
    if np.nanmin(drawn) >= 0:
        ax.set_ylim(bottom=0)
    else:
        ax.axhline(0, color="#555555", linewidth=0.8)


@expects(a=Reading, b=(Reading, NoneType))
def draw_head_map(a: Reading, b: Reading | None = None, *, title: str) -> Figure:
    """The mean of a reading over prompts in each layer and head; with `b`, that of a - b.

    Where something is negative, and in a difference, colours are around zero: blue is positive (a is higher), orange
    negative.
    Raises `DataError` where the two do not hold the same prompts, layers and number of heads.
    """
    reading = a if b is None else difference(a, b)
    values = head_map(reading).numpy()
    heads = [str(head) for head in range(values.shape[1])]
    label = reading.unit if b is None else f"difference ({reading.unit})"
    figure = draw_layers(values, reading.layers, heads, "head", label, signed=b is not None)
    figure.axes[0].set_title(title)
    return figure


def draw_layers(
    values: Float[np.ndarray, "layer column"],
    layers: Sequence[int],
    columns: Sequence[str],
    axis: str,
    label: str,
    *,
    signed: bool = False,
) -> Figure:
    """Numbers by layer (rows, from below) and something else (columns), as shades with a bar.

    From white at zero to blue at the largest value; where something is negative, or with `signed`, from orange to blue
    around zero.

    values: the numbers.
    layers: the layers' numbers.
    columns: the columns' names, of which at most 16 are shown.
    axis: what the columns are.
    label: what the numbers are, with their unit.
    """
    top = float(np.abs(values).max()) or 1.0
    signed = signed or float(values.min()) < 0
    colours = shades(COLOURS[1], "#ffffff", COLOURS[0]) if signed else shades(COLOURS[0])
    n_layers, n_columns = values.shape
    with make_axes(1, height=1.6 + min(5.5, max(1.2, 0.22 * n_layers))) as (figure, [ax]):
        image = ax.imshow(values, aspect="auto", origin="lower", interpolation="nearest", cmap=colours)
        image.set_clim(-top if signed else 0.0, top)
        across, up = (range(0, n, -(-n // 16)) for n in (n_columns, n_layers))
        ax.set_xticks(across, [columns[i] for i in across])
        ax.set_yticks(up, [str(layers[i]) for i in up])
        ax.set(xlabel=axis, ylabel="layer")
        ax.grid(visible=False)
        figure.colorbar(image, ax=ax, label=label, pad=0.02)
    return figure


def shades(*ends: str) -> Colormap:
    """Shades from the first colour to the last; from white, where only one is given."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("shades", ends if len(ends) > 1 else ("#ffffff", *ends))
