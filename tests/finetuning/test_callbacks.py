"""Callbacks: non-finite losses and weights."""

from __future__ import annotations

import pytest
from short_runs import SPLIT, short

from attnbalance.errors import ModelError
from attnbalance.finetuning.finetune import finetune


def test_a_loss_that_is_no_number_names_its_step(llama, tmp_path):
    with pytest.raises(ModelError, match=r"(loss is nan|loss is inf|non-finite).* step"):
        finetune(llama, SPLIT, tmp_path / "run", short(learning_rate=1e38))
    assert not (tmp_path / "run").exists()
