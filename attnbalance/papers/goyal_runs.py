"""One run for the figures of Goyal et al. (2024): a noisy world, its training points, its observations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnbalance.theory.context import (
    ContextModel,
    attention,
    context_model,
    context_share,
    descended,
    embed,
    shared_pull,
    train,
)
from attnbalance.theory.context_points import (
    CONFLICT,
    COUNTERFACTUAL,
    CRITICAL,
    OVERLAPPING,
    RECALL,
    Points,
    Scalars,
    Vocabulary,
    lay_out,
    stored_values,
)
from attnbalance.theory.goyal import proposition_1, second_phase_rate
from attnbalance.theory.goyal_constants import MORE_CRITICAL, PREDICTIVE, STRONGER, read_constants, setting

PLAIN, AUGMENTED, FILTERED, RECALLED = "plain", "counterfactuals", "C points only", "S points added"
DOUBLED, WEAK = "twice the C points", "weak memory"
VALUES, WEAK_VALUES = "W_V trained", "weak memory, W_V trained"
EXACT, LEADING = "as assumed", "as assumed, memory leads by far"
WORLDS = (PLAIN, EXACT, LEADING)
"""The worlds of Proposition 1: noisy, and two whose values and scores are as alike as the paper assumes."""
ARMS = (PLAIN, AUGMENTED, FILTERED, RECALLED)
"""W_V is frozen, as in Theorem 1."""
LIMITS = (DOUBLED, WEAK)
"""Further arms with W_V frozen: twice as many C points as C+S points, and weaker memory."""
TRAINED = (VALUES, WEAK_VALUES)
"""Arms in which W_V learns too, at W_KQ's rate."""
LEAD, WEAK_LEAD, FAR_LEAD = (0.85, 0.98), (0.3, 0.5), (2.5, 3.0)
"""Ranges of memory's lead over the context, in log-odds, as a share of the context's lead over chance.

For Proposition 1 at most 1 suffices (the condition that Lemma 6 lacks). The seed draws from the range; weak memory has
the lower one, `LEADING` the higher one.
"""
RATES = (0.25, 0.5, 0.75, 1.25, 1.5, 2.0)
"""Learning rates of the single step, as multiples of eta*."""
NOISE = 0.1
"""Standard deviation of W_KQ's entries (and so of scores, in nats) and of the log-odds of delta_M and delta_C.

It is 0 in the worlds `EXACT` and `LEADING`.
"""


def make_world(settings: Mapping[str, Any], self_score: float) -> tuple[ContextModel, Points]:
    """A pretrained model that meets Assumptions 5 and 6 up to noise, and the points of all arms, drawn from the seed.

    All arms of one seed share the model, except that weak memory has another delta_M.
    """
    noise = torch.Generator().manual_seed(settings["seed"])

    def between(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=noise, dtype=torch.float64))

    n = settings["points"] + round(between(-0.1, 0.1) * settings["points"])
    vocabulary = Vocabulary(settings["subjects"], round(between(1, 1.2) * settings["answers"]))
    extra = max(1, round(0.1 * 2 * n))
    points = lay_out(
        vocabulary, critical=2 * n, overlapping=n, recall=n, counterfactual=extra, conflicts=settings["tests"]
    )
    o_c, o_r_share = between(0.5, 1.5), between(0.2, 1)
    chance = math.log(vocabulary.answers - 1 + (math.exp(o_r_share * o_c) + vocabulary.subjects) / math.exp(o_c))
    delta_M, lead, weak_lead = between(0.93, 0.96), between(*LEAD), between(*WEAK_LEAD)
    lead = between(*FAR_LEAD) if settings["arm"] == LEADING else lead
    spread = 0.0 if settings["arm"] in (EXACT, LEADING) else NOISE
    memory = math.log(delta_M / (1 - delta_M))
    context_lead = (memory + chance) / (1 + lead)
    context = context_lead - chance
    if settings["arm"] in (WEAK, WEAK_VALUES):
        memory = context + weak_lead * context_lead
    deltas = [
        torch.sigmoid(mean + spread * torch.randn(1, size, generator=noise, dtype=torch.float64))
        for mean, size in ((memory, len(points)), (context, vocabulary.answers))
    ]
    levels = (torch.tensor([level], dtype=torch.float64) for level in (o_c, o_r_share * o_c))
    embeddings = embed(vocabulary, seed=settings["seed"])
    model = context_model(
        vocabulary,
        embeddings,
        stored_values(vocabulary, points, Scalars(deltas[0], deltas[1], *levels)),
        self_score=self_score,
    )
    W_KQ = spread * torch.randn(model.W_KQ.shape, generator=noise, dtype=torch.float64)
    return replace(model, W_KQ=W_KQ), points


def training_points(points: Points, arm: str) -> Points:
    """The training points of an arm: equally many C and C+S points, changed as the arm says."""
    more = {AUGMENTED: (COUNTERFACTUAL,), RECALLED: (RECALL,)}.get(arm, ())
    kinds = (CRITICAL,) if arm == FILTERED else (CRITICAL, OVERLAPPING, *more)
    used = points.of(*kinds)
    # C points come first; most arms train on the second half of them
    kept = list(range(0 if arm == DOUBLED else points.kinds.count(CRITICAL) // 2, len(used)))
    fields = (used.context, used.subject, used.answer, used.stored)
    return Points(tuple(used.kinds[i] for i in kept), *(field[kept] for field in fields))


def _schedule(steps: int) -> list[int]:
    """The observed steps, denser at the start."""
    return sorted({round(steps * (k / 40) ** 2) for k in range(41)})


def _listed(values: Tensor) -> list[float]:
    """The value at each step, of the only run."""
    return [float(value) for value in values[:, 0]]


def run_proposition_1(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Train W_KQ in small steps, with W_V frozen and no attention on r; also take one step at each large rate.

    `test`, `C` and `C+S` are the mean attention on the context; `theta_S` and `theta_C` are the parts of -grad by W_KQ;
    `balance` is the pull on contexts after one step at `RATES` times `eta_star`; `leap` is the mean M_C of conflicts
    before, after one and after two steps at the largest of these rates. All three are null if there is no eta*. `M_C`
    is the mean before training. `phases` are theta_S's and theta_C's parts of Proposition 1, at t = 0 and t = 1, and
    `assumptions` says which of the paper's hold.
    """
    model, points = make_world(settings, self_score=-math.inf)
    tests, trained = points.of(CONFLICT), training_points(points, PLAIN)
    outcome = proposition_1(model, trained)

    def observe(now: ContextModel) -> dict[str, Tensor]:
        on_subjects, on_contexts = shared_pull(now, trained)
        kinds = {name: trained.of(name) for name in (CRITICAL, OVERLAPPING)} | {"test": tests}
        on_context = {name: attention(now, chosen)[..., 0].mean(dim=-1) for name, chosen in kinds.items()}
        return on_context | {"theta_S": on_subjects.mean(dim=-1), "theta_C": on_contexts.mean(dim=-1)}

    steps, rate = settings["steps"], settings["learning_rate"]
    path = train(model, trained, observe, steps=steps, at=_schedule(steps), attention_rate=rate)
    star = second_phase_rate(model, trained)
    leaps = 0 < star < math.inf
    return {
        "steps": list(path.steps),
        "M_C": float(context_share(model, tests).mean()),
        "phases": [[outcome.measured[f"{name} at t = {t}"] for name in ("theta_S", "theta_C")] for t in (0, 1)],
        "assumptions": _assumptions(model, trained),
        "eta_star": star if math.isfinite(star) else None,
        "balance": [_balance(model, trained, multiple * star) for multiple in RATES] if leaps else None,
        "leap": _leap(model, trained, tests, RATES[-1] * star) if leaps else None,
        **{name: _listed(values) for name, values in path.values.items()},
    }


def _assumptions(model: ContextModel, trained: Points) -> dict[str, bool]:
    """Whether each of the paper's assumptions about Proposition 1 holds, as printed."""
    c = read_constants(model, trained)
    proven = {name: met for name, met in setting(model, trained).items() if name not in (PREDICTIVE, STRONGER)}
    return proven | {
        MORE_CRITICAL: c.critical >= c.overlapping,
        "Definition 2: delta_C > 3 / (K_A - 1)": c.delta_C > 3 / (model.vocabulary.answers - 1),
        "Definition 3: delta_M > 2 delta_C": c.delta_M > 2 * c.delta_C,
    }


def _balance(model: ContextModel, trained: Points, rate: float) -> float:
    """The summed pull on contexts after one step, divided by the sum of absolute pulls: from -1 to 1."""
    pulls = shared_pull(descended(model, trained, attention_rate=rate), trained)[1]
    return float(pulls.sum() / pulls.abs().sum())


def _leap(model: ContextModel, trained: Points, tests: Points, rate: float) -> list[float]:
    """The mean M_C of conflicts before any step, after one, and after two."""
    once = descended(model, trained, attention_rate=rate)
    twice = descended(once, trained, attention_rate=rate)
    return [float(context_share(stage, tests).mean()) for stage in (model, once, twice)]


def run_theorem_1(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Train W_KQ and, in `TRAINED`, W_V; observe mean M_C and context attention in conflicts.

    The loss is a mean over points, so the rate is raised in proportion to their number: each point moves the weights as
    far in every arm.
    """
    model, points = make_world(settings, self_score=-2.0)
    tests, trained = points.of(CONFLICT), training_points(points, settings["arm"])
    steps = settings["steps"]
    rate = settings["learning_rate"] * len(trained) / len(training_points(points, PLAIN))

    def observe(now: ContextModel) -> dict[str, Tensor]:
        on_context = attention(now, tests)[..., 0].mean(dim=-1)
        return {"M_C": context_share(now, tests).mean(dim=-1), "attention": on_context}

    value_rate = rate if settings["arm"] in TRAINED else None
    at = _schedule(steps)
    path = train(model, trained, observe, steps=steps, at=at, attention_rate=rate, value_rate=value_rate)
    return {"steps": list(path.steps), **{name: _listed(values) for name, values in path.values.items()}}
