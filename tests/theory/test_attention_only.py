"""The attention-only transformer: forward pass, gradients and the sparse step against dense autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbalance.errors import DataError
from attnbalance.theory.attention_only import AttentionOnly, attention_only
from attnbalance.theory.triples import Examples, Triples, make_triples

SEEDS = (0, 1, 2)


@pytest.fixture
def world() -> Triples:
    return make_triples(SEEDS, subjects=12, relations=3, answers=9)


@pytest.fixture
def model(world: Triples) -> AttentionOnly:
    return attention_only(world.tokens, SEEDS, scale=0.5)


def generators() -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in SEEDS]


def naive_loss(W_V: Tensor, W_KQ: Tensor, prompts: list[tuple[int, int, int]]) -> Tensor:
    """The paper's formulas for one run, with one-hot embeddings and whole matrices."""
    phi, losses = torch.eye(len(W_V), dtype=W_V.dtype), []
    for s, q, a in prompts:
        X = torch.stack([phi[s], phi[q]], dim=1)
        z = W_V @ X @ torch.softmax(X.T @ W_KQ @ phi[q], 0)
        losses.append(-torch.log_softmax(z, 0)[a])
    return torch.stack(losses).mean()


def test_loss_and_gradients_equal_autograd_through_whole_matrices(world: Triples, model: AttentionOnly) -> None:
    drawn = world.drawn(20, generators())
    loss, gradient = model.loss(drawn), model.gradient(drawn)
    for run in range(len(SEEDS)):
        W_V, W_KQ = (x[run].clone().requires_grad_() for x in (model.W_V, model.W_KQ))
        prompts = list(zip(*(x[run].tolist() for x in (drawn.subject, drawn.query, drawn.answer)), strict=True))
        dense = naive_loss(W_V, W_KQ, prompts)
        slope_V, slope_KQ = torch.autograd.grad(dense, (W_V, W_KQ))
        # float64 and sums of 20 terms of size 1: 1e-10 leaves a million times the rounding
        assert abs(float(dense.detach()) - float(loss[run])) < 1e-10
        assert float((gradient.W_V[run] + slope_V).abs().max()) < 1e-10
        assert float((gradient.W_KQ[run] + slope_KQ).abs().max()) < 1e-10


def test_many_sparse_steps_equal_dense_autograd_with_a_rate_for_each_run_and_matrix(world: Triples) -> None:
    model, rates = attention_only(world.tokens, SEEDS, scale=0.1), torch.tensor([0.5, 2.0, 8.0], dtype=torch.float64)
    dense = [[x[run].clone().requires_grad_() for x in (model.W_V, model.W_KQ)] for run in range(len(SEEDS))]
    ours, theirs = generators(), generators()
    start = model.W_KQ.clone()
    for _ in range(30):
        loss = model.step(world.drawn(16, ours), rates, 0.5 * rates)
        drawn = world.drawn(16, theirs)
        for run, (W_V, W_KQ) in enumerate(dense):
            prompts = list(zip(*(x[run].tolist() for x in (drawn.subject, drawn.query, drawn.answer)), strict=True))
            expected = naive_loss(W_V, W_KQ, prompts)
            slope_V, slope_KQ = torch.autograd.grad(expected, (W_V, W_KQ))
            assert abs(float(expected.detach()) - float(loss[run])) < 1e-10
            with torch.no_grad():
                W_V -= rates[run] * slope_V
                W_KQ -= 0.5 * rates[run] * slope_KQ
    for run, (W_V, W_KQ) in enumerate(dense):
        assert float((model.W_V[run] - W_V).detach().abs().max()) < 1e-10
        assert float((model.W_KQ[run] - W_KQ).detach().abs().max()) < 1e-10
    assert float((model.W_KQ - start)[2].abs().max()) > 0.2  # attention did move


def asks(subject: int, query: int, answer: int) -> Examples:
    return Examples(*(torch.tensor([[token]]) for token in (subject, query, answer)), torch.ones(1, 1).double())


def test_a_step_leaves_what_it_does_not_touch_to_the_bit(world: Triples, model: AttentionOnly) -> None:
    before = AttentionOnly(model.W_V.clone(), model.W_KQ.clone())
    drawn = world.drawn(2, generators())
    model.step(drawn, 1.0, 1.0)
    for run in range(len(SEEDS)):
        touched = set(drawn.subject[run].tolist()) | set(drawn.query[run].tolist())
        others = [t for t in range(world.tokens) if t not in touched]
        assert torch.equal(model.W_V[run][:, others], before.W_V[run][:, others])
        assert torch.equal(model.W_KQ[run][others], before.W_KQ[run][others])
        assert not torch.equal(model.W_V[run], before.W_V[run])


def test_a_step_is_the_same_however_the_values_lie_in_memory(world: Triples, model: AttentionOnly) -> None:
    other = AttentionOnly(model.W_V.contiguous(), model.W_KQ.clone())
    assert other.W_V.stride() != model.W_V.stride()
    drawn = world.drawn(20, generators())
    for layout in (model, other):
        layout.step(drawn, 1.0, 1.0)
    assert torch.equal(other.W_V, model.W_V)


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf"), torch.tensor([1.0, -1.0, 1.0])])
def test_negative_or_non_finite_rates_are_refused(world: Triples, model: AttentionOnly, rate: float | Tensor) -> None:
    with pytest.raises(DataError, match="learning rates must be finite and >= 0"):
        model.step(world.drawn(2, generators()), 1.0, rate)


def test_a_loss_is_finite_if_the_probability_underflows_float32(world: Triples) -> None:
    far = torch.zeros(len(SEEDS), world.tokens, world.tokens)
    far[:, 0] = 1000.0  # all prompts favour token 0
    model, drawn = AttentionOnly(far, torch.zeros_like(far)), world.drawn(2, generators())
    single = Examples(drawn.subject, drawn.query, drawn.answer, drawn.weight.float())
    assert 80 < float(model.step(single, 0.0, 0.0).min()) < 1000


def test_runs_do_not_depend_on_what_they_are_batched_with(world: Triples) -> None:
    def trained(seeds: tuple[int, ...]) -> Tensor:
        world = make_triples(seeds, subjects=12, relations=3, answers=9)
        model = attention_only(world.tokens, seeds)
        drawing = [torch.Generator().manual_seed(seed) for seed in seeds]
        for _ in range(20):
            model.step(world.drawn(16, drawing), 5.0, 5.0)
        return model.W_V[-1]

    assert float((trained((0, 1, 2)) - trained((2,))).abs().max()) < 1e-12  # batched sums may round differently


def test_attention_salience_and_relevance_are_those_of_a_hand_worked_case() -> None:
    # two tokens of prompt (s 0, q 1), answers 2 and 3; W_V phi(s) = (0, 0, 2, 1), W_V phi(q) = (0, 0, 0, 4)
    W_V = torch.zeros(1, 4, 4, dtype=torch.float64)
    W_V[0, 2, 0], W_V[0, 3, 0], W_V[0, 3, 1] = 2.0, 1.0, 4.0
    W_KQ = torch.zeros(1, 4, 4, dtype=torch.float64)
    W_KQ[0, 0, 1] = torch.tensor(3.0).log()  # scores log 3 and 0: attention 3/4 and 1/4
    model, asked = AttentionOnly(W_V, W_KQ), asks(0, 1, 2)
    assert float(model.attention(asked)) == pytest.approx(0.75)
    assert model.logits(asked).flatten().tolist() == pytest.approx([0, 0, 1.5, 1.75])
    assert float(model.salience(asked)) == 2.0
    p = torch.tensor([0, 0, 1.5, 1.75], dtype=torch.float64).softmax(0)
    assert float(model.relevance(asked).subject) == pytest.approx(float(2 * (1 - p[2]) - p[3]))
    assert float(model.relevance(asked).prompt) == pytest.approx(float(-4 * p[3]))
    assert not bool(model.correct(asked))
    assert bool(model.correct(asked, torch.tensor([[0.95]], dtype=torch.float64)))
