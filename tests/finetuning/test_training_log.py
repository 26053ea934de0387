"""The log of a training, by hand."""

from __future__ import annotations

import json

from attnbalance.finetuning.training_log import base_completes, stops, trajectory, validation_losses

LOG = [
    {"step": 0, "base_completes/statement": 0.5, "base_completes/constant answer": 0.1},
    {"step": 2, "loss": 0.7},
    {
        "step": 2,
        "eval_loss": 9.0,
        "eval_objective": 0.5,
        "eval_accuracy": 0.25,
        "eval_subject_attention/0": 0.1,
        "eval_subject_attention/1": 0.2,
    },
    {"step": 4, "eval_objective": 0.4},
]


def test_each_number_is_read_back_by_its_name() -> None:
    assert validation_losses(LOG) == {2: 0.5, 4: 0.4}
    assert trajectory(LOG) == [
        {"step": 2, "objective": 0.5, "accuracy": 0.25, "subject_attention": [0.1, 0.2]},
        {"step": 4, "objective": 0.4, "subject_attention": []},
    ]
    assert base_completes(LOG) == {"statement": 0.5, "constant answer": 0.1}
    assert trajectory([]) == []


def test_layers_are_in_their_order_also_in_a_log_that_was_saved() -> None:
    """Trainers save their log with sorted keys: layers 0, 1, 10, 11, 2, ..."""
    entry = {"step": 2, "eval_objective": 0.5} | {f"eval_subject_attention/{layer}": layer / 100 for layer in range(12)}
    saved = json.loads(json.dumps([entry], sort_keys=True))
    assert list(saved[0]) != list(entry)
    assert trajectory(saved)[0]["subject_attention"] == [layer / 100 for layer in range(12)]


def test_early_stopping_by_hand() -> None:
    losses = {10: 3.0, 20: 2.0, 30: 2.5, 40: 2.0}
    assert stops(losses, 2)
    assert not stops(losses, 3)
    assert not stops(losses, None)
    assert not stops({}, 1)
