"""A trajectory drawn: a reading by layer and step as a map, and its mean and the accuracy along steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from attnbalance.report.figures import COLOURS, make_axes, shades, whiskers
from attnbalance.statistics.intervals import Interval
from attnbalance.trajectory.trajectory import Trajectory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_map(trajectory: Trajectory, title: str) -> Figure:
    """A reading's mean over heads and prompts for each layer (rows) and checkpoint (columns, one width each).

    From white at zero to blue at the largest value; where something is negative, orange to blue around zero.
    """
    values = np.array(trajectory.by_layer(title)).T
    reading = trajectory.comparison.measured[0].reading(title)
    top, signed = float(np.abs(values).max()) or 1.0, float(values.min()) < 0
    n_layers, n_steps = values.shape
    with make_axes(1, height=1.6 + min(5.5, max(1.2, 0.22 * n_layers))) as (figure, [ax]):
        colours = shades(COLOURS[1], "#ffffff", COLOURS[0]) if signed else shades(COLOURS[0])
        image = ax.imshow(values, aspect="auto", origin="lower", interpolation="nearest", cmap=colours)
        image.set_clim(-top if signed else 0.0, top)
        columns, rows = range(0, n_steps, -(-n_steps // 12)), range(0, n_layers, -(-n_layers // 16))
        ax.set_xticks(columns, [str(trajectory.steps[i]) for i in columns])
        ax.set_yticks(rows, [str(reading.layers[i]) for i in rows])
        ax.set(xlabel="step", ylabel="layer")
        ax.grid(visible=False)
        figure.colorbar(image, ax=ax, label=f"{title} ({reading.unit})", pad=0.02)
    return figure


def draw_means(trajectory: Trajectory, title: str) -> Figure:
    """A reading's mean over layers along steps with its 95% band; beside it accuracy, where answers were asked for."""
    accuracies = trajectory.accuracies()
    with make_axes(1 if accuracies is None else 2, share=False) as (figure, axes):
        _draw(axes[0], trajectory.steps, trajectory.means(title), 0, 1)
        axes[0].set(ylabel=f"{title}, mean over layers\n({trajectory.comparison.measured[0].reading(title).unit})")
        if accuracies is not None:
            _draw(axes[1], trajectory.steps, accuracies, 1, 100)
            axes[1].set(ylabel="share of questions answered right (%)")
    return figure


def _draw(ax: Axes, steps: Sequence[int], values: Sequence[Interval], colour: int, scale: float) -> None:
    """A line along steps with its band; no band at a step without an interval."""
    mean, (below, above) = whiskers(values, scale)
    ax.fill_between(steps, mean - below, mean + above, color=COLOURS[colour], alpha=0.18, linewidth=0)
    ax.plot(steps, mean, color=COLOURS[colour], marker="o", markersize=4)
    ax.set(xlabel="step")
    ax.margins(y=0.1)
