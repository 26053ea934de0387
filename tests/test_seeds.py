"""Seeds: one range for everything that takes one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import FACTS

from attnbalance import FactSet, World, make_prompts, mean_intervals, random_tokens, synthetic_facts
from attnbalance.comparison.specs import MeasureSettings
from attnbalance.demo import demo
from attnbalance.errors import DataError
from attnbalance.finetuning.pretrain import pretrain
from attnbalance.finetuning.schedule import Schedule
from attnbalance.readings.steering import with_other_subject
from attnbalance.seeds import LARGEST_SEED, check_seed


@pytest.mark.parametrize("seed", [-1, 2**32, 10**400, 1.0, True, None])
def test_a_seed_that_some_generator_would_not_take_is_refused_everywhere(seed: Any, tmp_path: Path) -> None:
    world = World(FactSet(FACTS), 0)
    uses = (
        lambda: check_seed(seed),
        lambda: MeasureSettings(seed=seed),
        lambda: Schedule(steps=1, batch_size=1, learning_rate=0.1, checkpoint_every=1, seed=seed),
        lambda: demo(tmp_path / "out", seed=seed),
        lambda: synthetic_facts(seed),
        lambda: world.statements(5, seed),
        lambda: pretrain(world, tmp_path / "out", seed=seed),
    )
    for use in uses:
        with pytest.raises(DataError, match="seed must be an integer from 0 to 4294967295, got"):
            use()
    assert not (tmp_path / "out").exists()


def test_typed_functions_refuse_a_seed_outside_the_range() -> None:
    """Their tests check types, so that only integers reach them."""
    uses = (
        lambda: mean_intervals([[0.1], [0.2]], ["a", "b"], seed=-1),
        lambda: random_tokens(-1),
        lambda: with_other_subject(make_prompts(FactSet(FACTS)), -1),
    )
    for use in uses:
        with pytest.raises(DataError, match="seed must be an integer from 0 to 4294967295, got -1"):
            use()


def test_both_ends_of_the_range_are_taken() -> None:
    import numpy as np
    import transformers

    for seed in (0, LARGEST_SEED):
        assert check_seed(seed) == seed
        transformers.set_seed(seed)  # the two that limit it
        np.random.seed(seed)
    with pytest.raises(ValueError, match="Seed must be between"):
        np.random.seed(LARGEST_SEED + 1)
