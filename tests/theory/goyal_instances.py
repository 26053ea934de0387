"""Instances for the tests of Goyal et al. (2024), and the quantities of the proofs computed independently."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from attnbalance.theory.context import ContextModel, context_model
from attnbalance.theory.context_points import (
    CRITICAL,
    OVERLAPPING,
    Points,
    Scalars,
    stored_values,
)
from attnbalance.theory.outcome import Outcome
from tests.theory.dense_context import Instance, dense_descent

# Sums of some 100 products of numbers of order 1 in float64: 100 * 1e-16, times a few for solving for W_V.
CLOSE = 1e-10
USUAL = Instance(4, 3, 12, 60, 0.7, 0.3, 1.0, 0.5, seed=1)


def trained(model: ContextModel, points: Points) -> tuple[ContextModel, Points]:
    return model, points.of(CRITICAL, OVERLAPPING)


def noisy(instance: Instance, self_score: float = -math.inf, size: float = 1.0) -> tuple[ContextModel, Points]:
    """An instance with a random W_KQ, which violates Assumption 5."""
    model, points = instance.build(self_score=self_score)
    noise = torch.randn(model.W_KQ.shape, generator=torch.Generator().manual_seed(instance.seed), dtype=torch.float64)
    return replace(model, W_KQ=size * noise), points


def jittered(instance: Instance) -> tuple[ContextModel, Points]:
    """Facts with different memory strengths, which violates Assumption 6."""
    model, points = instance.build()
    deltas = torch.linspace(instance.delta_M, 0.99, len(points), dtype=torch.float64)[None]
    scalars = replace(Scalars.same(0.5, instance.delta_C, instance.o_c, instance.o_r), delta_memory=deltas)
    values = stored_values(model.vocabulary, points, scalars)
    return context_model(model.vocabulary, model.embeddings, values), points


def says(outcome: Outcome) -> None:
    assert outcome.applies, outcome
    assert outcome.holds, outcome


def fails(outcome: Outcome, *dropped: str) -> None:
    """The conclusion is false, and exactly the assumptions with these beginnings are not met."""
    assert not outcome.holds, outcome
    assert not outcome.refuted
    missing = [name for name, met in outcome.assumptions.items() if not met]
    assert len(missing) == len(dropped), missing
    for name in dropped:
        assert any(assumption.startswith(name) for assumption in missing), missing


def dense_pulls(model: ContextModel, points: Points) -> tuple[float, float]:
    """theta_S^T G phi(r) and theta_C^T G phi(r), by automatic differentiation of the naive forward pass."""
    along = dense_descent(model, points)[1] @ model.embeddings.tokens[0, :, -1]
    return float(model.embeddings.theta_S[0] @ along), float(model.embeddings.theta_C[0] @ along)


def printed_lead(instance: Instance) -> tuple[float, float]:
    """m_C and m_C+S from the softmax over the answer, the other answers, r and the subjects."""
    own, memory = (math.log(delta / (1 - delta)) for delta in (instance.delta_C, instance.delta_M))
    others = (instance.answers - 1) * math.exp(instance.o_c) + math.exp(instance.o_r) + instance.subjects
    own, memory = own + math.log(others), memory + math.log(others)
    leads = []
    for subject in (instance.o_c, memory):
        z = math.exp((own + subject) / 2)
        leads.append((own - subject) * others / (others + z))
    return leads[0], leads[1]
