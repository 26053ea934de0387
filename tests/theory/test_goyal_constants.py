"""The constants of Goyal et al. (2024) against the naive model, and which assumption each departure breaks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from attnbalance.errors import DataError
from attnbalance.theory.context import ContextModel
from attnbalance.theory.context_points import CRITICAL, OVERLAPPING, Points
from attnbalance.theory.goyal_constants import (
    BOTH,
    EVEN,
    ORTHONORMAL,
    PREDICTIVE,
    STRONGER,
    SYMMETRIC,
    UNIQUE,
    even,
    read_constants,
    setting,
    symmetric,
    wide,
)
from tests.theory.dense_context import Instance, dense_descent, dense_logits, instances
from tests.theory.goyal_instances import CLOSE, USUAL, jittered, noisy, printed_lead, trained


@settings(max_examples=50, deadline=None, derandomize=True)
@given(instances(widest=2.0))
def test_constants_are_those_of_the_naive_model(instance: Instance) -> None:
    model, points = trained(*instance.build())
    constants = read_constants(model, points)
    assert (constants.critical, constants.overlapping) == (instance.critical, instance.overlapping)
    scalars = (instance.delta_C, instance.delta_M, instance.o_c, instance.o_r)
    assert (constants.delta_C, constants.delta_M, constants.o_c, constants.o_r) == pytest.approx(scalars, abs=CLOSE)
    assert (constants.m_C, constants.m_CS) == pytest.approx(printed_lead(instance), abs=CLOSE)
    phi, along = model.embeddings.tokens[0], dense_descent(model, points)[1]
    for kind, wrong, gap, moved in (
        (CRITICAL, constants.lambda_C, constants.gap_C, constants.A_1),
        (OVERLAPPING, constants.lambda_CS, constants.gap_CS, constants.A_2),
    ):
        chosen = points.of(kind)
        c, s = int(chosen.context[0]), int(chosen.subject[0])
        z = dense_logits(model, model.W_V[0], model.W_KQ[0], c, s)
        assert wrong == pytest.approx(float(1 - z.softmax(0)[c]), abs=CLOSE)
        assert gap == pytest.approx(float(model.values[0, c, c] - model.values[0, c, s]), abs=CLOSE)
        assert moved == pytest.approx(float(8 * (phi[:, c] - phi[:, s]) @ along @ phi[:, -1]), abs=CLOSE)


def test_constants_of_a_missing_kind_are_nan() -> None:
    model, points = USUAL.build()
    constants = read_constants(model, points.of(CRITICAL))
    assert math.isnan(constants.delta_M)
    assert math.isnan(constants.m_CS)
    assert constants.m_C == pytest.approx(printed_lead(USUAL)[0], abs=CLOSE)


def repeated(model: ContextModel, points: Points) -> tuple[ContextModel, Points]:
    """The first point occurs twice."""
    index = torch.tensor([0, *range(len(points))])
    fields = (points.context, points.subject, points.answer, points.stored)
    return model, Points((points.kinds[0], *points.kinds), *(field[index] for field in fields))


def stretched(model: ContextModel, points: Points) -> tuple[ContextModel, Points]:
    """The embeddings are not orthonormal; values and attention scores are those of the original ones."""
    stretch = torch.eye(model.W_V.shape[-1], dtype=torch.float64)
    stretch[0, 1] = 0.1
    inverse = torch.linalg.inv(stretch)
    tokens = stretch @ model.embeddings.tokens
    W_V, W_KQ = inverse.T @ model.W_V @ inverse, inverse.T @ model.W_KQ @ inverse
    return replace(model, embeddings=replace(model.embeddings, tokens=tokens), W_V=W_V, W_KQ=W_KQ), points


BUILD: dict[str, Callable[[], tuple[ContextModel, Points]]] = {
    UNIQUE: lambda: repeated(*trained(*USUAL.build())),
    ORTHONORMAL: lambda: stretched(*trained(*USUAL.build())),
    EVEN: lambda: trained(*noisy(USUAL)),
    SYMMETRIC: lambda: trained(*jittered(USUAL)),
    BOTH: lambda: (USUAL.build()[0], USUAL.build()[1].of(CRITICAL)),
    PREDICTIVE: lambda: trained(*replace(USUAL, delta_C=0.005).build()),
    STRONGER: lambda: trained(*replace(USUAL, delta_M=0.2).build(ordered=False)),
}
"""For each assumption an instance that departs from it."""


@pytest.mark.parametrize("assumption", BUILD)
def test_a_departure_breaks_its_assumption(assumption: str) -> None:
    assert all(setting(*trained(*USUAL.build())).values())
    unmet = {name for name, met in setting(*BUILD[assumption]()).items() if not met}
    # C points alone have no delta_M to compare with delta_C
    assert unmet == ({BOTH, STRONGER} if assumption == BOTH else {assumption})


def test_attention_is_even_only_without_attention_on_r() -> None:
    assert even(*trained(*USUAL.build()))
    # exp(-17) / 2 = 2e-8 is above the tolerance SAME = 1e-8
    assert not even(*trained(*USUAL.build(self_score=-17.0)))


def test_a_value_of_another_token_breaks_symmetry_only_if_a_point_uses_it() -> None:
    model, points = trained(*USUAL.build())
    inverse = torch.linalg.pinv(model.embeddings.tokens[0])
    for token, expected in ((USUAL.subjects - 1, True), (int(points.subject[0]), False)):
        values = model.values[0].clone()
        values[0, token] += 0.1
        assert symmetric(replace(model, W_V=(inverse.T @ values @ inverse)[None]), points) == expected


def test_the_added_condition_turns_where_memory_leads_as_much_as_the_context() -> None:
    log_odds = math.log(0.3 / 0.7)
    chance = math.log(59 + (math.exp(0.5) + 12) / math.e)
    for factor, expected in ((0.99, True), (1.01, False)):
        delta_M = 1 / (1 + math.exp(-(log_odds + factor * (log_odds + chance))))
        constants = read_constants(*trained(*replace(USUAL, delta_M=delta_M).build()))
        assert list(wide(constants).values()) == [expected]


def test_constants_are_read_from_one_run() -> None:
    model, points = USUAL.build()
    two = replace(model, W_V=model.W_V.expand(2, -1, -1), W_KQ=model.W_KQ.expand(2, -1, -1))
    with pytest.raises(DataError, match="a model of one run, got 2"):
        read_constants(two, points)
