"""Schedules of training; what finetuning passes on is tested with its settings."""

from __future__ import annotations

from typing import Any

import pytest

from attnbalance.errors import DataError
from attnbalance.finetuning.schedule import LARGEST_COUNT, Schedule, check_count

USUAL: dict[str, Any] = {"steps": 3, "batch_size": 8, "learning_rate": 0.1, "checkpoint_every": 2, "seed": 0}


def test_a_schedule_without_options_is_constant_and_never_stopped_early() -> None:
    schedule = Schedule(**USUAL)
    assert (schedule.decay, schedule.patience, schedule.gradient_rank, schedule.accumulate) == (False, None, None, 1)


@pytest.mark.parametrize("name", ["steps", "batch_size", "checkpoint_every", "accumulate"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, None, "3"])
def test_counts_are_whole_numbers_from_one_on(name: str, value: object) -> None:
    with pytest.raises(DataError, match=f"`{name}` must be a whole number >= 1, got"):
        Schedule(**USUAL | {name: value})


def test_counts_have_a_largest_value() -> None:
    check_count("steps", LARGEST_COUNT)
    with pytest.raises(DataError, match="`steps` must be at most 1,000,000,000"):
        check_count("steps", LARGEST_COUNT + 1)
