"""What models know, drawn: the categories of each relation's facts, and of each fifth by popularity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from attnbalance.readings.knowledge import CATEGORIES, Knowledge
from attnbalance.report.figures import legend, make_axes, short_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHADES = ("#08519c", "#4292c6", "#9ecae1", "#e0e0e0")
"""The colours of `CATEGORIES`: the better known, the darker."""


def draw_knowledge(measured: Mapping[str, Knowledge]) -> Figure:
    """For each model, stacked shares of the categories: all facts, each relation, and each fifth by popularity."""
    bars = {label: _bars(known) for label, known in measured.items()}
    tallest = max(len(rows) for rows in bars.values())
    with make_axes(1, height=1.2 + len(bars) * (0.5 + 0.28 * tallest), rows=len(bars)) as (figure, axes):
        for ax, (label, rows) in zip(axes, bars.items(), strict=True):
            _draw(ax, label, rows)
        axes[-1].set_xlabel("share of the facts (%)")
        legend(figure, axes[0].containers)
    return figure


def _bars(known: Knowledge) -> list[tuple[str, Knowledge]]:
    """The groups of facts, top to bottom, with their names."""
    relations = [(relation, known.of_relation(relation)) for relation in known.relations]
    fifths = known.by_popularity()
    names = ["most popular", *map(str, range(2, len(fifths))), "least popular"][: len(fifths)]
    popularity = [(f"popularity: {name}", part) for name, part in zip(names, fifths, strict=True)]
    return [("all", known), *relations, *popularity]


def _draw(ax: Axes, label: str, rows: Sequence[tuple[str, Knowledge]]) -> None:
    """One model's bars."""
    counts = [Counter(known.categories) for _, known in rows]
    shares = np.array([[100 * count[name] / count.total() for name in CATEGORIES] for count in counts])
    starts, y = np.cumsum(shares, axis=1) - shares, np.arange(len(rows))
    for i, name in enumerate(CATEGORIES):
        ax.barh(y, shares[:, i], left=starts[:, i], height=0.75, color=SHADES[i], label=name)
    ax.set_yticks(y, [f"{short_label(name)} ({len(known.prompts)})" for name, known in rows])
    ax.set(title=short_label(label), xlim=(0, 100))
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
