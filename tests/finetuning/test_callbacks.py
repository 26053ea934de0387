"""Callbacks: non-finite losses and weights."""

from __future__ import annotations

import pytest
from short_runs import SHORT, SPLIT, Killed, assert_equal_weights, short

from attnbalance import progress
from attnbalance.errors import DataError, ModelError
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


@pytest.mark.parametrize(("event", "step"), [("on_step_end", 3), ("on_train_end", SHORT["steps"])])
def test_training_goes_on_only_in_the_precision_in_which_it_began(llama, tmp_path, monkeypatch, kill_at, event, step):
    """Without a setting the machine chooses. The second is killed after all steps, before the run is written."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    whole = finetune(llama, SPLIT, tmp_path / "whole", short())
    kill_at(event, step)
    with pytest.raises(Killed):
        finetune(llama, SPLIT, tmp_path / "again", short())
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    with pytest.raises(
        DataError, match=r"checkpoint-\d was trained in .*'bf16', and training would go on in 'no' here"
    ):
        finetune(llama, SPLIT, tmp_path / "again", short())
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert_equal_weights(finetune(llama, SPLIT, tmp_path / "again", short()).path, whole.path)
