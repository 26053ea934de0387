"""The figures of a comparison other than its curves: the pair's difference, and accuracy by popularity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from attnbalance.comparison.comparison import Comparison
from attnbalance.comparison.known_readings import reading_words
from attnbalance.errors import DataError
from attnbalance.readings.recall import Recall
from attnbalance.report.figures import draw_points, layer_axis, legend, make_axes, short_label

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_difference(comparison: Comparison, title: str | None = None) -> Figure:
    """The pair's difference in a reading by layer, with intervals that hold for all layers together.

    `title` names the reading, by default the first. Layers whose interval excludes zero are filled. Raises `DataError`
    without a pair, and for a pair with different layers or heads.
    """
    if comparison.pair is None:
        raise DataError("a difference needs a pair of labels; this comparison has none")
    a, b = comparison.pair
    title = title or comparison.titles[0]
    curve, verb = comparison.difference(a, b, title), reading_words(title)[0]
    x, mean, low, high = (np.asarray(part, dtype=float) for part in (curve.layers, curve.mean, curve.low, curve.high))
    sure = (low > 0) | (high < 0)
    with make_axes(1) as (figure, [ax]):
        ax.axhline(0, color="#555555", linewidth=1)
        ax.vlines(x, low, high, color="#444444", linewidth=1.6)
        handles = [
            *ax.plot(x[sure], mean[sure], "o", color="#444444", label="differs: interval excludes zero"),
            *ax.plot(x[~sure], mean[~sure], "o", color="#444444", markerfacecolor="white", label="interval holds zero"),
        ]
        ax.set_ylabel(f"difference in {title}\n({curve.unit})")
        ax.margins(y=0.15)
        sides = (f"↑ {short_label(a)} {verb} more", 0.99, "top"), (f"↓ {short_label(b)} {verb} more", 0.01, "bottom")
        for text, y, side in sides:
            ax.text(0.01, y, text, transform=ax.transAxes, va=side, color="#555555", fontsize=9)
        layer_axis(ax, [curve.layers])
        legend(figure, handles)
    return figure


def draw_accuracy(comparison: Comparison) -> Figure:
    """Accuracy with 95% intervals: in each fifth by popularity, and on the top x% (Ghosal et al. 2024, Figure 4).

    Without known popularity it shows the accuracy over all questions. Raises `DataError` where no recall was measured.
    """
    known = [(i, measured.label, measured.recall) for i, measured in enumerate(comparison.measured) if measured.recall]
    if not known:
        raise DataError("accuracy cannot be drawn: recall was not measured for any model")
    popular = bool(known[0][2].quintiles())
    with make_axes(2 if popular else 1) as (figure, axes):
        for order, (index, label, recall) in enumerate(known):
            shift = 0.5 * ((order + 0.5) / len(known) - 0.5)
            rates = [rate for _, rate in recall.by_quintile()] if popular else [recall.accuracy()]
            draw_points(axes[0], np.arange(len(rates)) + shift, rates, index, label)
            if popular:
                percents, tops = zip(*recall.by_top_percentile(), strict=True)
                draw_points(axes[1], np.array(percents) + 3 * shift, tops, index, label, line="-")
        axes[0].set(
            ylabel="share of questions answered right (%)", xlabel="fifth of the questions, by popularity" * popular
        )
        axes[0].set_xticks(*_fifths(known[0][2]))
        if popular:
            axes[1].set(xlabel="the x% most popular questions", xticks=range(20, 101, 20))
        else:
            axes[0].set_xlim(-1, 1)
        for ax in axes:
            ax.set_ylim(-2, 102)
            ax.grid(axis="x", visible=False)
        legend(figure, axes[0].containers)
    return figure


def _fifths(recall: Recall) -> tuple[Sequence[int], list[str]]:
    """Ticks for the fifths by popularity, and their names."""
    parts = len(recall.quintiles())
    names = ["most\npopular", *(str(i + 1) for i in range(1, parts - 1)), "least\npopular"][:parts]
    return range(max(1, parts)), names or ["all questions"]
