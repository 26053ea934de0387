"""The training loop shared by the three one-layer models: it records observations and reports divergence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from attnbalance.errors import DivergenceError

DIVERGED = 10.0
"""Training counts as diverged if the loss exceeds this multiple of its first value."""


@dataclass(frozen=True)
class Trajectory:
    """Observations along training: the first two axes of `values[name]` are the steps in `steps` and the runs."""

    steps: tuple[int, ...]
    values: Mapping[str, Float[Tensor, "step run ..."]]


def descend(
    step: Callable[[int], Float[Tensor, " run"]],
    observe: Callable[[], Mapping[str, Float[Tensor, "run ..."]]],
    steps: int,
    at: Sequence[int],
    final: Callable[[], Float[Tensor, " run"]] | None = None,
) -> Trajectory:
    """Take `steps` steps of training and observe the runs after the steps in `at`; 0 is before the first step.

    `step(t)` takes step t (from 1) of all runs in place and returns each run's loss before the step. `final()` returns
    the loss after the last step, which is checked too. Raises `DivergenceError`, which names step and run, if a loss is
    not finite or exceeds `DIVERGED` times its first value (or 1e-3, if that is larger).
    """
    wanted, seen = sorted({t for t in at if 0 <= t <= steps}), []
    if wanted and wanted[0] == 0:
        seen.append(observe())
    first: Tensor | None = None
    for t in range(1, steps + 1):
        loss = step(t)
        first = loss.clone() if first is None else first
        _check(loss, first, t)
        if len(seen) < len(wanted) and wanted[len(seen)] == t:
            seen.append(observe())
    if first is not None and final is not None:
        _check(final(), first, steps)
    names = seen[0] if seen else ()
    return Trajectory(tuple(wanted), {name: torch.stack([observed[name] for observed in seen]) for name in names})


def _check(loss: Float[Tensor, " run"], first: Float[Tensor, " run"], t: int) -> None:
    bad = ~(loss.isfinite() & (loss <= DIVERGED * first.clamp(min=1e-3)))
    if bool(bad.any()):
        run = int(bad.nonzero()[0, 0])
        raise DivergenceError(
            f"training diverged at step {t} in run {run}: the loss went from {float(first[run]):.3g} to "
            f"{float(loss[run]):.3g} nats; lower the learning rate"
        )
