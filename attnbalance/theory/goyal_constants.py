"""The constants of Goyal et al. (2024), appendix C.1, of an instance, and the assumptions that it meets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from attnbalance.errors import DataError
from attnbalance.theory.context import ContextModel, attention, not_orthonormal
from attnbalance.theory.context_points import CRITICAL, OVERLAPPING, Points, Scalars, stored_values

SAME = 1e-8
"""Two values of an instance, of order 1 to 10, count as equal if their absolute difference is below this."""

UNIQUE = "Assumption 1: each subject and each answer occurs once"
ORTHONORMAL = "Assumptions 2-4: embeddings are orthonormal but for the shared directions"
EVEN = "Assumption 5: attention is even on context and subject, none on r"
SYMMETRIC = "Assumption 6: values are alike in all points"
BOTH = "there are C and C+S points, and no others"
PREDICTIVE = "Definition 2: delta_C > 1 / K_A"
STRONGER = "Definition 3: delta_M > delta_C"
MORE_CRITICAL = "|D_C| >= |D_C+S|"
WIDE = "added: odds(delta_M) <= odds(delta_C)^2 * (K_A - 1 + (exp(o_r) + K_S) / exp(o_c))"
ENOUGH = "added: |D_C| m_C > (|D_C+S| + 1) |m_C+S|, so that A_2 > 0"


@dataclass(frozen=True)
class Constants:
    """The paper's constants of one instance. A constant is NaN if it needs a kind of point that is missing.

    `gap_C` is v_0(c, c) - v_0(c, s) of a C point and `gap_CS` that of a C+S point (Lemma 3); `lambda_C` is 1 -
    softmax(z)_c of a C point under even attention (eq. 45), `m_C` is <v_0(c) - v_0(s), e_c - softmax(z)> (Lemma 4), in
    nats, `A_1` is 8 / learning rate times the change of score(c) - score(s) of a C point in one step (eq. 92);
    `lambda_CS`, `m_CS` and `A_2` are those of a C+S point (eq. 46 and 93). A_1 and A_2 hold for any numbers of points.
    """

    critical: int
    overlapping: int
    delta_C: float
    delta_M: float
    o_c: float
    o_r: float
    gap_C: float
    gap_CS: float
    lambda_C: float
    lambda_CS: float
    m_C: float
    m_CS: float
    A_1: float
    A_2: float


def _logit(p: float) -> float:
    return math.log(p / (1 - p)) if 0 < p < 1 else math.nan


def read_constants(model: ContextModel, points: Points) -> Constants:
    """The constants, from the first point of each kind. Raises `DataError` for a model of several runs."""
    if len(model.W_V) != 1:
        raise DataError(f"expected a model of one run, got {len(model.W_V)}: a statement is checked on one instance")
    values, vocabulary = model.values[0].detach(), model.vocabulary
    o_c, o_r = float(values[vocabulary.subjects, -1]), float(values[-1, -1])
    contexts, known = points.context[points.context >= 0], points.stored >= 0
    beliefs = values.softmax(dim=0)
    delta_C = float(beliefs[contexts[0], contexts[0]]) if len(contexts) else math.nan
    delta_M = float(beliefs[points.stored, points.subject][known][0]) if bool(known.any()) else math.nan
    rest = math.log((vocabulary.answers - 1) * math.exp(o_c) + math.exp(o_r) + vocabulary.subjects)
    gap_C, gap_CS = _logit(delta_C) + rest - o_c, _logit(delta_C) - _logit(delta_M)
    lambda_C = 1 / (1 + math.exp((_logit(delta_C) - rest + o_c) / 2))
    lambda_CS = 1 / (1 + math.exp((_logit(delta_C) + _logit(delta_M)) / 2))
    m_C, m_CS = lambda_C * gap_C, lambda_CS * gap_CS
    n_C, n_CS = points.kinds.count(CRITICAL), points.kinds.count(OVERLAPPING)
    n = max(n_C + n_CS, 1)
    steps = (2 / n * ((n_C + 1) * m_C + n_CS * m_CS), 2 / n * (n_C * m_C + (n_CS + 1) * m_CS))
    return Constants(n_C, n_CS, delta_C, delta_M, o_c, o_r, gap_C, gap_CS, lambda_C, lambda_CS, m_C, m_CS, *steps)


def symmetric(model: ContextModel, points: Points) -> bool:
    """Whether the values of all tokens of these points satisfy Assumption 6."""
    c = read_constants(model, points)
    deltas = [0.5 if math.isnan(delta) else delta for delta in (c.delta_M, c.delta_C)]
    scalars = Scalars.same(deltas[0], deltas[1], c.o_c, c.o_r)
    expected = stored_values(model.vocabulary, points, scalars, ordered=False)
    used = torch.cat([points.context[points.context >= 0], points.subject, torch.tensor([model.vocabulary.relation])])
    return bool((model.values - expected)[..., used].abs().max() < SAME)


def even(model: ContextModel, points: Points) -> bool:
    """Whether r attends equally to context and subject, and not to itself."""
    wanted = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    return bool((attention(model, points) - wanted).abs().max() < SAME)


def setting(model: ContextModel, points: Points) -> dict[str, bool]:
    """Assumptions 1 to 6, and the part of Definitions 2 and 3 that the proofs use: delta_M > delta_C > 1 / K_A.

    The paper requires delta_C > 3 / (K_A - 1) and delta_M > 2 delta_C, which no proof needs.
    """
    c = read_constants(model, points)
    return {
        UNIQUE: not points.repeated,
        ORTHONORMAL: not_orthonormal(model.vocabulary, model.embeddings) < SAME,
        EVEN: even(model, points),
        SYMMETRIC: symmetric(model, points),
        BOTH: c.critical > 0 and c.overlapping > 0 and c.critical + c.overlapping == len(points),
        PREDICTIVE: c.delta_C > 1 / model.vocabulary.answers,
        STRONGER: c.delta_M > c.delta_C,
    }


def wide(c: Constants) -> Mapping[str, bool]:
    """The condition that Lemma 6 lacks: the context's lead over chance is at least memory's lead over the context."""
    return {WIDE: c.gap_C >= -c.gap_CS}
