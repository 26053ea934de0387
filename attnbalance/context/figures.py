"""Where models take their answers from, drawn along the models: the checkpoints of a run make a curve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from attnbalance.readings.reliance import CONTEXT, MEMORY, Reliance
from attnbalance.report.figures import draw_points, legend, make_axes, short_label

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_reliance(measured: Mapping[str, Reliance], seed: int = 0) -> Figure:
    """For each model, the shares answered from the context and from memory, M_C, and what it remembers without context.

    The models stand in their order, joined by lines (Goyal et al. 2024, Figure 2). `seed` is
    that of the intervals of M_C.
    """
    series = {
        "from the context": [reliance.share(CONTEXT) for reliance in measured.values()],
        "from memory": [reliance.share(MEMORY) for reliance in measured.values()],
        "M_C": [reliance.m_c(seed) for reliance in measured.values()],
        "remembered without the context": [reliance.remembered() for reliance in measured.values()],
    }
    x = np.arange(len(measured))
    with make_axes(1, height=4.2) as (figure, [ax]):
        for index, (name, shares) in enumerate(series.items()):
            draw_points(ax, x + 0.05 * (index - 1.5), shares, index, name, "-" if len(measured) > 1 else "none")
        ax.set_xticks(x, list(map(short_label, measured)), rotation=20 if len(measured) > 4 else 0)
        ax.set(ylabel="%", ylim=(-2, 102))
        legend(figure, ax.get_legend_handles_labels()[0])
    return figure
