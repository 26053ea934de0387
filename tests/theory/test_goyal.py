"""Each proposition and theorem of Goyal et al. (2024) on instances that meet its assumptions, or drop one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnbalance.errors import DataError
from attnbalance.theory.context import ContextModel, context_model, descended, embed, logits, shared_pull
from attnbalance.theory.context_points import (
    CONFLICT,
    CRITICAL,
    OVERLAPPING,
    RECALL,
    Points,
    Scalars,
    Vocabulary,
    lay_out,
    stored_values,
)
from attnbalance.theory.goyal import (
    proposition_1,
    proposition_2,
    proposition_3,
    second_phase_rate,
    theorem_1,
)
from tests.theory.dense_context import Instance, dense_descent, dense_logits, instances
from tests.theory.goyal_instances import (
    CLOSE,
    USUAL,
    dense_pulls,
    fails,
    printed_lead,
    says,
    trained,
)

every = settings(max_examples=200, deadline=None, derandomize=True)


@every
@given(instances())
def test_proposition_1_holds_with_lemma_6s_condition(instance: Instance) -> None:
    outcome = proposition_1(*trained(*instance.build()))
    says(outcome)
    assert math.isfinite(outcome.measured["eta*"])


def test_proposition_1_measures_what_automatic_differentiation_gives() -> None:
    model, points = trained(*USUAL.build())
    outcome = proposition_1(model, points)
    along = dense_descent(model, points)[1]
    after = replace(model, W_KQ=model.W_KQ + outcome.measured["learning rate"] * along)
    for t, stage in enumerate((model, after)):
        pulls = (outcome.measured[f"theta_S at t = {t}"], outcome.measured[f"theta_C at t = {t}"])
        assert pulls == pytest.approx(dense_pulls(stage, points), abs=CLOSE)
    m_C, m_CS = printed_lead(USUAL)
    # eq. 79 for 4 C and 3 C+S points; A_1 and A_2 of eq. 92 and 93
    assert outcome.measured["theta_C at t = 0"] == pytest.approx((4 * m_C + 3 * m_CS) / 7 / math.sqrt(32), abs=CLOSE)
    assert outcome.measured["A_1"] == pytest.approx((5 * m_C + 3 * m_CS) * 2 / 7, abs=CLOSE)
    assert outcome.measured["A_2"] == pytest.approx((4 * m_C + 4 * m_CS) * 2 / 7, abs=CLOSE)


@every
@given(instances(more=1))
def test_proposition_1s_eta_is_where_the_sign_turns(instance: Instance) -> None:
    model, points = trained(*instance.build())
    star = second_phase_rate(model, points)
    before, after = (
        shared_pull(descended(model, points, attention_rate=factor * star), points)[1].mean()
        for factor in (0.999, 1.001)
    )
    assert before > 0 > after
    # by hand: scores move by eta A / 8 (eq. 95-98), and a C point's pull is sigma_c sigma_s (1 - p) times its gap
    outcome = proposition_1(model, points)
    others = (instance.answers - 1) * math.exp(instance.o_c) + math.exp(instance.o_r) + instance.subjects
    own, memory = (math.log(delta / (1 - delta)) + math.log(others) for delta in (instance.delta_C, instance.delta_M))
    pulls = []
    for subject, name in ((instance.o_c, "A_1"), (memory, "A_2")):
        sigma = 1 / (1 + math.exp(-star / 8 * outcome.measured[name]))
        p = 1 / (1 + others / math.exp(sigma * own + (1 - sigma) * subject))
        pulls.append(
            math.exp(-star / 8 * abs(outcome.measured[name])) * max(sigma, 1 - sigma) ** 2 * (1 - p) * (own - subject)
        )
    assert instance.critical * pulls[0] == pytest.approx(-instance.overlapping * pulls[1], rel=1e-6)


def test_proposition_1_fails_with_far_fewer_c_points() -> None:
    outcome = proposition_1(*trained(*Instance(1, 7, 14, 60, 0.8, 0.3, 1.0, 0.5, seed=1).build()))
    fails(outcome, "|D_C| >= |D_C+S|")
    assert outcome.measured["theta_C at t = 0"] < 0


def test_proposition_1_fails_in_its_first_phase_without_lemma_6s_condition() -> None:
    outcome = proposition_1(*trained(*Instance(2, 2, 10, 1000, 0.5, 0.004, 1.0, 1.0, seed=0).build()))
    fails(outcome, "added: odds")
    assert outcome.measured["theta_C at t = 0"] < 0


def test_proposition_1_has_no_second_phase_where_memory_is_weaker_than_the_context() -> None:
    outcome = proposition_1(*trained(*replace(USUAL, delta_M=0.2).build(ordered=False)))
    fails(outcome, "Definition 3", "the learning rate")
    assert outcome.measured["eta*"] == math.inf


def test_proposition_1_has_no_second_phase_with_c_points_only() -> None:
    model, points = USUAL.build()
    outcome = proposition_1(model, points.of(CRITICAL))
    assert not outcome.holds
    assert not outcome.assumptions["there are C and C+S points, and no others"]


def test_proposition_1_has_no_second_phase_at_a_small_learning_rate() -> None:
    model, points = trained(*USUAL.build())
    fails(proposition_1(model, points, 0.5 * second_phase_rate(model, points)), "the learning rate is at least eta*")


def test_proposition_1_needs_even_attention() -> None:
    # r attends to subjects in C+S points and to contexts in C points, so C points have no pull
    model, points = trained(*USUAL.build())
    tilt = torch.zeros(model.vocabulary.size, dtype=torch.float64)
    tilt[points.of(CRITICAL).context] = 20.0
    W_KQ = torch.linalg.pinv(model.embeddings.tokens[0]).T @ tilt[:, None] * model.embeddings.tokens[0, :, -1]
    outcome = proposition_1(replace(model, W_KQ=W_KQ[None]), points)
    fails(outcome, "Assumption 5")
    assert outcome.measured["theta_C at t = 0"] < 0


def test_eq_104s_bound_needs_more_than_the_assumptions() -> None:
    # many subjects and o_c near 0: v(c, c) - v(c, s) is above logit(delta_C) + log(K_A)
    instance = Instance(4, 3, 50, 60, 0.7, 0.3, 0.05, 0.05, seed=1)
    model, points = instance.build()
    c = int(points.context[0])
    gap = float(model.values[0, c, c] - model.values[0, c, 0])
    assert gap > math.log(0.3 / 0.7) + math.log(60)
    says(proposition_1(*trained(model, points)))


@every
@given(instances(), st.floats(-6.0, -3.0))
def test_proposition_2_holds(instance: Instance, self_score: float) -> None:
    # a little attention on r leaves the first phase's sign, unless memory leads as much as it may
    instance = replace(
        instance, critical=instance.critical + 4, subjects=instance.subjects + 4, answers=instance.answers + 6
    )
    model, points = instance.build(self_score=self_score)
    says(proposition_2(model, points.of(CRITICAL, OVERLAPPING, RECALL)))


def test_proposition_2_measures_what_automatic_differentiation_gives_and_shrinks_the_mean() -> None:
    model, points = USUAL.build(self_score=-1.0)
    old, new = points.of(CRITICAL, OVERLAPPING), points.of(CRITICAL, OVERLAPPING, RECALL)
    measured = proposition_2(model, new).measured
    for name, used in (("old", old), ("new", new)):
        pulls = (measured[f"theta_S, mean, {name}"], measured[f"theta_C, mean, {name}"])
        assert pulls == pytest.approx(dense_pulls(model, used), abs=CLOSE)
    # eq. 12 as printed, with the mean of eq. 5, is off by the share of old points
    assert measured["theta_C, mean, new"] == pytest.approx(7 / 9 * measured["theta_C, mean, old"], abs=CLOSE)
    assert measured["theta_C, mean, new"] < 0.8 * measured["theta_C, mean, old"]
    # eq. 121 with its factor: sigma_s sigma_r (v(a, s) - v(a, r)) (1 - p) / sqrt(2), twice
    sigma_s = 1 / (1 + math.exp(-1.0))
    others = 59 * math.e + math.exp(0.5) + 12
    lead = math.log(0.7 / 0.3) + math.log(others) - 1.0
    p = 1 / (1 + others / math.exp(1.0 + sigma_s * lead))
    added = 2 * sigma_s * (1 - sigma_s) * lead * (1 - p) / math.sqrt(2)
    assert measured["theta_S, sum, new"] - measured["theta_S, sum, old"] == pytest.approx(added, abs=CLOSE)


def test_proposition_2_fails_where_r_takes_no_part() -> None:
    model, points = USUAL.build()
    fails(proposition_2(model, points.of(CRITICAL, OVERLAPPING, RECALL)), "r takes part")


def test_proposition_2_fails_with_points_that_are_not_memorised() -> None:
    model, points = USUAL.build(self_score=-1.0)
    known = points.of(CRITICAL, OVERLAPPING, RECALL)
    other = replace(known, answer=torch.where(known.context < 0, points.of(CONFLICT).answer[0], known.answer))
    outcome = proposition_2(model, other)
    assert not outcome.holds
    assert not outcome.assumptions["the [s, r] points are memorised: v(a, s) > v(a, r)"]


def test_proposition_2_fails_for_means_where_the_pull_on_subjects_was_up_already() -> None:
    # seven weakly remembered C+S points pull harder on subjects than the S points, which are known best, do
    instance = Instance(1, 7, 14, 60, 0.6, 0.02, 1.0, 0.5, seed=1)
    model, points = instance.build(self_score=-6.0)
    fails(proposition_2(model, points.of(CRITICAL, OVERLAPPING, RECALL)), "theta_S's part is below 0")


def test_proposition_2_needs_both_kinds_of_points() -> None:
    model, points = USUAL.build(self_score=0.0)
    with pytest.raises(DataError, match="lay out both"):
        proposition_2(model, points.of(CRITICAL))


@every
@given(instances(widest=2.0), st.floats(1e-3, 1e3))
def test_proposition_3_holds_at_any_rate(instance: Instance, learning_rate: float) -> None:
    says(proposition_3(*trained(*instance.build()), learning_rate))


def test_proposition_3_holds_in_the_corners() -> None:
    for o_c in (1e-3, 6.0):
        for o_r in (1e-3, o_c):
            for critical, overlapping in ((1, 1), (30, 1), (1, 30)):
                for room in (7, 300):
                    subjects = critical + overlapping + 4
                    for memory, context in ((0.999, 0.99), (0.999, 1.01 / (subjects + room)), (0.1, 0.09)):
                        instance = Instance(
                            critical, overlapping, subjects, subjects + room, memory, context, o_c, o_r, seed=0
                        )
                        outcome = proposition_3(*trained(*instance.build()))
                        assert outcome.holds, outcome


def moved(model: ContextModel, points: Points) -> Tensor:
    """The change of every v(i, y) in one step on W_V at rate 1, by automatic differentiation."""
    phi = model.embeddings.tokens[0]
    return phi.T @ dense_descent(model, points)[0] @ phi


def test_proposition_3_on_the_way_has_these_changes() -> None:
    model, points = trained(*USUAL.build())
    changes, n = moved(model, points), len(points)
    probabilities = logits(model, points)[0].softmax(dim=-1)
    own = probabilities[torch.arange(n), points.answer]
    other = probabilities[:, int(points.answer.max()) + 1]  # of an answer that no point asks for
    rest = probabilities[:, : USUAL.subjects].sum(-1) + probabilities[:, -1]
    j, weight = 0, torch.tensor([2.0] + [1.0] * (n - 1), dtype=torch.float64)
    s_j, c_j = int(points.subject[j]), int(points.answer[j])
    # eq. 129 with softmax(z)_c for delta_C and the other contexts' probabilities once
    rise = (2 * (1 - own[j]) + (weight * rest).sum() - other[1:].sum()) / (8 * n)
    assert float(changes[c_j, s_j]) == pytest.approx(float(rise), abs=CLOSE)
    twice = rise - other[1:].sum() / (8 * n)
    assert abs(float(changes[c_j, s_j] - twice)) > 1e-4
    # eq. 136 with (|S| + 1) / 2 for |S|, eq. 137 as it is
    for token, factor in ((USUAL.subjects - 1, (USUAL.subjects + 1) / 2), (model.vocabulary.relation, 1.0)):
        fall = -factor * (weight * probabilities[:, token]).sum() / (4 * n)
        assert float(changes[token, s_j]) == pytest.approx(float(fall), abs=CLOSE)
    # eq. 144 and 145
    for k in range(1, n):
        apart = (1 - own[k]) + other[k] - 2 * other[j] - 2 * (1 - own[j])
        assert float(changes[points.answer[k], s_j] - changes[c_j, s_j]) == pytest.approx(
            float(apart / (8 * n)), abs=CLOSE
        )
        assert apart < 0
    unasked = int(points.answer.max()) + 1
    apart = (-2 * (1 - own[j]) - 2 * other[j]) / (8 * n)
    assert float(changes[unasked, s_j] - changes[c_j, s_j]) == pytest.approx(float(apart), abs=CLOSE)


def test_proposition_3_fails_where_one_point_does_not_look_at_its_subject() -> None:
    model, points = trained(*USUAL.build())
    tilt = torch.zeros(model.vocabulary.size, dtype=torch.float64)
    tilt[points.subject[0]] = -20.0
    tilt[points.subject[1:]] = 20.0
    W_KQ = torch.linalg.pinv(model.embeddings.tokens[0]).T @ tilt[:, None] * model.embeddings.tokens[0, :, -1]
    fails(proposition_3(replace(model, W_KQ=W_KQ[None]), points), "Assumption 5")


def test_proposition_3_fails_where_c_s_points_are_known_worse_than_c_points() -> None:
    # stored answers far below chance: nothing but their losses moves the shared directions
    instance = Instance(1, 16, 21, 23, 1e-9, 0.999, 3.0, 0.5, seed=0)
    fails(proposition_3(*trained(*instance.build(ordered=False))), "Definition 3")


@every
@given(instances())
def test_theorem_1_holds(instance: Instance) -> None:
    model, points = instance.build()
    outcome = theorem_1(model, points.of(CRITICAL, OVERLAPPING, CONFLICT))
    says(outcome)


def share(model: ContextModel, c: int, s: int, a: int) -> float:
    z = dense_logits(model, model.W_V[0], model.W_KQ[0], c, s)
    return float(1 / (1 + (z[a] - z[c]).exp()))


def test_theorem_1_measures_what_the_naive_model_does() -> None:
    model, points = Instance(2, 1, 8, 60, 0.7, 0.3, 1.0, 0.5, seed=1).build()
    data, tests = points.of(CRITICAL, OVERLAPPING), points.of(CONFLICT)
    outcome = theorem_1(model, points.of(CRITICAL, OVERLAPPING, CONFLICT))
    shares, rate = [], outcome.measured["learning rate"]
    triples = list(zip(tests.context.tolist(), tests.subject.tolist(), tests.stored.tolist(), strict=True))
    for t in range(3):
        shares.append([share(model, *triple) for triple in triples])
        assert outcome.measured[f"mean M_C at t = {t}"] == pytest.approx(sum(shares[-1]) / len(triples), abs=CLOSE)
        model = replace(model, W_KQ=model.W_KQ + rate * dense_descent(model, data)[1])
    odds = [[math.log(p / (1 - p)) for p in row] for row in shares]
    first = min(b - a for a, b in zip(odds[0], odds[1], strict=True))
    second = max(b - a for a, b in zip(odds[1], odds[2], strict=True))
    assert second < 0 < first
    assert outcome.measured["least change of log-odds, first step"] == pytest.approx(first, abs=CLOSE)
    assert outcome.measured["greatest change of log-odds, second step"] == pytest.approx(second, abs=CLOSE)


def test_theorem_1_has_no_fall_with_c_points_only() -> None:
    model, points = USUAL.build()
    outcome = theorem_1(model, points.of(CRITICAL, CONFLICT))
    assert not outcome.holds
    assert not outcome.assumptions["there are C and C+S points, and no others"]
    assert outcome.measured["greatest change of log-odds, second step"] > 0


def test_theorem_1_has_no_fall_at_a_small_learning_rate() -> None:
    model, points = USUAL.build()
    used = points.of(CRITICAL, OVERLAPPING, CONFLICT)
    small = 0.5 * second_phase_rate(*trained(model, points))
    fails(theorem_1(model, used, small), "the learning rate")


def test_theorem_1_fails_for_a_context_of_training() -> None:
    # a C point's own direction keeps rising while the shared one falls
    model, points = USUAL.build()
    used = points.of(CRITICAL, OVERLAPPING, CONFLICT)
    context = torch.where(used.subject >= points.of(CONFLICT).subject[0], used.context[0], used.context)
    answer = torch.where(used.subject >= points.of(CONFLICT).subject[0], used.context[0], used.answer)
    fails(theorem_1(model, replace(used, context=context, answer=answer)), "the conflict's c is not in D")


def test_theorem_1_fails_for_a_subject_of_training() -> None:
    # a C+S point's own direction rises in the first step, and with few points that outweighs the shared one
    vocabulary = Vocabulary(4, 40)
    points = lay_out(vocabulary, critical=1, overlapping=1, conflicts=1)
    points = replace(points, subject=torch.tensor([0, 1, 1]), stored=points.stored[[0, 1, 1]])
    values = stored_values(vocabulary, points, Scalars.same(0.33, 0.1, 1.0, 0.5))
    model = context_model(vocabulary, embed(vocabulary), values)
    fails(theorem_1(model, points), "the conflict's s is not in D")


def test_theorem_1_needs_test_points() -> None:
    model, points = USUAL.build()
    with pytest.raises(DataError, match="conflicts and points to train on"):
        theorem_1(model, points.of(CRITICAL, OVERLAPPING))
