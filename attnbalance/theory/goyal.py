"""Propositions 1 to 3 and Theorem 1 of Goyal et al. (2024), checked on an instance; re-exports Lemmas 1 to 7."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import cast

import torch
from jaxtyping import Float
from scipy.optimize import brentq
from torch import Tensor

from attnbalance.errors import DataError
from attnbalance.theory.context import ContextModel, attention_descent, context_share, descended, shared_pull
from attnbalance.theory.context_points import CONFLICT, CRITICAL, RECALL, Points
from attnbalance.theory.goyal_constants import (
    BOTH,
    EVEN,
    MORE_CRITICAL,
    SYMMETRIC,
    UNIQUE,
    read_constants,
    setting,
    symmetric,
    wide,
)
from attnbalance.theory.goyal_lemmas import SOURCE, lemma_1, lemma_2, lemma_3, lemma_4, lemma_5, lemma_6, lemma_7
from attnbalance.theory.outcome import Outcome

__all__ = [
    "lemma_1",
    "lemma_2",
    "lemma_3",
    "lemma_4",
    "lemma_5",
    "lemma_6",
    "lemma_7",
    "proposition_1",
    "proposition_2",
    "proposition_3",
    "second_phase_rate",
    "theorem_1",
]

BEYOND = 1.01
"""The default learning rate as a multiple of eta*, where the gradient's sign changes."""
LARGE_STEP = "the learning rate is at least eta*, and leaves attention that a float can tell from all or nothing"


def second_phase_rate(model: ContextModel, points: Points) -> float:
    """eta*: the smallest learning rate at which contexts lose score after one step, theta_C^T G phi(r) < 0.

    Computed by doubling and Brent's method on the exact gradient. Infinity if no such rate is found before the gradient
    underflows: it shrinks like exp(-eta A_1 / 8), and eta* grows with the number of points. If A_2 > 0 the sign changes
    only once, since a C+S point's share of the gradient then grows with the rate. 0 if contexts lose score from the
    start, which contradicts the first phase. Raises `DataError` for a model of several runs.
    """
    read_constants(model, points)
    along = attention_descent(model, points)

    def balance(rate: float) -> float:
        pulls = shared_pull(replace(model, W_KQ=model.W_KQ + rate * along), points)[1][0]
        return float(pulls.sum() / pulls.abs().sum())

    if balance(0.0) < 0:
        return 0.0
    high = 1.0
    while not balance(high) < 0:
        high *= 2
        if high > 1e12:
            return math.inf
    return cast(float, brentq(balance, high / 2 if high > 1 else 0.0, high))


def _pulls(model: ContextModel, points: Points) -> Float[Tensor, 2]:
    """theta_S^T G phi(r) and theta_C^T G phi(r) of the mean loss, for a model of one run."""
    return torch.stack([pull[0].mean() for pull in shared_pull(model, points)])


def _chosen(model: ContextModel, points: Points, learning_rate: float | None) -> tuple[float, float]:
    """eta* and the learning rate: the given one, or by default `BEYOND` times eta*."""
    rate = second_phase_rate(model, points)
    if learning_rate is not None:
        return rate, learning_rate
    return rate, BEYOND * rate if 0 < rate < math.inf else 1.0


def _first_proposition(model: ContextModel, points: Points) -> dict[str, bool]:
    c = read_constants(model, points)
    return setting(model, points) | {MORE_CRITICAL: c.critical >= c.overlapping} | dict(wide(c))


def proposition_1(model: ContextModel, points: Points, learning_rate: float | None = None) -> Outcome:
    """W_V frozen: at t = 0 contexts gain score and subjects lose it; after one step at a large rate, the reverse.

    The points are C and C+S, with |D_C| >= |D_C+S|. The rate is 1.01 eta* by default; eta* is computed numerically,
    since eq. 107 only proves that it exists. First phase: Lemma 6's condition is needed too. Eq. 78's text gives -m_C+S
    for C+S points; m_C+S is right. Eq. 79 and 85-93 assume equal numbers of points (eq. 86's first sum runs to n/2);
    here any numbers are allowed. Second phase: eq. 104 needs exp(o_r) + K_S <= exp(o_c) and a probability of c above 1
    / K_A; a larger constant also works, so the conclusion holds. The second phase after this one step may be very weak,
    since its gradient shrinks like exp(-eta A_1 / 8) and eta* grows with the number of points. With 80 C and 80 C+S
    points, delta_M = 0.7 and delta_C = 0.3 (K_S = 163, K_A = 270, o_c = 1, o_r = 0.5), eta* is 122 and theta_C's part
    goes from 0.35 to -3e-29. In many small steps the sign changes at an ordinary size, which the proposition does not
    claim.
    """
    star, rate = _chosen(model, points, learning_rate)
    c = read_constants(model, points)
    before, after = (_pulls(stage, points) for stage in (model, descended(model, points, attention_rate=rate)))
    measured = {
        "theta_S at t = 0": float(before[0]),
        "theta_C at t = 0": float(before[1]),
        "theta_S at t = 1": float(after[0]),
        "theta_C at t = 1": float(after[1]),
        "eta*": star,
        "learning rate": rate,
        **{name: getattr(c, name) for name in ("m_C", "m_CS", "lambda_C", "lambda_CS", "A_1", "A_2")},
    }
    assumptions = _first_proposition(model, points) | {LARGE_STEP: rate >= star and bool((after != 0).all())}
    holds = bool((before[0] < 0) & (before[1] > 0) & (after[0] > 0) & (after[1] < 0))
    claim = "contexts gain score at t = 0 and lose it at t = 1; subjects do the opposite"
    return Outcome(SOURCE.format("Proposition 1"), claim, assumptions, measured, holds)


def proposition_2(model: ContextModel, points: Points) -> Outcome:
    """Memorised points [s, r] raise theta_S's part of the gradient and leave theta_C's unchanged, at t = 0.

    "old" are the points of other kinds, "new" all points. Eq. 12 is an equality of summed losses; with the means of
    eq. 5, theta_C's part shrinks by |old| / |new|. Eq. 11 holds for sums, and for means if the old part is negative, as
    in Proposition 1. Eq. 121 lacks the factor sigma_s sigma_r: if r has no attention (self_score minus infinity), an S
    point has no gradient. So r must attend to itself, which Assumption 5 excludes for C and C+S points only.
    """
    old, added = points.of(*set(points.kinds) - {RECALL}), points.of(RECALL)
    if not len(old) or not len(added):
        raise DataError(f"expected points of kind {RECALL} and of others, got {set(points.kinds)}: lay out both")
    c = read_constants(model, points)
    sums = [torch.stack([pull[0].sum() for pull in shared_pull(model, chosen)]) for chosen in (old, points)]
    means = [total / len(chosen) for total, chosen in zip(sums, (old, points), strict=True)]
    values = model.values[0]
    stored = bool((added.stored == added.answer).all())
    lead = values[added.answer, added.subject] - values[added.answer, -1]
    assumptions = {
        UNIQUE: not points.repeated,
        SYMMETRIC: symmetric(model, points),
        "the [s, r] points are memorised: v(a, s) > v(a, r)": stored and float(lead.min()) > 0,
        "r takes part in attention": math.isfinite(model.self_score),
        "theta_S's part is below 0 before": float(sums[0][0]) < 0,
    }
    measured = {
        "theta_S, sum, old": float(sums[0][0]),
        "theta_S, sum, new": float(sums[1][0]),
        "theta_C, sum, old": float(sums[0][1]),
        "theta_C, sum, new": float(sums[1][1]),
        "theta_S, mean, old": float(means[0][0]),
        "theta_S, mean, new": float(means[1][0]),
        "theta_C, mean, old": float(means[0][1]),
        "theta_C, mean, new": float(means[1][1]),
        "least lead": float(lead.min()),
        "delta_M": c.delta_M,
    }
    unmoved = math.isclose(float(sums[0][1]), float(sums[1][1]), rel_tol=1e-12, abs_tol=1e-14)
    holds = unmoved and all(bool(after[0] > before[0]) for before, after in (sums, means))
    claim = "S points raise the pull on subjects and do not change the summed pull on contexts"
    return Outcome(SOURCE.format("Proposition 2"), claim, assumptions, measured, holds)


def proposition_3(model: ContextModel, points: Points, learning_rate: float = 1.0) -> Outcome:
    """One step on W_V makes the value of a C point's subject predict its answer better, at any learning rate.

    The points are C and C+S, in any numbers. Errors in the proof: eq. 128's count is |A| - [i = j], so 129, 132 and 135
    subtract the other contexts' probabilities once, not twice; their delta_C is the probability softmax(z)_c; eq. 136's
    |S| is (|S| + 1) / 2; eq. 139 lacks two exponentials; eq. 144 is -(1 - p_k) - q_k times eta / 8n if k is a C point,
    where p_k is its softmax(z)_c and q_k that of another answer. The p and q of a C+S point are at least as favourable,
    and |D| <= K_A keeps the rise of v(c, s) positive, so no further condition is needed.
    """
    c = read_constants(model, points)
    critical = points.of(CRITICAL)
    trained = descended(model, points, value_rate=learning_rate)
    before, after = (
        stage.values[0].log_softmax(dim=0)[critical.answer, critical.subject] for stage in (model, trained)
    )
    rise = after - before
    measured = {
        "least rise, nats": float(rise.min()) if len(critical) else math.nan,
        "greatest rise, nats": float(rise.max()) if len(critical) else math.nan,
        "learning rate": learning_rate,
        "delta_C": c.delta_C,
        "delta_M": c.delta_M,
    }
    holds = measured["least rise, nats"] > 0
    claim = "the subject's value predicts the answer of each C point better after one step"
    return Outcome(SOURCE.format("Proposition 3"), claim, setting(model, points), measured, holds)


def theorem_1(model: ContextModel, points: Points, learning_rate: float | None = None) -> Outcome:
    """M_C of a knowledge conflict rises in the first step and falls in the second, W_V frozen.

    The conflicts are the test points; training uses all others. A conflict's s must not be in D either, or its own
    direction changes too (eq. 150 takes this for granted), and v(a, c) = v(c, s) = o_c. Eq. 165 is monotone in sigma_c,
    not "delta_C", because v(c, c) and v(a, s) are above o_c; delta_M > delta_C is not used. The second fall may be too
    small to change M_C in floating point, so the verdict uses the exact change of its log-odds, computed from the
    change of the scores.
    """
    tests, trained = points.of(CONFLICT), points.of(*set(points.kinds) - {CONFLICT})
    if not len(tests) or not len(trained):
        raise DataError(f"expected conflicts and points to train on, got {set(points.kinds)}: lay out both")
    star, rate = _chosen(model, trained, learning_rate)
    once = descended(model, trained, attention_rate=rate)
    twice = descended(once, trained, attention_rate=rate)
    moves = [_moved_odds(a, trained, tests, rate) for a in (model, once)]
    shares = [float(context_share(stage, tests).mean()) for stage in (model, once, twice)]
    values = model.values[0]
    lead = values[tests.stored, tests.subject] - values[tests.stored, tests.context]
    assumptions = _first_proposition(model, trained) | {
        LARGE_STEP: rate >= star and bool((moves[1] != 0).all()),
        SYMMETRIC: symmetric(model, points),
        EVEN: setting(model, points)[EVEN],
        BOTH: setting(model, trained)[BOTH],
        "the conflict's c is not in D": not bool(torch.isin(tests.context, trained.context).any()),
        "the conflict's s is not in D": not bool(torch.isin(tests.subject, trained.subject).any()),
        "the conflict's s -> a is memorised": bool((lead > 0).all()),
    }
    measured = {f"mean M_C at t = {t}": share for t, share in enumerate(shares)} | {
        "least change of log-odds, first step": float(moves[0].min()),
        "greatest change of log-odds, second step": float(moves[1].max()),
        "eta*": star,
        "learning rate": rate,
    }
    holds = bool((moves[0] > 0).all() & (moves[1] < 0).all())
    return Outcome(SOURCE.format("Theorem 1"), "M_C(1) > M_C(0) and M_C(1) > M_C(2)", assumptions, measured, holds)


def _moved_odds(model: ContextModel, trained: Points, tests: Points, rate: float) -> Float[Tensor, " point"]:
    """The change in the log-odds of each test point's M_C by a step on W_KQ, with no attention on r.

    Subtracting the attention before from that after would lose changes far below 1e-16. The identity
    s(x + d) - s(x) = s(x + d) s(-x) (1 - exp(-d)) of the logistic function s keeps them.
    """
    tokens, r = model.embeddings.tokens[0], model.embeddings.tokens[0, :, -1]
    difference = tokens[:, tests.context] - tokens[:, tests.subject]
    x = difference.T @ (model.W_KQ[0] @ r)
    d = difference.T @ (rate * attention_descent(model, trained)[0] @ r)
    more_context = torch.sigmoid(x + d) * torch.sigmoid(-x) * -torch.expm1(-d)
    ahead = model.values[0][tests.context] - model.values[0][tests.stored]
    every = torch.arange(len(tests))
    return more_context * (ahead[every, tests.context] - ahead[every, tests.subject])
