"""The training loop: what it records and when, and the losses that count as divergence."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from attnbalance.errors import DivergenceError
from attnbalance.theory.dynamics import DIVERGED, descend

RATES = torch.tensor([0.1, 0.3], dtype=torch.float64)
"""One learning rate a run, for the loss w^2: gradient descent gives w_t = (1 - 2 rate)^t w_0."""


def play(losses: Sequence[float], last: float = 0.0) -> None:
    """Train two runs: the first has these losses and then `last`, the second always 1."""

    def of_both_runs(loss: float) -> Tensor:
        return torch.tensor([loss, 1.0], dtype=torch.float64)

    descend(lambda t: of_both_runs(losses[t - 1]), dict, len(losses), [], lambda: of_both_runs(last))


def test_a_trajectory_holds_the_closed_form_at_the_steps_asked_for() -> None:
    w = torch.ones(2, dtype=torch.float64)

    def step(_: int) -> Tensor:
        loss = w.square()
        w.sub_(2 * RATES * w)
        return loss

    path = descend(step, lambda: {"w": w.clone(), "pair": torch.stack([w, -w], dim=1)}, 7, [7, 0, 3, 3, 99, -1])
    assert path.steps == (0, 3, 7)
    expected = torch.stack([(1 - 2 * RATES) ** t for t in (0, 3, 7)])
    torch.testing.assert_close(path.values["w"], expected)
    torch.testing.assert_close(path.values["pair"], torch.stack([expected, -expected], dim=2))


def test_steps_are_numbered_from_1_and_the_first_observation_precedes_them() -> None:
    events: list[object] = []

    def step(t: int) -> Tensor:
        events.append(t)
        return torch.ones(1)

    def observe() -> dict[str, Tensor]:
        events.append("observed")
        return {"x": torch.zeros(1)}

    descend(step, observe, 3, [0, 2])
    assert events == ["observed", 1, 2, "observed", 3]


def test_a_loss_may_rise_to_ten_times_its_first_value() -> None:
    play([1.0, DIVERGED, 0.5], last=DIVERGED)
    play([0.0, 0.0099])  # a first loss below 1e-3 counts as 1e-3


@pytest.mark.parametrize(
    ("losses", "last", "step"),
    [
        ([1.0, 10.1], 1.0, 2),
        ([2.0, 1.0, math.nan], 1.0, 3),
        ([math.inf], 1.0, 1),
        ([1.0, 1.0], 10.1, 2),
        ([0.0, 0.011], 1.0, 2),
    ],
)
def test_divergence_names_the_step_the_run_and_the_remedy(losses: list[float], last: float, step: int) -> None:
    with pytest.raises(DivergenceError, match=rf"step {step} in run 0.*lower the learning rate"):
        play(losses, last)


def test_no_steps_at_all_give_the_start() -> None:
    path = descend(lambda _: torch.ones(1), lambda: {"x": torch.full((1,), 5.0)}, 0, [0, 1])
    assert path.steps == (0,)
    assert path.values["x"].tolist() == [[5.0]]
