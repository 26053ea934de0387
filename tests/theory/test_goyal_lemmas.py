"""Each lemma of Goyal et al. (2024) on instances that meet its assumptions, and on instances that drop one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbalance.theory.context import ContextModel, losses, shared_pull
from attnbalance.theory.context_points import (
    CRITICAL,
    Points,
)
from attnbalance.theory.goyal import (
    lemma_1,
    lemma_2,
    lemma_3,
    lemma_4,
    lemma_5,
    lemma_6,
    lemma_7,
)
from tests.theory.dense_context import Instance, dense_attention, dense_logits, instances
from tests.theory.goyal_instances import (
    CLOSE,
    USUAL,
    dense_pulls,
    fails,
    jittered,
    noisy,
    printed_lead,
    says,
    trained,
)

every = settings(max_examples=200, deadline=None, derandomize=True)


@every
@given(instances(), st.sampled_from([-math.inf, -2.0, 1.0]))
def test_lemma_1_holds_of_any_weights(instance: Instance, self_score: float) -> None:
    outcome = lemma_1(*noisy(instance, self_score))
    says(outcome)
    assert outcome.measured["largest entry"] > 1e-6


def test_lemma_1_sees_a_gradient_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnbalance.theory.goyal_lemmas.losses", lambda *args: 1.001 * losses(*args))
    assert not lemma_1(*noisy(USUAL)).holds


@every
@given(instances(), st.sampled_from([-math.inf, -2.0, 1.0]))
def test_lemma_2_holds_of_any_attention(instance: Instance, self_score: float) -> None:
    says(lemma_2(*noisy(instance, self_score)))


def test_lemma_2_is_what_automatic_differentiation_gives() -> None:
    model, points = noisy(USUAL, -1.0)
    pulls = [float(pull.mean()) for pull in shared_pull(model, points)]
    assert pulls == pytest.approx(dense_pulls(model, points), abs=CLOSE)


def test_lemma_2_fails_without_orthonormal_embeddings() -> None:
    model, points = noisy(USUAL)
    tokens = model.embeddings.tokens.clone()
    tokens[..., 0] += 0.3 * model.embeddings.theta_C
    fails(lemma_2(replace(model, embeddings=replace(model.embeddings, tokens=tokens)), points), "Assumptions 2-4")


def test_lemma_2_as_printed_has_a_wrong_factor_and_a_wrong_sign() -> None:
    model, points = noisy(USUAL, 1.0)
    model = replace(model, W_V=model.W_V + model.W_KQ.mT)  # else r's value is nearly the same for all answers
    critical = points.of(CRITICAL)
    wrong, right = (dense_lemma_2(model, critical, swapped) for swapped in (True, False))
    true = dense_pulls(model, critical)[1]
    assert right == pytest.approx(true, abs=CLOSE)
    assert abs(wrong - true) > 1e-4
    model, points = USUAL.build()
    m_C, _ = printed_lead(USUAL)
    # sigma_r = 0: theta_C gets +m / (4 sqrt(2)), theta_S the opposite
    assert dense_pulls(model, points.of(CRITICAL)) == pytest.approx(
        (-m_C / math.sqrt(32), m_C / math.sqrt(32)), abs=CLOSE
    )


def dense_lemma_2(model: ContextModel, points: Points, printed: bool) -> float:
    """theta_C's part by Lemma 2, with the printed last term sigma_s sigma_r or with sigma_c sigma_r."""
    total, values = 0.0, model.values[0]
    for c, s in zip(points.context.tolist(), points.subject.tolist(), strict=True):
        (_, (sigma_c, sigma_s, sigma_r)) = dense_attention(model, model.W_KQ[0], c, s)
        error = -dense_logits(model, model.W_V[0], model.W_KQ[0], c, s).softmax(dim=0)
        error[c] += 1
        last = sigma_s if printed else sigma_c
        mix = (sigma_c - sigma_c**2) * values[:, c] - sigma_s * sigma_c * values[:, s] - last * sigma_r * values[:, -1]
        total += float(mix @ error) / math.sqrt(2)
    return total / len(points)


@every
@given(instances(widest=2.0))
def test_lemma_3_holds(instance: Instance) -> None:
    says(lemma_3(*trained(*instance.build())))


def test_lemma_3_fails_without_symmetry() -> None:
    fails(lemma_3(*trained(*jittered(USUAL))), "Assumption 6")


@every
@given(instances(widest=2.0))
def test_lemma_4_holds(instance: Instance) -> None:
    outcome = lemma_4(*trained(*instance.build()))
    says(outcome)
    assert (outcome.measured["m_C"], outcome.measured["m_C+S"]) == pytest.approx(printed_lead(instance), abs=CLOSE)


def test_lemma_4_fails_without_even_attention_or_symmetry() -> None:
    fails(lemma_4(*trained(*noisy(USUAL))), "Assumption 5")
    fails(lemma_4(*trained(*USUAL.build(self_score=0.0))), "Assumption 5")
    fails(lemma_4(*trained(*jittered(USUAL))), "Assumption 6")


@every
@given(instances(widest=2.0))
def test_lemma_5_holds(instance: Instance) -> None:
    outcome = lemma_5(*trained(*instance.build()))
    says(outcome)
    expected = pytest.approx(printed_lead(instance), abs=CLOSE)
    assert (outcome.measured["m_C"], outcome.measured["m_C+S"]) == expected


def test_lemma_5_fails_without_its_order_of_deltas() -> None:
    # well below chance: exp(o_r) and K_S take probability as well, so that 1 / K_A is a little more than needed
    fails(lemma_5(*trained(*replace(USUAL, delta_C=0.005).build())), "Definition 2")
    fails(lemma_5(*trained(*replace(USUAL, delta_M=0.2).build(ordered=False))), "Definition 3")


@every
@given(instances())
def test_lemma_6_holds_with_the_condition_added(instance: Instance) -> None:
    says(lemma_6(*trained(*instance.build())))


def test_lemma_6_is_false_as_printed() -> None:
    # delta_C > 3 / (K_A - 1) and delta_M > 2 delta_C, as Definitions 2 and 3 ask
    instance = Instance(1, 1, 6, 1000, 0.5, 0.004, 1.0, 1.0, seed=0)
    assert instance.delta_C > 3 / (instance.answers - 1)
    m_C, m_CS = printed_lead(instance)
    assert (m_C, m_CS) == pytest.approx((1.4, -5.2), abs=0.05)
    fails(lemma_6(*trained(*instance.build())), "added: odds")


@every
@given(instances(more=1))
def test_lemma_7_holds_with_enough_points(instance: Instance) -> None:
    says(lemma_7(*trained(*instance.build())))


def test_lemma_7_fails_with_too_few_c_points() -> None:
    instance = Instance(1, 3, 12, 60, 0.8, 0.3, 1.0, 0.5, seed=1)
    m_C, m_CS = printed_lead(instance)
    assert m_C < 4 * abs(m_CS)
    outcome = lemma_7(*trained(*instance.build()))
    fails(outcome, "added: |D_C| m_C")
    assert outcome.measured["A_2"] == pytest.approx(2 / 4 * (m_C + 4 * m_CS), abs=CLOSE)


def test_lemma_7_fails_where_memory_is_weaker_than_the_context() -> None:
    fails(lemma_7(*trained(*replace(USUAL, delta_M=0.2).build(ordered=False))), "Definition 3")
