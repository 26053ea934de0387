"""The attention and MLP model against autograd on a dense forward pass."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbalance.finetuning.objectives.gradients import low_rank
from attnbalance.theory.acquisition import Setting, Stages, acquire
from attnbalance.theory.attention_mlp import AttentionMLP, make_attention_mlp, rank_one_part
from attnbalance.theory.sentences import Sentences, make_sentences
from tests.theory.dense_attention_mlp import dense_loss

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


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_loss_and_gradients_are_those_of_autograd(data: st.DataObject) -> None:
    sentences, model = worlds(data.draw)
    samples = sentences.pretraining()
    gradient = model.gradient(samples)
    for run in range(2):
        W_1, Z = (x[run].clone().requires_grad_() for x in (model.W_1, model.Z))
        loss = dense_loss(W_1, Z, model, samples, run)
        expected = torch.autograd.grad(loss, (W_1, Z), allow_unused=True)
        torch.testing.assert_close(gradient.loss[run], loss.detach(), **EXACT)
        torch.testing.assert_close(model.loss(samples)[run], loss.detach(), **EXACT)
        torch.testing.assert_close(gradient.W_1[run], expected[0], **EXACT)
        torch.testing.assert_close(gradient.Z[run], torch.zeros_like(Z) if model.uniform else expected[1], **EXACT)


def test_attention_sums_to_one_and_skips_empty_positions() -> None:
    acquired = acquire(replace(TINY, stages=SHORT), [1])
    share = acquired.model.attention(acquired.samples)
    torch.testing.assert_close(share.sum(-1), torch.ones_like(share[..., 0]), **EXACT)
    assert (share[acquired.samples.tokens < 0] == 0).all()
    assert (share[acquired.samples.tokens >= 0] > 0).all()


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
    gradient, moved = model.gradient(train), model.copy()
    moved.step(train, 0.1, rank_one=True)
    moved_by = (model.W_1 - moved.W_1) / 0.1
    torch.testing.assert_close(moved_by.flatten(2), rank_one_part(gradient.W_1.flatten(2)), **EXACT)
    torch.testing.assert_close((model.Z - moved.Z) / 0.1, gradient.Z, **EXACT)
    assert torch.linalg.matrix_rank(moved_by.flatten(2)).tolist() == [1]
