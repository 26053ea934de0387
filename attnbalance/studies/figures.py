"""The figure of a study: extraction ratios of its methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attnbalance.report.figures import label_style, legend, make_axes, short_label, whiskers
from attnbalance.statistics.intervals import Interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_extraction(panels: Mapping[str, Mapping[str, Mapping[str, Interval]]]) -> Figure:
    """The extraction ratio with its interval: a panel for each world, a line for each method, a colour for each split.

    `panels` holds intervals by world, method and split.
    """
    longest = max(map(len, panels.values()))
    with make_axes(len(panels), height=1.4 + 0.34 * longest) as (figure, axes):
        for ax, (world, methods) in zip(axes, panels.items(), strict=True):
            splits = list(dict.fromkeys(split for ratios in methods.values() for split in ratios))
            for index, split in enumerate(splits):
                rows = [(row, ratios[split]) for row, ratios in enumerate(methods.values()) if split in ratios]
                colour, marker = label_style(index)
                y = [row + 0.24 * (index - (len(splits) - 1) / 2) for row, _ in rows]
                mean, bars = whiskers([ratio for _, ratio in rows])
                ax.errorbar(mean, y, xerr=bars, color=colour, marker=marker, linestyle="none", capsize=2, label=split)
            ax.axvline(1, color="#555555", linewidth=1)
            ax.set(title=world, xlabel="extraction ratio", ylim=(len(methods) - 0.5, -0.5))
            ax.set_yticks(range(len(methods)), [short_label(name) for name in methods])
            ax.grid(axis="y", visible=False)
        legend(figure, axes[0].containers)
    return figure
