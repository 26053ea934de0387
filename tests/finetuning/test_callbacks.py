"""Callbacks: non-finite losses and weights."""

from __future__ import annotations

import pytest
from short_runs import SPLIT, short

from attnbalance import progress
from attnbalance.errors import ModelError
from attnbalance.finetuning.finetune import finetune


def test_a_loss_that_is_no_number_names_its_step(llama, tmp_path):
    with pytest.raises(ModelError, match=r"(loss is nan|loss is inf|non-finite).* step"):
        finetune(llama, SPLIT, tmp_path / "run", short(learning_rate=1e38))
    assert not (tmp_path / "run").exists()


def test_where_output_is_no_terminal_training_counts_its_steps_in_lines(llama, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY", 0.0)
    monkeypatch.setattr(progress, "_LINES", progress._Lines())
    finetune(llama, SPLIT, tmp_path / "run", short(), progress=True)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("finetuning on top: ")]
    counted = [int(line.split()[3]) for line in lines]
    assert {*counted} >= {1, 2, 3, 4, 5, 6, 7}
    assert counted == sorted(counted)
    assert all(" of 7, 00:0" in line for line in lines)
    assert not any("\r" in line for line in lines)
