"""A trajectory as JSON."""

from __future__ import annotations

from typing import Any

from attnbalance.trajectory.trajectory import Trajectory


def trajectory_json(trajectory: Trajectory) -> dict[str, Any]:
    """The content of `trajectory.json`: an entry for each checkpoint, and the last one's difference from the first.

    Each entry holds its step and path, and for each reading its mean over layers and its difference from the first
    checkpoint, both with 95% intervals, and the mean of each layer; with answers also accuracy. A bound that is not
    known is null. "accuracy_change" holds the paired difference in accuracy, last minus first, and McNemar's exact p.
    """
    readings = [_reading(trajectory, title) for title in trajectory.comparison.titles]
    rates, change = trajectory.accuracies(), trajectory.accuracy_change
    checkpoints = [
        {
            "step": step,
            "label": measured.label,
            "model": measured.source["model"],
            "adapter": measured.source["adapter"],
        }
        | ({} if rates is None else {"accuracy": rates[i].as_dict()})
        for i, (step, measured) in enumerate(zip(trajectory.steps, trajectory.comparison.measured, strict=True))
    ]
    accuracy = None if change is None else change.interval.as_dict() | {"p_value": change.p_value}
    return {"checkpoints": checkpoints, "readings": readings, "accuracy_change": accuracy}


def _reading(trajectory: Trajectory, title: str) -> dict[str, Any]:
    """A reading along the checkpoints, in their order."""
    reading = trajectory.comparison.measured[0].reading(title)
    return {
        "name": reading.name,
        "unit": reading.unit,
        "layers": list(reading.layers),
        "mean": [mean.as_dict() for mean in trajectory.means(title)],
        "change": [change.as_dict() for change in trajectory.changes(title)],
        "by_layer": [list(values) for values in trajectory.by_layer(title)],
    }
