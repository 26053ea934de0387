"""Propositions 1 to 3 and Theorem 1 of Goyal et al. (2024), tried on an instance; Lemmas 1 to 7 beside them."""

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
from attnbalance.theory.goyal_lemmas import PLACE, lemma_1, lemma_2, lemma_3, lemma_4, lemma_5, lemma_6, lemma_7
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
"""How many times the smallest learning rate of the second phase is taken, to stand clear of where the sign turns."""
LARGE_STEP = "the learning rate is at least eta*, and leaves attention that a float can tell from all or nothing"


def second_phase_rate(model: ContextModel, points: Points) -> float:
    """eta*: the smallest learning rate after one step of which contexts lose score, theta_C^T G phi(r) < 0.

    Found by doubling and Brent's method on the exact gradient. Infinity where there is none before the gradient is too
    small for a float: it shrinks like exp(-eta A_1 / 8), and eta* grows with the number of points. Where A_2 > 0 the
    sign turns only once, since a C+S point's share of the gradient then grows with the rate. 0 where contexts lose
    score from the start, against the first phase. Raises `DataError` for a model of several runs.
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
    found = brentq(balance, high / 2 if high > 1 else 0.0, high)
    return cast(float, found)


def _pulls(model: ContextModel, points: Points) -> Float[Tensor, 2]:
    """theta_S and theta_C against -grad of the mean loss, of a model of one run."""
    return torch.stack([pull[0].mean() for pull in shared_pull(model, points)])


def _chosen(model: ContextModel, points: Points, learning_rate: float | None) -> tuple[float, float]:
    """eta* and the rate to try: the one given, or a little more than eta*."""
    rate = second_phase_rate(model, points)
    if learning_rate is not None:
        return rate, learning_rate
    return rate, BEYOND * rate if 0 < rate < math.inf else 1.0


def _first_proposition(model: ContextModel, points: Points) -> dict[str, bool]:
    c = read_constants(model, points)
    return setting(model, points) | {MORE_CRITICAL: c.critical >= c.overlapping} | dict(wide(c))


def proposition_1(model: ContextModel, points: Points, learning_rate: float | None = None) -> Outcome:
    """W_V frozen: at t = 0 contexts gain score and subjects lose it; after one step of a large rate, the reverse.

    The points are C and C+S, |D_C| >= |D_C+S|. The rate is 1.01 eta* by default, eta* being found numerically, since
    eq. 107 only shows that there is one. First phase: Lemma 6's condition is needed as well. Eq. 78's text gives
    -m_C+S for C+S points where m_C+S is right; eq. 79 and 85-93 are for equal numbers (eq. 86's first sum goes to
    n/2), here for any. Second phase: eq. 104 needs exp(o_r) + K_S <= exp(o_c) and a probability of c above 1 / K_A;
    a larger constant does as well, so the conclusion stands. The second phase after this one step may be faint, since
    its gradient shrinks like exp(-eta A_1 / 8) and eta* grows with the points: with 80 and 80 of them, delta_M = 0.7
    and delta_C = 0.3 (K_S = 163, K_A = 270, o_c = 1, o_r = 0.5) eta* is 122 and theta_C's part goes from 0.35 to
    -3e-29. In many small steps the sign turns at an ordinary size, but that is not what is claimed.
    """
    star, rate = _chosen(model, points, learning_rate)
    c = read_constants(model, points)
    before, after = (_pulls(one, points) for one in (model, descended(model, points, attention_rate=rate)))
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
    claim = "contexts gain score at t = 0 and lose it at t = 1, subjects the other way round"
    return Outcome(PLACE.format("Proposition 1"), claim, assumptions, measured, holds)


def proposition_2(model: ContextModel, points: Points) -> Outcome:
    """Memorised points [s, r] add to theta_S's part of the gradient and nothing to theta_C's, at t = 0.

    Old are the points of other kinds, new are all. Eq. 12 is an equality of SUMS of losses: that of means, with the
    1/n of eq. 5, shrinks by |old| / |new|. Eq. 11 holds of sums, and of means where the old part is below 0, as in
    Proposition 1. Eq. 121 lacks the factor sigma_s sigma_r: if r has no attention at all (self_score minus infinity)
    an S point has no gradient, so r must take part, which Assumption 5 excludes for C and C+S points only.
    """
    old, added = points.of(*set(points.kinds) - {RECALL}), points.of(RECALL)
    if not len(old) or not len(added):
        raise DataError(f"expected points of kind {RECALL} and of others, got {set(points.kinds)}: lay out both")
    c = read_constants(model, points)
    sums = [torch.stack([pull[0].sum() for pull in shared_pull(model, some)]) for some in (old, points)]
    means = [total / len(some) for total, some in zip(sums, (old, points), strict=True)]
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
    holds = unmoved and all(bool(new[0] > old_one[0]) for old_one, new in (sums, means))
    claim = "S points raise the pull on subjects and leave the summed pull on contexts as it was"
    return Outcome(PLACE.format("Proposition 2"), claim, assumptions, measured, holds)


def proposition_3(model: ContextModel, points: Points, learning_rate: float = 1.0) -> Outcome:
    """One step by W_V makes the value of a C point's subject predict its answer better, at any learning rate.

    The points are C and C+S, in any numbers. Slips on the way: eq. 128's count is |A| - [i = j], so 129, 132 and 135
    subtract the other contexts' probabilities once, not twice; their delta_C is the probability softmax(z)_c; eq. 136's
    |S| is (|S| + 1) / 2; eq. 139 lacks two exponentials; eq. 144 is -(1 - p_k) - q_k times eta / 8n where k is a C
    point, p_k being its softmax(z)_c and q_k that of another answer. A C+S point has p and q no worse than that, and
    |D| <= K_A keeps the rise of v(c, s) above 0, so no further condition is needed.
    """
    c = read_constants(model, points)
    some = points.of(CRITICAL)
    trained = descended(model, points, value_rate=learning_rate)
    before, after = (one.values[0].log_softmax(dim=0)[some.answer, some.subject] for one in (model, trained))
    rise = after - before
    measured = {
        "least rise, nats": float(rise.min()) if len(some) else math.nan,
        "greatest rise, nats": float(rise.max()) if len(some) else math.nan,
        "learning rate": learning_rate,
        "delta_C": c.delta_C,
        "delta_M": c.delta_M,
    }
    holds = measured["least rise, nats"] > 0
    claim = "the subject's value predicts the answer of each C point better after one step"
    return Outcome(PLACE.format("Proposition 3"), claim, setting(model, points), measured, holds)


def theorem_1(model: ContextModel, points: Points, learning_rate: float | None = None) -> Outcome:
    """M_C of a knowledge conflict rises in the first step and falls in the second, W_V frozen.

    The conflicts are the test points, all others are trained on. s must not be in D either, or its own direction moves
    too (eq. 150 takes that for granted), and v(a, c) = v(c, s) = o_c. Eq. 165 is monotone in sigma_c, not "delta_C",
    because v(c, c) and v(a, s) lie above o_c; delta_M > delta_C does not enter. The second fall may be too faint for
    M_C to change by a digit, hence what decides is the exact change of its log-odds, from that of the scores.
    """
    tests, trained = points.of(CONFLICT), points.of(*set(points.kinds) - {CONFLICT})
    if not len(tests) or not len(trained):
        raise DataError(f"expected conflicts and points to train on, got {set(points.kinds)}: lay out both")
    star, rate = _chosen(model, trained, learning_rate)
    once = descended(model, trained, attention_rate=rate)
    twice = descended(once, trained, attention_rate=rate)
    moves = [_moved_odds(a, trained, tests, rate) for a in (model, once)]
    shares = [float(context_share(one, tests).mean()) for one in (model, once, twice)]
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
    return Outcome(PLACE.format("Theorem 1"), "M_C(1) > M_C(0) and M_C(1) > M_C(2)", assumptions, measured, holds)


def _moved_odds(model: ContextModel, trained: Points, tests: Points, rate: float) -> Float[Tensor, " point"]:
    """What a step by W_KQ adds to the log-odds of M_C of each test point, with no attention on r.

    Subtracting attention after from before would lose a change far below 1e-16; the logistic function's own difference,
    s(x + d) - s(x) = s(x + d) s(-x) (1 - exp(-d)), keeps it.
    """
    tokens, r = model.embeddings.tokens[0], model.embeddings.tokens[0, :, -1]
    apart = tokens[:, tests.context] - tokens[:, tests.subject]
    x = apart.T @ (model.W_KQ[0] @ r)
    d = apart.T @ (rate * attention_descent(model, trained)[0] @ r)
    more_context = torch.sigmoid(x + d) * torch.sigmoid(-x) * -torch.expm1(-d)
    ahead = model.values[0][tests.context] - model.values[0][tests.stored]
    every = torch.arange(len(tests))
    return more_context * (ahead[every, tests.context] - ahead[every, tests.subject])
