"""The context model against the same sums written out point by point, and against automatic differentiation."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbalance.errors import DataError, DivergenceError
from attnbalance.theory.context import (
    ContextModel,
    attention,
    attention_descent,
    context_model,
    context_share,
    descended,
    embed,
    key_pull,
    logits,
    losses,
    shared_pull,
    train,
    value_descent,
)
from attnbalance.theory.context_points import (
    CONFLICT,
    CRITICAL,
    RECALL,
    Points,
    Vocabulary,
)
from tests.theory.dense_context import Instance, dense_attention, dense_descent, dense_logits, dense_loss, instances

# Sums of some 40 products of numbers of order 1 in float64: 40 * 1e-16, times a few for solving for W_V.
CLOSE = {"atol": 1e-10, "rtol": 0}
USUAL = Instance(4, 3, 12, 20, 0.7, 0.3, 1.0, 0.5, seed=1)


def noisy(instance: Instance, self_score: float = -math.inf) -> tuple[ContextModel, Points]:
    """An instance with noise on W_V and W_KQ, which violates Assumptions 5 and 6."""
    model, points = instance.build(self_score=self_score)
    noise = torch.Generator().manual_seed(instance.seed)
    W_V, W_KQ = (W + torch.randn(W.shape, generator=noise, dtype=W.dtype) for W in (model.W_V, model.W_KQ))
    return replace(model, W_V=W_V, W_KQ=W_KQ), points


@pytest.mark.parametrize("seed", [None, 3])
def test_embeddings_have_the_products_that_assumptions_2_to_4_say(seed: int | None) -> None:
    vocabulary = Vocabulary(3, 5)
    made = embed(vocabulary, 12, runs=2, seed=seed)
    expected = torch.zeros(9, 9, dtype=torch.float64)
    expected[:3, :3] = expected[3:8, 3:8] = 0.5
    expected.fill_diagonal_(1.0)
    for run in range(2):
        torch.testing.assert_close(made.tokens[run].T @ made.tokens[run], expected, **CLOSE)
        on_S, on_C = (direction[run] @ made.tokens[run] for direction in (made.theta_S, made.theta_C))
        half = math.sqrt(0.5)
        torch.testing.assert_close(on_S, torch.tensor([half] * 3 + [0.0] * 6, dtype=torch.float64), **CLOSE)
        torch.testing.assert_close(on_C, torch.tensor([0.0] * 3 + [half] * 5 + [0.0], dtype=torch.float64), **CLOSE)
    assert (seed is None) == bool((made.tokens[0] == made.tokens[1]).all())


def test_embeddings_that_are_not_orthonormal_are_refused_by_name() -> None:
    vocabulary = Vocabulary(2, 3)
    good = embed(vocabulary, seed=0)
    values = torch.zeros(1, 6, 6, dtype=torch.float64)
    context_model(vocabulary, good, values)
    turned = good.tokens.clone()
    turned[..., 0] = turned[..., 1]
    for bad in (
        replace(good, tokens=2 * good.tokens),
        replace(good, tokens=turned),
        replace(good, theta_S=good.theta_C),
    ):
        with pytest.raises(DataError, match="embeddings not orthonormal"):
            context_model(vocabulary, bad, values)


def test_too_few_dimensions_are_refused() -> None:
    assert embed(Vocabulary(2, 3)).tokens.shape == (1, 8, 6)
    with pytest.raises(DataError, match="at least K_S \\+ K_A \\+ 3 = 8, got 7"):
        embed(Vocabulary(2, 3), 7)


@pytest.mark.parametrize("self_score", [-math.inf, -1.0, 0.5])
def test_forward_pass_equals_the_sums_written_out(self_score: float) -> None:
    model, points = noisy(USUAL, self_score)
    sigma, z, loss = attention(model, points)[0], logits(model, points)[0], losses(model, points)[0]
    for p, (c, s) in enumerate(zip(points.context.tolist(), points.subject.tolist(), strict=True)):
        tokens, weights = dense_attention(model, model.W_KQ[0], c, s)
        keys = [c, s, model.vocabulary.relation]
        expected = [float(weights[tokens.index(y)]) if y in tokens else 0.0 for y in keys]
        assert sigma[p].tolist() == pytest.approx(expected, abs=1e-12)
        torch.testing.assert_close(z[p], dense_logits(model, model.W_V[0], model.W_KQ[0], c, s), **CLOSE)
    torch.testing.assert_close(loss.mean(), dense_loss(model, model.W_V[0], model.W_KQ[0], points), **CLOSE)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(instances(), st.sampled_from([-math.inf, -2.0, 1.0]))
def test_gradients_are_those_of_the_forward_pass(instance: Instance, self_score: float) -> None:
    model, points = noisy(replace(instance, critical=1, overlapping=1), self_score)
    by_V, by_KQ = dense_descent(model, points)
    torch.testing.assert_close(value_descent(model, points)[0], by_V, **CLOSE)
    torch.testing.assert_close(attention_descent(model, points)[0], by_KQ, **CLOSE)
    on_S, on_C = shared_pull(model, points)
    r = model.embeddings.tokens[0, :, -1]
    assert float(on_S.mean()) == pytest.approx(float(model.embeddings.theta_S[0] @ by_KQ @ r), abs=1e-10)
    assert float(on_C.mean()) == pytest.approx(float(model.embeddings.theta_C[0] @ by_KQ @ r), abs=1e-10)


def test_gradient_keeps_its_digits_where_attention_is_saturated() -> None:
    model, points = USUAL.build()
    critical, r = points.of(CRITICAL), model.embeddings.tokens[0, :, -1]
    far = replace(model, W_KQ=(100.0 * math.sqrt(2) * model.embeddings.theta_C[0][:, None] * r)[None])
    pulled = key_pull(far, critical)[0, :, 0]
    # sigma_c sigma_s (v(c, c) - v(c, s)) (1 - p), with sigma_s = exp(-100) and p = delta_C
    gap = math.log(0.3 / 0.7) + math.log(19 * math.e + math.exp(0.5) + 12) - 1.0
    assert pulled.tolist() == pytest.approx([math.exp(-100) * gap * 0.7] * len(critical), rel=1e-9)


def test_runs_do_not_see_each_other() -> None:
    (first, points), (second, _) = noisy(USUAL), noisy(replace(USUAL, seed=2))
    embeddings = type(first.embeddings)(
        *(
            torch.cat([getattr(m.embeddings, name) for m in (first, second)])
            for name in ("tokens", "theta_S", "theta_C")
        )
    )
    both = replace(
        first, embeddings=embeddings, W_V=torch.cat([first.W_V, second.W_V]), W_KQ=torch.cat([first.W_KQ, second.W_KQ])
    )
    trained = descended(both, points, attention_rate=0.3, value_rate=0.7)
    for run, alone in enumerate((first, second)):
        after = descended(alone, points, attention_rate=0.3, value_rate=0.7)
        torch.testing.assert_close(trained.W_V[run], after.W_V[0], **CLOSE)
        torch.testing.assert_close(trained.W_KQ[run], after.W_KQ[0], **CLOSE)


def test_context_share_is_the_context_answers_part_of_both() -> None:
    model, points = noisy(USUAL)
    tests = points.of(CONFLICT)
    for p, (c, s, a) in enumerate(
        zip(tests.context.tolist(), tests.subject.tolist(), tests.stored.tolist(), strict=True)
    ):
        odds = dense_logits(model, model.W_V[0], model.W_KQ[0], c, s).exp()
        assert float(context_share(model, tests)[0, p]) == pytest.approx(
            float(odds[c] / (odds[c] + odds[a])), abs=1e-12
        )
    with pytest.raises(DataError, match="a context and a stored answer"):
        context_share(model, points)


def test_a_step_trains_what_has_a_rate_and_lowers_the_loss() -> None:
    model, points = USUAL.build()
    before = losses(model, points).mean()
    for rates in ({"attention_rate": 0.1}, {"value_rate": 0.1}, {"attention_rate": 0.1, "value_rate": 0.1}):
        after = descended(model, points, **rates)
        assert bool(torch.equal(after.W_KQ, model.W_KQ)) == ("attention_rate" not in rates)
        assert bool(torch.equal(after.W_V, model.W_V)) == ("value_rate" not in rates)
        assert losses(after, points).mean() < before


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf, None])
def test_learning_rates_that_are_not_above_0_are_refused(rate: float | None) -> None:
    model, points = USUAL.build()
    with pytest.raises(DataError, match="learning rates must be finite and > 0"):
        descended(model, points, value_rate=rate)


def test_training_is_its_steps_one_after_another() -> None:
    model, points = USUAL.build()
    path = train(model, points, lambda now: {"W": now.W_V}, steps=2, at=[0, 2], value_rate=0.5)
    twice = descended(descended(model, points, value_rate=0.5), points, value_rate=0.5)
    assert path.steps == (0, 2)
    torch.testing.assert_close(path.values["W"][0], model.W_V, **CLOSE)
    torch.testing.assert_close(path.values["W"][1], twice.W_V, **CLOSE)


def test_a_rate_that_diverges_is_named() -> None:
    model, points = USUAL.build()
    recall = points.of(RECALL)
    torn = replace(recall, subject=recall.subject[:1].expand(2))  # two answers to one question: no weights fit both
    uneven = Points(
        (RECALL,) * 3, *(field[[0, 0, 1]] for field in (torn.context, torn.subject, torn.answer, torn.stored))
    )
    train(model, uneven, lambda now: {}, steps=50, at=[], value_rate=1.0)
    with pytest.raises(DivergenceError, match="lower the learning rate"):
        train(model, uneven, lambda now: {}, steps=50, at=[], value_rate=1e3)
