"""Figures of a comparison, as matplotlib `Figure`s that need no display and leave pyplot's state alone."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from attnbalance.errors import DataError
from attnbalance.readings.compare import Comparison
from attnbalance.readings.curves import Curve, head_map
from attnbalance.readings.explanation import Explanation
from attnbalance.readings.intervals import Interval
from attnbalance.readings.reading import Reading, difference
from attnbalance.readings.recall import Recall

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#882255", "#000000")
"""Okabe and Ito's colours, with wine for their yellow, which is too light for lines on white."""
MARKERS = "osD^vPX*"
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


def draw_curves(comparison: Comparison) -> Figure:
    """Subject attention by layer, a line with its 95% band for each label (Ghosal et al. 2024, Figure 3a).

    A band says how sure one model's mean is; whether two models differ is what `draw_difference` shows.
    """
    with axes_of(1) as (figure, [ax]):
        for i, (label, curve) in enumerate(comparison.curves().items()):
            colour, marker = look(i)
            ax.fill_between(curve.layers, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0)
            ax.plot(curve.layers, curve.mean, color=colour, marker=_marker(marker, curve), markersize=5, label=label)
        reading = comparison.measured[0].attention
        _layer_axis(ax, [one.attention.layers for one in comparison.measured])
        ax.set(ylabel=f"{reading.name}\n({reading.unit}, mean over heads)", ylim=(0, None))
        legend(figure, ax.lines)
    return figure


def draw_difference(comparison: Comparison) -> Figure:
    """The pair's difference in subject attention by layer, with intervals that hold for all layers together.

    Layers whose interval excludes zero are filled. Raises `DataError` without a pair, or where the two models differ
    in depth or heads.
    """
    if comparison.pair is None:
        raise DataError("a difference needs a pair of labels; this comparison has none")
    a, b = comparison.pair
    curve = comparison.attention_difference(a, b)
    x, mean, low, high = (np.asarray(part, dtype=float) for part in (curve.layers, curve.mean, curve.low, curve.high))
    sure = (low > 0) | (high < 0)
    with axes_of(1) as (figure, [ax]):
        ax.axhline(0, color="#555555", linewidth=1)
        ax.vlines(x, low, high, color="#444444", linewidth=1.6)
        told = [
            *ax.plot(x[sure], mean[sure], "o", color="#444444", label="differs: interval excludes zero"),
            *ax.plot(x[~sure], mean[~sure], "o", color="#444444", markerfacecolor="white", label="not told apart"),
        ]
        ax.set_ylabel(f"difference in subject attention\n({curve.unit})")
        ax.margins(y=0.15)
        above, below = (f"{name} attends more" for name in (_short(a), _short(b)))
        for text, y, side in ((f"↑ {above}", 0.99, "top"), (f"↓ {below}", 0.01, "bottom")):
            ax.text(0.01, y, text, transform=ax.transAxes, va=side, color="#555555", fontsize=9)
        _layer_axis(ax, [curve.layers])
        legend(figure, told)
    return figure


def draw_accuracy(comparison: Comparison) -> Figure:
    """Accuracy with 95% intervals: in each fifth by popularity, and on the top x% (Ghosal et al. 2024, Figure 4).

    Without known popularity it shows the accuracy over all questions. Raises `DataError` where no recall was measured.
    """
    known = [(i, one.label, one.recall) for i, one in enumerate(comparison.measured) if one.recall is not None]
    if not known:
        raise DataError("accuracy cannot be drawn: recall was not measured for any model")
    seed, popular = comparison.seed, bool(known[0][2].quintiles())
    with axes_of(2 if popular else 1) as (figure, axes):
        for place, (i, label, recall) in enumerate(known):
            shift = 0.5 * ((place + 0.5) / len(known) - 0.5)
            found = [f for _, f in recall.by_quintile(seed)] if popular else [recall.accuracy(seed)]
            _points(axes[0], np.arange(len(found)) + shift, found, i, label)
            if popular:
                percents, tops = zip(*recall.by_top_percentile(seed), strict=True)
                _points(axes[1], np.array(percents) + 3 * shift, tops, i, label, line="-")
        axes[0].set(ylabel="share of questions answered right (%)", xlabel="fifth of the questions, by popularity")
        axes[0].set_xticks(*_fifths(known[0][2]))
        if popular:
            axes[1].set(xlabel="the x% most popular questions", xticks=range(20, 101, 20))
        for ax in axes:
            ax.set_ylim(-2, 102)
            ax.grid(axis="x", visible=False)
        legend(figure, axes[0].containers)
    return figure


def draw_head_map(a: Reading, b: Reading | None = None, *, title: str) -> Figure:
    """The mean of a reading over prompts in each layer and head; with `b`, that of a - b, coloured around zero.

    In a difference, blue is where a is higher and orange where b is.
    Raises `DataError` where the two do not hold the same prompts, layers and number of heads.
    """
    reading = a if b is None else difference(a, b)
    values = head_map(reading).numpy()
    top = float(np.abs(values).max()) or 1.0
    colours = _colours(COLOURS[0]) if b is None else _colours(COLOURS[1], "#ffffff", COLOURS[0])
    n_layers, n_heads = values.shape
    with axes_of(1, height=1.6 + min(5.5, max(1.2, 0.22 * n_layers))) as (figure, [ax]):
        image = ax.imshow(values, aspect="auto", origin="lower", interpolation="nearest", cmap=colours)
        image.set_clim(0.0 if b is None else -top, top)
        steps = [range(0, n, -(-n // 16)) for n in (n_heads, n_layers)]
        ax.set_xticks(steps[0], [str(i) for i in steps[0]])
        ax.set_yticks(steps[1], [str(reading.layers[i]) for i in steps[1]])
        ax.set(xlabel="head", ylabel="layer", title=title)
        ax.grid(visible=False)
        figure.colorbar(image, ax=ax, label=reading.unit if b is None else f"difference ({reading.unit})", pad=0.02)
    return figure


def draw_layers(panels: Mapping[str, Mapping[str, Curve]]) -> Figure:
    """One panel for each reading: a line with its band along layers for each label."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    with rc_context(STYLE):
        figure = Figure(figsize=(8, 2.4 * rows + 0.6), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False)
        for ax, (name, curves) in zip(axes.flat, panels.items(), strict=False):
            for i, (label, curve) in enumerate(curves.items()):
                colour, marker = look(i)
                ax.fill_between(curve.layers, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0)
                ax.plot(
                    curve.layers, curve.mean, color=colour, marker=_marker(marker, curve), markersize=4, label=label
                )
            ax.axhline(0, color="#555555", linewidth=0.8)
            _layer_axis(ax, [curve.layers for curve in curves.values()])
            ax.set_title(name, fontsize=10)
            ax.set_ylabel(next(iter(curves.values())).unit, fontsize=8)
        for ax in axes.flat[len(panels) :]:
            ax.set_visible(False)
        labels = list(next(iter(panels.values())))
        legend(figure, axes.flat[0].lines[: len(labels)])
    return figure


def draw_causes(explanation: Explanation) -> Figure:
    """The change of the lead by cause, with 95% intervals, for all questions and each fifth, those lost and gained."""
    groups = list(explanation.splits.items())
    causes = (
        ("attention", "attention (W_Q, W_K)"),
        ("storage", "storage (W_V, W_O, MLPs)"),
        ("rest", "embeddings, norms"),
    )
    with axes_of(1) as (figure, [ax]):
        ax.axhline(0, color="#555555", linewidth=1)
        for place, (cause, label) in enumerate(causes):
            found = [split.causes[cause] for _, split in groups]
            _bars(ax, np.arange(len(groups)) + 0.26 * (place - 1), found, COLOURS[place], label)
        ax.set_xticks(range(len(groups)), [name.replace(" ", "\n") for name, _ in groups])
        ax.set(ylabel="mean change of the lead (nats)", xlabel="questions; fifth 1 is the most popular")
        ax.grid(axis="x", visible=False)
        legend(figure, ax.containers[1::2])
    return figure


def draw_steering(explanation: Explanation) -> Figure:
    """Accuracy of both models as attention to the subject, or to as many other tokens, is multiplied."""
    with axes_of(2) as (figure, axes):
        for ax, label in zip(axes, explanation.labels, strict=True):
            plain = explanation.recall(label).accuracy(explanation.comparison.seed)
            for kind, place, name in (("boost", 0, "attention to the subject"), ("control", 1, "to other tokens")):
                found = {1.0: plain}
                for one in explanation.checks[label]:
                    if one.kind == kind and one.alpha:
                        found[one.alpha] = one.recall.accuracy(explanation.comparison.seed)
                alphas = sorted(found)
                x = np.log2(alphas)
                shift = 0.12 * (place - 0.5)
                _points(ax, x + shift, [found[alpha] for alpha in alphas], place, name, line="-")
                ax.set_xticks(x, [f"{alpha:g}" for alpha in alphas])
            ax.set(title=_short(label), xlabel="factor on attention", ylim=(0, None))
        axes[0].set_ylabel("share of questions answered right (%)")
        legend(figure, axes[0].containers)
    return figure


def draw_extraction(panels: Mapping[str, Mapping[str, Mapping[str, Interval]]]) -> Figure:
    """The extraction ratio with its interval: a panel for each world, a line for each method, a colour for each split.

    `panels` holds intervals by world, method and split.
    """
    longest = max(map(len, panels.values()))
    with axes_of(len(panels), height=1.4 + 0.34 * longest) as (figure, axes):
        for ax, (world, methods) in zip(axes, panels.items(), strict=True):
            splits = list(dict.fromkeys(split for found in methods.values() for split in found))
            for place, split in enumerate(splits):
                rows = [(y, found[split]) for y, found in enumerate(methods.values()) if split in found]
                colour, marker = look(place)
                y = [at + 0.24 * (place - (len(splits) - 1) / 2) for at, _ in rows]
                mean, low, high = (np.array([getattr(one, end) for _, one in rows]) for end in ("mean", "low", "high"))
                bars = np.nan_to_num(np.abs(np.stack([mean - low, high - mean])))
                ax.errorbar(mean, y, xerr=bars, color=colour, marker=marker, linestyle="none", capsize=2, label=split)
            ax.axvline(1, color="#555555", linewidth=1)
            ax.set(title=world, xlabel="extraction ratio", ylim=(len(methods) - 0.5, -0.5))
            ax.set_yticks(range(len(methods)), [_short(name) for name in methods])
            ax.grid(axis="y", visible=False)
        legend(figure, axes[0].containers)
    return figure


def save(figure: Figure, target: Any, **options: Any) -> None:
    """`figure.savefig` without a warning for each letter that matplotlib's font lacks, such as Chinese in a label.

    In an SVG such letters stand as text, for the browser's fonts; in a PNG they are boxes.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .*missing from")
        figure.savefig(target, **options)


@contextmanager
def axes_of(
    count: int, height: float = 3.6, *, rows: int = 1, share: bool = True
) -> Iterator[tuple[Figure, Sequence[Axes]]]:
    """A figure with axes side by side (that `share` their y axis), drawn in this package's style, maybe in `rows`."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(8, height), layout="constrained")
        yield figure, list(figure.subplots(rows, count, squeeze=False, sharey=share and count > 1).flat)


def look(place: int) -> tuple[str, str]:
    """The colour and marker of the label at a place, the same in all figures."""
    return COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]


def _marker(marker: str, curve: Curve) -> str | None:
    """Markers for few layers only: a single layer needs them, eighty would hide the line."""
    return marker if len(curve.layers) <= 24 else None


def _layer_axis(ax: Axes, layers: Sequence[Sequence[int]]) -> None:
    from matplotlib.ticker import MaxNLocator

    first, last = min(map(min, layers)), max(map(max, layers))
    ax.set(xlabel="layer", xlim=(first - 0.5, last + 0.5))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))


def _points(ax: Axes, x: np.ndarray, found: Sequence[Interval], place: int, label: str, line: str = "") -> None:
    """Accuracies in percent with their intervals; a point without an interval has no bar."""
    mean, low, high = (100 * np.array([getattr(f, name) for f in found]) for name in ("mean", "low", "high"))
    bars = np.nan_to_num(np.abs(np.stack([mean - low, high - mean])))
    colour, marker = look(place)
    ax.errorbar(
        x,
        mean,
        bars,
        color=colour,
        marker=marker,
        linestyle=line or "none",
        capsize=2,
        markersize=5,
        elinewidth=1.2,
        label=label,
    )


def _bars(ax: Axes, x: np.ndarray, found: Sequence[Interval], colour: str, label: str) -> None:
    """Bars with their intervals."""
    mean, low, high = (np.array([getattr(one, name) for one in found]) for name in ("mean", "low", "high"))
    whiskers = np.nan_to_num(np.abs(np.stack([mean - low, high - mean])))
    ax.bar(x, mean, 0.24, yerr=whiskers, color=colour, label=label, error_kw={"elinewidth": 1, "ecolor": "#333333"})


def _fifths(recall: Recall) -> tuple[Sequence[int], list[str]]:
    parts = len(recall.quintiles())
    names = ["most\npopular", *(str(i + 1) for i in range(1, parts - 1)), "least\npopular"][:parts]
    return range(max(1, parts)), names or ["all questions"]


def _colours(*ends: str) -> Colormap:
    """Shades from the first colour to the last; from white, where only one is given."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("shades", ends if len(ends) > 1 else ("#ffffff", *ends))


def _short(label: str) -> str:
    return label if len(label) <= 32 else f"{label[:14]}…{label[-17:]}"


def legend(figure: Figure, handles: Sequence[Any]) -> None:
    """One legend above the axes, as wide as its labels allow; by handles, since labels in "_" are skipped otherwise."""
    labels = [_short(str(handle.get_label())) for handle in handles]
    columns = max(1, min(len(labels), 90 // (6 + max(map(len, labels)))))
    rows = -(-len(labels) // columns)
    figure.legend(handles, labels, loc="outside upper center", ncols=-(-len(labels) // rows))
