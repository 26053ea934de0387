"""A trajectory drawn: a reading by layer and step as a map, and its mean and the accuracy along steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from attnbalance.report.figures import COLOURS, draw_layers, make_axes, whiskers
from attnbalance.statistics.intervals import Interval
from attnbalance.trajectory.trajectory import Trajectory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_map(trajectory: Trajectory, title: str) -> Figure:
    """A reading's mean over heads and prompts for each layer (rows) and checkpoint (columns, one width each).

    Colours are those of `draw_layers`.
    """
    reading = trajectory.comparison.measured[0].reading(title)
    steps = [str(step) for step in trajectory.steps]
    values = np.array(trajectory.by_layer(title)).T
    return draw_layers(values, reading.layers, steps, "step", f"{title} ({reading.unit})")


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
    ax.locator_params(axis="x", integer=True)
    ax.margins(y=0.1)
