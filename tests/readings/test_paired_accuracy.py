"""Two models' accuracy on the same prompts."""

from __future__ import annotations

import math

import pytest

from attnbalance.data.scoring import CONTAINMENT
from attnbalance.errors import DataError
from attnbalance.readings.paired_accuracy import compare_accuracy
from attnbalance.readings.steering import rescue
from tests.recalls import a_recall


def test_mcnemar_is_the_binomial_test_of_the_prompts_that_one_alone_gets_right():
    a, b = a_recall([True] * 9 + [False] * 3), a_recall([True] * 2 + [False] * 7 + [True] + [False] * 2)
    found = compare_accuracy(a, b)
    assert (found.a_only, found.b_only) == (7, 1)
    assert found.p_value == pytest.approx(2 * (1 + 8) / 2**8)  # P(at most 1 of 8), on both sides
    assert found.interval.mean == pytest.approx(6 / 12)


def test_a_model_does_not_differ_from_itself():
    a = a_recall([True, False, True])
    found = compare_accuracy(a, a)
    assert (found.a_only, found.b_only, found.p_value) == (0, 0, 1.0)
    assert found.interval.mean == 0
    assert not found.interval.excludes_zero


def test_the_difference_turned_round_changes_its_sign():
    a, b = a_recall([i % 2 == 0 for i in range(20)]), a_recall([i % 5 == 0 for i in range(20)])
    there, back = compare_accuracy(a, b), compare_accuracy(b, a)
    assert there.p_value == back.p_value
    assert (there.interval.mean, there.interval.low, there.interval.high) == pytest.approx(
        (-back.interval.mean, -back.interval.high, -back.interval.low), abs=0.06
    )


def test_the_order_of_prompts_changes_nothing():
    a, b = a_recall([i % 2 == 0 for i in range(20)]), a_recall([i % 5 == 0 for i in range(20)])
    assert compare_accuracy(a, b.at(b.prompt_ids[::-1])) == compare_accuracy(a, b)


@pytest.mark.parametrize("sign", [1, -1])
def test_two_questions_are_too_few_to_say_that_one_model_is_always_better(sign):
    better, worse = (True, False)[::sign]
    few = compare_accuracy(a_recall([better] * 2), a_recall([worse] * 2)).interval
    assert few.mean == sign
    assert not few.excludes_zero
    many = compare_accuracy(a_recall([better] * 40), a_recall([worse] * 40)).interval
    assert many.excludes_zero
    low = 2 * 40 / (40 + 1.959964**2) - 1  # Wilson's lower end for 40 of 40 gains; the rest could be losses
    assert sorted((sign * many.low, sign * many.high)) == pytest.approx([low, 1], abs=1e-6)


def test_no_difference_on_few_questions_is_no_proof_of_none():
    same = a_recall([True, False] * 10)
    found = compare_accuracy(same, same)
    other = 1.959964**2 / (20 + 1.959964**2)  # Wilson's upper end for 0 of 20 questions answered differently
    assert (found.a_only, found.b_only, found.p_value) == (0, 0, 1.0)
    assert (found.interval.mean, found.interval.low, found.interval.high) == pytest.approx((0, -other, other), abs=1e-6)


def test_a_difference_needs_the_interval_and_the_exact_test():
    few = compare_accuracy(a_recall([True] * 5 + [False] * 795), a_recall([False] * 800))
    assert few.interval.excludes_zero
    assert few.p_value == pytest.approx(0.0625)  # 2 / 2 ** 5
    assert not few.differs
    enough = compare_accuracy(a_recall([True] * 12 + [False] * 788), a_recall([False] * 800))
    assert enough.differs
    one_subject = compare_accuracy(a_recall([True] * 30, subjects=["s"] * 30), a_recall([False] * 30))
    assert one_subject.p_value < 0.05
    assert not one_subject.differs


@pytest.mark.parametrize("b", [[False, False], [True, True]])
def test_one_subject_gives_no_interval_for_gains_that_are_alike(b):
    interval = compare_accuracy(a_recall([True, True], subjects=["s", "s"]), a_recall(b)).interval
    assert math.isnan(interval.low)
    assert math.isnan(interval.high)


def test_a_difference_in_accuracy_stays_between_minus_and_plus_all():
    interval = compare_accuracy(a_recall([True] * 5 + [False]), a_recall([False] * 6)).interval
    assert 0 < interval.low < 5 / 6 < interval.high <= 1


def test_one_subject_gives_no_interval_for_mixed_gains():
    found = compare_accuracy(
        a_recall([True, False], subjects=["s", "s"]), a_recall([False, False], subjects=["s", "s"])
    )
    assert math.isnan(found.interval.low)


def test_recalls_of_two_scorings_are_not_compared():
    recall = a_recall([True, False] * 5)
    with pytest.raises(DataError, match="one scoring, got whole-words and containment"):
        compare_accuracy(recall, recall.by(CONTAINMENT))
    with pytest.raises(DataError, match="recalls of one scoring"):
        rescue(recall, recall.by(CONTAINMENT), recall)


def test_recalls_of_different_prompts_are_not_compared():
    with pytest.raises(DataError, match="same prompts"):
        compare_accuracy(a_recall([True]), a_recall([True, True]))
