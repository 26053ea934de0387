"""Vocabulary, points and stored values, against hand-written lists and the softmax of each column."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from attnbalance.errors import DataError
from attnbalance.theory.context_points import (
    CONFLICT,
    COUNTERFACTUAL,
    CRITICAL,
    OVERLAPPING,
    RECALL,
    Scalars,
    Vocabulary,
    lay_out,
    stored_values,
)
from tests.theory.dense_context import Instance, instances

# Sums of some 40 products of numbers of order 1 in float64: 40 * 1e-16, times a few for solving for W_V.
CLOSE = {"atol": 1e-10, "rtol": 0}


@pytest.mark.parametrize(("subjects", "answers"), [(3, 3), (4, 3), (0, 3)])
def test_a_vocabulary_needs_more_answers_than_subjects(subjects: int, answers: int) -> None:
    with pytest.raises(DataError, match="more answers than subjects"):
        Vocabulary(subjects, answers)


def test_points_are_laid_out_with_a_subject_and_answers_of_their_own() -> None:
    points = lay_out(Vocabulary(9, 20), critical=2, overlapping=1, recall=1, counterfactual=2, conflicts=2)
    assert points.kinds == (CRITICAL,) * 2 + (OVERLAPPING, RECALL) + (COUNTERFACTUAL,) * 2 + (CONFLICT,) * 2
    assert points.subject.tolist() == list(range(8))
    assert points.answer.tolist() == list(range(9, 17))
    assert points.context.tolist() == [9, 10, 11, -1, 13, 14, 15, 16]
    assert points.stored.tolist() == [-1, -1, 11, 12, 17, 18, 19, 20]
    assert not points.repeated
    assert replace(points, subject=points.subject * 0).repeated
    assert points.of(RECALL, CRITICAL).subject.tolist() == [0, 1, 3]


@pytest.mark.parametrize(
    "counts",
    [
        {"critical": 5, "overlapping": 0},
        {"critical": 1, "overlapping": 0, "conflicts": 3},
        {"critical": -1, "overlapping": 2},
    ],
)
def test_more_points_than_subjects_or_answers_are_refused(counts: dict[str, int]) -> None:
    with pytest.raises(DataError, match="fit 4 subjects and 6 answers"):
        lay_out(Vocabulary(4, 6), **counts)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(instances(widest=2.0))
def test_stored_values_have_the_softmax_that_the_deltas_say(instance: Instance) -> None:
    model, points = instance.build()
    beliefs = model.values[0].softmax(dim=0)
    answers = range(instance.subjects, instance.subjects + instance.answers)
    for answer in answers:
        assert float(beliefs[answer, answer]) == pytest.approx(instance.delta_C, abs=1e-10)
    for s, a in zip(points.subject.tolist(), points.stored.tolist(), strict=True):
        column = model.values[0, :, s]
        rest = [i for i in answers if i != a]
        torch.testing.assert_close(column[rest], torch.full_like(column[rest], instance.o_c), **CLOSE)
        assert float(column[: instance.subjects].abs().max()) < 1e-10
        assert float(column[-1]) == pytest.approx(instance.o_r, abs=1e-10)
        if a >= 0:
            assert float(beliefs[a, s]) == pytest.approx(instance.delta_M, abs=1e-10)


def test_deltas_out_of_range_or_order_are_refused() -> None:
    vocabulary = Vocabulary(3, 5)
    points = lay_out(vocabulary, critical=1, overlapping=1)
    for memory, context in ((1.0, 0.2), (0.5, 0.0), (-0.1, 0.2)):
        with pytest.raises(DataError, match="between 0 and 1"):
            stored_values(vocabulary, points, Scalars.same(memory, context, 1.0, 1.0))
    with pytest.raises(DataError, match="delta_memory above delta_context"):
        stored_values(vocabulary, points, Scalars.same(0.3, 0.3, 1.0, 1.0))
    stored_values(vocabulary, points, Scalars.same(0.3, 0.3, 1.0, 1.0), ordered=False)
