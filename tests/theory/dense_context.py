"""The context model written out point by point with plain matrices, and random instances of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from attnbalance.theory.context import ContextModel, context_model, embed
from attnbalance.theory.context_points import Points, Scalars, Vocabulary, lay_out, stored_values


def dense_attention(model: ContextModel, W_KQ: Tensor, c: int, s: int) -> tuple[list[int], Tensor]:
    """The keys of a point and r's attention on them; c < 0 means no context; self_score -inf excludes r."""
    r = model.vocabulary.relation
    tokens = [token for token in (c, s) if token >= 0] + ([r] if model.self_score > -math.inf else [])
    phi = model.embeddings.tokens[0]
    scores = torch.stack([phi[:, y] @ W_KQ @ phi[:, r] + (model.self_score if y == r else 0.0) for y in tokens])
    weights = scores.exp()
    return tokens, weights / weights.sum()


def dense_logits(model: ContextModel, W_V: Tensor, W_KQ: Tensor, c: int, s: int) -> Tensor:
    """Eq. 4."""
    tokens, sigma = dense_attention(model, W_KQ, c, s)
    phi = model.embeddings.tokens[0]
    mixed = sum(weight * (W_V @ phi[:, y]) for weight, y in zip(sigma, tokens, strict=True))
    return torch.stack([phi[:, i] @ mixed for i in range(model.vocabulary.size)])


def dense_loss(model: ContextModel, W_V: Tensor, W_KQ: Tensor, points: Points) -> Tensor:
    """Eq. 5."""
    total = torch.zeros((), dtype=torch.float64)
    for c, s, a in zip(points.context.tolist(), points.subject.tolist(), points.answer.tolist(), strict=True):
        z = dense_logits(model, W_V, W_KQ, c, s)
        total = total + z.exp().sum().log() - z[a]
    return total / len(points)


def dense_descent(model: ContextModel, points: Points) -> tuple[Tensor, Tensor]:
    """-grad of the mean loss by W_V and by W_KQ, by automatic differentiation."""
    W_V, W_KQ = (W[0].detach().clone().requires_grad_() for W in (model.W_V, model.W_KQ))
    by_V, by_KQ = torch.autograd.grad(dense_loss(model, W_V, W_KQ, points), (W_V, W_KQ))
    return -by_V, -by_KQ


@dataclass(frozen=True)
class Instance:
    """Numbers of points, sizes and scalars of one instance that meets Assumptions 1 to 6."""

    critical: int
    overlapping: int
    subjects: int
    answers: int
    delta_M: float
    delta_C: float
    o_c: float
    o_r: float
    seed: int

    def build(self, *, self_score: float = -math.inf, ordered: bool = True) -> tuple[ContextModel, Points]:
        """The model, and its points of all kinds but counterfactual ones."""
        vocabulary = Vocabulary(self.subjects, self.answers)
        points = lay_out(vocabulary, critical=self.critical, overlapping=self.overlapping, recall=2, conflicts=2)
        scalars = Scalars.same(self.delta_M, self.delta_C, self.o_c, self.o_r)
        values = stored_values(vocabulary, points, scalars, ordered=ordered)
        return context_model(vocabulary, embed(vocabulary, seed=self.seed), values, self_score=self_score), points


@st.composite
def instances(draw: st.DrawFn, *, widest: float = 0.98, more: int = 0) -> Instance:
    """Instances in which memory's lead over the context is at most `widest` times the context's lead over chance.

    There are at least `more` more C than C+S points.
    """
    overlapping = draw(st.integers(1, 4))
    critical = overlapping + more + draw(st.integers(0, 4))
    subjects = critical + overlapping + 4 + draw(st.integers(0, 4))
    answers = subjects + 2 + draw(st.integers(0, 30))
    o_c = draw(st.floats(0.01, 3.0))
    o_r = o_c * draw(st.floats(0.01, 1.0))
    chance = math.log(answers - 1 + (math.exp(o_r) + subjects) / math.exp(o_c))
    odds = draw(st.floats(0.05, 0.95)) * (chance + 1.0) - chance  # log-odds of delta_C, some above chance
    odds = max(odds, -math.log(answers - 1) + 0.01)
    memory = odds + draw(st.floats(0.05, widest)) * (odds + chance)
    deltas = [1 / (1 + math.exp(-log_odds)) for log_odds in (memory, odds)]
    return Instance(critical, overlapping, subjects, answers, deltas[0], deltas[1], o_c, o_r, draw(st.integers(0, 99)))
