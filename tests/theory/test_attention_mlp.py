"""The attention and MLP model against autograd on a dense forward pass, and its sentences against hand counts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnbalance.errors import DataError, DivergenceError
from attnbalance.finetuning.objectives.gradients import low_rank
from attnbalance.theory.acquisition import Setting, Stages, acquire, doubling, extract, pretrain
from attnbalance.theory.attention_mlp import AttentionMLP, make_attention_mlp, rank_one_part
from attnbalance.theory.sentences import CONTEXT, FORMAT, Samples, Sentences, make_sentences

# Both sides add up at most some hundred numbers of size 1 in float64, which loses 1e-13. A wrong sign or factor shows
# as 1e-3.
EXACT = {"atol": 1e-10, "rtol": 0.0}
TINY = Setting(pairs=4, frequent=0.5, multiplicity=2, universe=3, neurons=3, spread=0.5)
SHORT = Stages((0.1, 0.1, 0.1), (2, 2, 1))


def worlds(draw: st.DrawFn) -> tuple[Sentences, AttentionMLP]:
    universe = draw(st.integers(1, 5))
    sentences = make_sentences(
        [draw(st.integers(0, 1000)), draw(st.integers(0, 1000))],
        pairs=draw(st.integers(1, 5)),
        frequent=draw(st.sampled_from((0.0, 0.5, 1.0))),
        multiplicity=draw(st.integers(1, universe)),
        universe=universe,
        rare_phrase=draw(st.sampled_from(("universal", "own"))),
        context=draw(st.booleans()),
    )
    model = make_attention_mlp(
        [draw(st.integers(0, 1000)), draw(st.integers(0, 1000))],
        sentences.tokens,
        neurons=draw(st.integers(1, 4)),
        scale=draw(st.floats(0.5, 4)),
        context_norm=(draw(st.floats(0.5, 3)), 2.0),
        spread=draw(st.floats(0.1, 2)),
        uniform=draw(st.booleans()),
    )
    return sentences, model


def dense_logits(W_1: Tensor, Z: Tensor, norm: Tensor, scale: float, uniform: bool, tokens: list[int]) -> Tensor:
    """One input of one run, as section 2 writes it: X of columns, W_1 with a row a neuron, W_2 of blocks of ones."""
    d, outputs, neurons = W_1.shape
    X = torch.stack([norm[t] * torch.eye(d, dtype=torch.float64)[t] for t in tokens if t >= 0], dim=1)
    s = torch.softmax(X.T @ Z @ X[:, -1] * (not uniform), 0)
    rows = W_1.permute(1, 2, 0).reshape(outputs * neurons, d)
    W_2 = torch.kron(torch.eye(outputs, dtype=torch.float64), torch.ones(1, neurons, dtype=torch.float64))
    return scale * (W_2 @ torch.relu(rows @ (X @ s)))


def dense_loss(W_1: Tensor, Z: Tensor, model: AttentionMLP, samples: Samples, run: int) -> Tensor:
    loss = torch.zeros((), dtype=torch.float64)
    for tokens, target, weight in zip(samples.tokens[run], samples.target[run], samples.weight[run], strict=True):
        logits = dense_logits(W_1, Z, model.norm[run], model.scale, model.uniform, tokens.tolist())
        loss = loss - weight * (target * logits.log_softmax(0)).sum()
    return loss


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_loss_and_gradients_are_those_of_autograd(data: st.DataObject) -> None:
    sentences, model = worlds(data.draw)
    samples = sentences.pretraining()
    found = model.gradient(samples)
    for run in range(2):
        W_1, Z = (x[run].clone().requires_grad_() for x in (model.W_1, model.Z))
        loss = dense_loss(W_1, Z, model, samples, run)
        expected = torch.autograd.grad(loss, (W_1, Z), allow_unused=True)
        torch.testing.assert_close(found.loss[run], loss.detach(), **EXACT)
        torch.testing.assert_close(model.loss(samples)[run], loss.detach(), **EXACT)
        torch.testing.assert_close(found.W_1[run], expected[0], **EXACT)
        torch.testing.assert_close(found.Z[run], torch.zeros_like(Z) if model.uniform else expected[1], **EXACT)


def test_attention_adds_up_to_one_and_leaves_empty_places_out() -> None:
    acquired = acquire(replace(TINY, stages=SHORT), [1])
    share = acquired.model.attention(acquired.samples)
    torch.testing.assert_close(share.sum(-1), torch.ones_like(share[..., 0]), **EXACT)
    assert (share[acquired.samples.tokens < 0] == 0).all()
    assert (share[acquired.samples.tokens >= 0] > 0).all()


def test_one_soft_sample_stands_for_the_sentences_that_begin_alike() -> None:
    sentences = make_sentences([3], pairs=2, frequent=1.0, multiplicity=3, universe=4)
    model = make_attention_mlp([0], sentences.tokens, neurons=3, spread=0.5)
    merged = sentences.pretraining()
    tokens, target = [], []
    for pair in range(2):
        for phrase in sentences.frequent[0, pair].tolist():
            s = sentences.subject + pair
            tokens += [[-1, CONTEXT, s], [CONTEXT, s, phrase]]
            target += [phrase, sentences.answer + pair]
    hard = torch.nn.functional.one_hot(torch.tensor([target]), sentences.tokens).double()
    apart = Samples(torch.tensor([tokens]), hard, torch.full((1, 12), 1 / 12, dtype=torch.float64))
    for a, b in zip((vars(model.gradient(x)) for x in (merged,)), (vars(model.gradient(apart)),), strict=True):
        for name in a:
            torch.testing.assert_close(a[name], b[name], **EXACT)


def test_weights_by_hand_and_rare_pairs_count_as_much_as_frequent_ones() -> None:
    sentences = make_sentences([0], pairs=2, frequent=0.5, multiplicity=3, universe=3)
    weight = sentences.pretraining().weight[0]  # (c, s) of both pairs, three sentences of one, one of the other
    torch.testing.assert_close(weight, torch.tensor([3, 3, 1, 1, 1, 3], dtype=torch.float64) / 12, **EXACT)


@pytest.mark.parametrize(("frequent", "expected"), [(1.0, math.log(5) / 2), (0.5, math.log(5) / 4), (0.0, 0.0)])
def test_entropy_is_that_of_the_targets(frequent: float, expected: float) -> None:
    sentences = make_sentences([0, 1], pairs=4, frequent=frequent, multiplicity=5, universe=6)
    samples = sentences.pretraining()
    counted = -(samples.weight[..., None] * torch.xlogy(samples.target, samples.target)).sum((1, 2))
    assert sentences.entropy == pytest.approx(expected, abs=1e-12)
    torch.testing.assert_close(counted, torch.full((2,), expected, dtype=torch.float64), **EXACT)


def test_questions_are_split_by_share_and_nothing_is_in_two_parts() -> None:
    sentences = make_sentences([0, 5], pairs=20, frequent=0.5)
    small, large = sentences.split(0.2), sentences.split(0.6)
    assert (small.train.tokens[..., -1] == FORMAT).all()
    for run in range(2):
        subjects = [set(part.tokens[run, :, 1].tolist()) for part in (large.train, large.frequent, large.rare)]
        assert [len(one) for one in subjects] == [6, 4, 10]
        assert len(set.union(*subjects)) == 20
        assert set(small.train.tokens[run, :, 1].tolist()) < subjects[0]
    spared = sentences.split(0.2, 0.6)
    assert torch.equal(spared.frequent.tokens, large.frequent.tokens)
    assert torch.equal(spared.train.tokens, small.train.tokens)


def test_an_own_phrase_is_nobody_elses() -> None:
    own = make_sentences([0], pairs=10, frequent=0.5, universe=4, rare_phrase="own")
    assert own.rare[0].tolist() == [6, 7, 8, 9, 10]
    assert own.frequent.max() < 6
    assert make_sentences([0], pairs=10, frequent=0.5, universe=4).rare.max() < 6


def test_phrases_are_nested_in_multiplicity_and_differ_from_seed_to_seed() -> None:
    few, many = (make_sentences([0, 1], pairs=6, frequent=1.0, multiplicity=K, universe=9) for K in (2, 4))
    assert torch.equal(few.frequent, many.frequent[..., :2])
    assert all(len(set(row)) == 4 for row in many.frequent[0].tolist())
    assert not torch.equal(many.frequent[0], many.frequent[1])


def test_rank_one_part_is_the_truncated_svd() -> None:
    matrix = torch.randn(3, 7, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrix[:, 2] = 0
    U, S, Vh = torch.linalg.svd(matrix, full_matrices=False)
    expected = U[..., :1] * S[..., None, :1] @ Vh[:, :1]
    torch.testing.assert_close(rank_one_part(matrix), expected, **EXACT)
    # that of the finetuning part of this package works in float32
    torch.testing.assert_close(rank_one_part(matrix)[0], low_rank(matrix[0], 1), atol=1e-5, rtol=0.0)
    assert rank_one_part(torch.zeros(1, 2, 2)).abs().max() == 0


def test_a_step_of_rank_one_moves_w_1_by_it_and_z_in_full() -> None:
    acquired = acquire(replace(TINY, stages=SHORT), [1])
    train, model = acquired.sentences.split(1.0).train, acquired.model
    found, moved = model.gradient(train), model.copy()
    moved.step(train, 0.1, rank_one=True)
    moved_by = (model.W_1 - moved.W_1) / 0.1
    torch.testing.assert_close(moved_by.flatten(2), rank_one_part(found.W_1.flatten(2)), **EXACT)
    torch.testing.assert_close((model.Z - moved.Z) / 0.1, found.Z, **EXACT)
    assert torch.linalg.matrix_rank(moved_by.flatten(2)).tolist() == [1]


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
    found = extract(acquired, setting, (0, 2))
    split, model = acquired.sentences.split(0.5), acquired.model
    right = {"train": 0, "frequent": 0, "rare": 0}
    for name in right:
        part = getattr(split, name)
        for tokens, target in zip(part.tokens[0], part.target[0], strict=True):
            logits = dense_logits(model.W_1[0], model.Z[0], model.norm[0], model.scale, False, tokens.tolist())
            right[name] += int(logits.argmax() == target.argmax())
        assert float(found.values[name][0, 0]) == right[name] / len(part)
    expected = (right["frequent"] + right["rare"]) / (len(split.frequent) + len(split.rare))
    assert float(found.values["test"][0, 0]) == pytest.approx(expected)
    assert found.steps == (0, 2)
    assert doubling(8) == (0, 1, 2, 3, 4, 5, 6, 7, 8)


@pytest.mark.parametrize(
    "wrong",
    [
        {"pairs": 0},
        {"frequent": 1.5},
        {"frequent": -0.1},
        {"multiplicity": 0},
        {"multiplicity": 4, "universe": 3},
        {"rare_phrase": "mine"},
        {"neurons": 0},
        {"scale": 0.0},
        {"context_norm": 0.0},
        {"spread": -1.0},
    ],
)
def test_impossible_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(DataError):
        acquire(replace(TINY, stages=SHORT, **wrong), [0])


@pytest.mark.parametrize("wrong", [{"share": 0.0}, {"share": 1.1}, {"rate": 0.0}, {"rate": math.nan}, {"spared": 0.1}])
def test_impossible_finetuning_is_refused(wrong: dict[str, object]) -> None:
    setting = replace(TINY, stages=SHORT)
    with pytest.raises(DataError):
        extract(acquire(setting, [0]), replace(setting, **wrong), (0,))


def test_impossible_schedules_and_worlds_without_frequent_pairs_are_refused() -> None:
    for rates, steps in (((0.1, 0.1, 0.0), (1, 1, 1)), ((0.1, -0.1, 0.1), (1, 1, 1)), ((0.1, 0.1, 0.1), (1, 0, 1))):
        with pytest.raises(DataError):
            Stages(rates, steps)
    with pytest.raises(DataError, match="no pair is frequent"):
        make_sentences([0], pairs=2, frequent=0.0).split(0.5)


def test_a_learning_rate_that_diverges_is_named() -> None:
    with pytest.raises(DivergenceError, match="lower the learning rate"):
        acquire(replace(TINY, stages=Stages((1e4, 1e4, 1e4), (20, 1, 1))), [0])
