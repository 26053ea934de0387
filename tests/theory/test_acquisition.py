"""Pretraining in stages and finetuning, against steps taken by hand and counted answers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from attnbalance.errors import DataError, DivergenceError
from attnbalance.theory.acquisition import Setting, Stages, acquire, doubling, extract, pretrain
from attnbalance.theory.attention_mlp import make_attention_mlp
from attnbalance.theory.sentences import make_sentences
from tests.theory.dense_attention_mlp import dense_logits

# Both sides add up at most some hundred numbers of size 1 in float64, which loses 1e-13. A wrong sign or factor shows
# as 1e-3.
EXACT = {"atol": 1e-10, "rtol": 0.0}
TINY = Setting(pairs=4, frequent=0.5, multiplicity=2, universe=3, neurons=3, spread=0.5)
SHORT = Stages((0.1, 0.1, 0.1), (2, 2, 1))


def test_runs_together_are_the_runs_alone() -> None:
    setting = replace(TINY, stages=SHORT)
    together, alone = acquire(setting, [3, 4]), acquire(setting, [4])
    torch.testing.assert_close(together.model.W_1[1:], alone.model.W_1, **EXACT)
    torch.testing.assert_close(together.model.run(1).loss(together.samples.run(1)), alone.model.loss(alone.samples))


def test_stages_follow_their_rates_and_copies_stay() -> None:
    stages = Stages((0.3, 0.2, 0.1), (2, 1, 2))
    assert [stages.rate(t) for t in range(1, 6)] == [0.3, 0.3, 0.2, 0.1, 0.1]
    assert stages.ends == (2, 3, 5)
    sentences = make_sentences([0], pairs=4, frequent=1.0)
    samples, model = sentences.pretraining(), make_attention_mlp([0], sentences.tokens, spread=0.5)
    by_hand = model.copy()
    first, second, last = pretrain(model, samples, stages)
    for t in range(1, 6):
        by_hand.step(samples, stages.rate(t))
        if t == 2:
            torch.testing.assert_close(first.W_1, by_hand.W_1, **EXACT)
    torch.testing.assert_close(last.W_1, by_hand.W_1, **EXACT)
    assert not torch.equal(first.Z, second.Z)


def test_accuracies_of_finetuning_by_hand() -> None:
    setting = replace(TINY, stages=SHORT, share=0.5, steps=2)
    acquired = acquire(setting, [2])
    path = extract(acquired, setting, (0, 2))
    split, model = acquired.sentences.split(0.5), acquired.model
    right = {"train": 0, "frequent": 0, "rare": 0}
    for name in right:
        part = getattr(split, name)
        for tokens, target in zip(part.tokens[0], part.target[0], strict=True):
            logits = dense_logits(model.W_1[0], model.Z[0], model.norm[0], model.scale, False, tokens.tolist())
            right[name] += int(logits.argmax() == target.argmax())
        assert float(path.values[name][0, 0]) == right[name] / len(part)
    expected = (right["frequent"] + right["rare"]) / (len(split.frequent) + len(split.rare))
    assert float(path.values["test"][0, 0]) == pytest.approx(expected)
    assert path.steps == (0, 2)
    assert doubling(8) == (0, 1, 2, 3, 4, 5, 6, 7, 8)


@pytest.mark.parametrize(
    "wrong",
    [
        {"neurons": 0},
        {"scale": 0.0},
        {"context_norm": 0.0},
        {"spread": -1.0},
    ],
)
def test_impossible_models_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(DataError):
        acquire(replace(TINY, stages=SHORT, **wrong), [0])


@pytest.mark.parametrize("wrong", [{"share": 0.0}, {"share": 1.1}, {"rate": 0.0}, {"rate": math.nan}, {"spared": 0.1}])
def test_impossible_finetuning_is_refused(wrong: dict[str, object]) -> None:
    setting = replace(TINY, stages=SHORT)
    with pytest.raises(DataError):
        extract(acquire(setting, [0]), replace(setting, **wrong), (0,))


def test_impossible_schedules_are_refused() -> None:
    for rates, steps in (((0.1, 0.1, 0.0), (1, 1, 1)), ((0.1, -0.1, 0.1), (1, 1, 1)), ((0.1, 0.1, 0.1), (1, 0, 1))):
        with pytest.raises(DataError):
            Stages(rates, steps)


def test_a_learning_rate_that_diverges_is_named() -> None:
    with pytest.raises(DivergenceError, match="lower the learning rate"):
        acquire(replace(TINY, stages=Stages((1e4, 1e4, 1e4), (20, 1, 1))), [0])
