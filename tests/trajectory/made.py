"""A trajectory made of numbers chosen by a test."""

from __future__ import annotations

from collections.abc import Sequence

from attnbalance.trajectory.trajectory import Trajectory
from tests.fakes import a_comparison


def a_trajectory(
    layers: Sequence[Sequence[float]] = ((0.5, 0.4), (0.4, 0.3), (0.2, 0.1)),
    right: Sequence[int] | None = (30, 25, 10),
    subject: str = "Ann {}",
) -> Trajectory:
    """Checkpoints at steps 10, 20, ... with these layer means; of 40 questions so many are right."""
    labels = [f"step {10 * (i + 1)}" for i in range(len(layers))]
    correct = right and {label: [i < n for i in range(40)] for label, n in zip(labels, right, strict=True)}
    source = {"model": "models/base", "adapter": "run/<b>checkpoint"}
    attention = dict(zip(labels, layers, strict=True))
    comparison = a_comparison(attention, correct or None, pair=(labels[-1], labels[0]), subject=subject, source=source)
    return Trajectory(tuple(10 * (i + 1) for i in range(len(layers))), comparison)
