"""Seeds: one range for everything that takes one."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnbalance.comparison.specs import MeasureSettings
from attnbalance.demo import demo
from attnbalance.errors import DataError
from attnbalance.finetuning.schedule import Schedule
from attnbalance.seeds import LARGEST_SEED, check_seed


@pytest.mark.parametrize("seed", [-1, 2**32, 10**400, 1.0, True])
def test_a_seed_that_some_generator_would_not_take_is_refused_everywhere(seed: int, tmp_path: Path) -> None:
    uses = (
        lambda: check_seed(seed),
        lambda: MeasureSettings(seed=seed),
        lambda: Schedule(steps=1, batch_size=1, learning_rate=0.1, checkpoint_every=1, seed=seed),
        lambda: demo(tmp_path / "out", seed=seed),
    )
    for use in uses:
        with pytest.raises(DataError, match="seed must be an integer from 0 to 4294967295, got"):
            use()
    assert not (tmp_path / "out").exists()


def test_both_ends_of_the_range_are_taken() -> None:
    import numpy as np
    import transformers

    for seed in (0, LARGEST_SEED):
        assert check_seed(seed) == seed
        transformers.set_seed(seed)  # the two that limit it
        np.random.seed(seed)
    with pytest.raises(ValueError, match="Seed must be between"):
        np.random.seed(LARGEST_SEED + 1)
