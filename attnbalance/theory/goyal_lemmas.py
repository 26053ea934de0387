"""Lemmas 1 to 7 of Goyal et al. (2024), appendix C.1.4, checked on an instance of the context model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from attnbalance.theory.context import (
    ContextModel,
    attention,
    attention_descent,
    logits,
    losses,
    not_orthonormal,
    shared_pull,
)
from attnbalance.theory.context_points import CRITICAL, OVERLAPPING, Points
from attnbalance.theory.goyal_constants import (
    BOTH,
    ENOUGH,
    EVEN,
    ORTHONORMAL,
    SAME,
    SYMMETRIC,
    UNIQUE,
    read_constants,
    setting,
    wide,
)
from attnbalance.theory.outcome import Outcome

SOURCE = "Goyal et al. 2024, {}"


def _columns(model: ContextModel, points: Points) -> Float[Tensor, "point token 3"]:
    """v(c), v(s), v(r) of each point."""
    r = torch.full_like(points.subject, model.vocabulary.relation)
    tokens = torch.stack([torch.where(points.context < 0, r, points.context), points.subject, r], dim=-1)
    return model.values[0][:, tokens].transpose(0, 1)


def _errors(model: ContextModel, points: Points) -> Float[Tensor, "point token"]:
    """e_answer - softmax(z)."""
    error = -logits(model, points)[0].softmax(dim=-1)
    error[torch.arange(len(points)), points.answer] += 1
    return error


def lemma_1(model: ContextModel, points: Points) -> Outcome:
    """-grad of a loss by W_KQ is X (diag(sigma) - sigma sigma^T) X^T W_V^T W_H (e_answer - softmax(z)) phi(r)^T.

    The columns of X are phi(c), phi(s), phi(r). The lemma holds for any weights, embeddings and attention; it is
    compared with automatic differentiation of the mean loss. Eq. 28 and 29 omit the sign of the loss.
    """
    read_constants(model, points)
    r = torch.full_like(points.subject, model.vocabulary.relation)
    tokens = torch.stack([torch.where(points.context < 0, r, points.context), points.subject, r], dim=-1)
    X = model.embeddings.tokens[0].T[tokens].mT
    sigma = attention(model, points)[0]
    jacobian = sigma.diag_embed() - sigma[:, :, None] * sigma[:, None, :]
    back = _errors(model, points) @ model.embeddings.tokens[0].T @ model.W_V[0]
    pulled = (X @ jacobian @ X.mT @ back[..., None])[..., 0].mean(dim=0)
    closed = pulled[:, None] * model.embeddings.tokens[0, :, -1]
    free = replace(model, W_KQ=model.W_KQ.detach().clone().requires_grad_())
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(losses(free, points).mean(), free.W_KQ)
    wrong = float((closed + gradient[0]).abs().max())
    claim = "the gradient by W_KQ has Lemma 1's closed form"
    measured = {"largest difference": wrong, "largest entry": float(closed.abs().max())}
    return Outcome(SOURCE.format("Lemma 1"), claim, {}, measured, wrong < SAME)


def lemma_2(model: ContextModel, points: Points) -> Outcome:
    """The part of a point's -grad by W_KQ along theta_S (all subjects) and theta_C (all contexts), in terms of v.

    theta_S: (-sigma_s sigma_c v(c) + (sigma_s - sigma_s^2) v(s) - sigma_s sigma_r v(r))^T (e_c - softmax(z)) / sqrt(2).
    theta_C: ((sigma_c - sigma_c^2) v(c) - sigma_s sigma_c v(s) - sigma_c sigma_r v(r))^T (...) / sqrt(2); the paper
    prints sigma_s sigma_r there. With sigma_r = 0, theta_C gets sigma_s sigma_c (v(c) - v(s))^T (...) / sqrt(2) and
    theta_S the negative of it; the paper swaps the two. The lemma holds for any W_V and W_KQ.
    """
    read_constants(model, points)
    h = torch.einsum("ptk,pt->pk", _columns(model, points), _errors(model, points))
    c, s, r = attention(model, points)[0].unbind(dim=-1)
    on_S = (-s * c * h[:, 0] + (s - s * s) * h[:, 1] - s * r * h[:, 2]) / math.sqrt(2)
    on_C = ((c - c * c) * h[:, 0] - s * c * h[:, 1] - c * r * h[:, 2]) / math.sqrt(2)
    pulled_S, pulled_C = shared_pull(model, points)
    measured = {
        "theta_S, largest difference": float((on_S - pulled_S[0]).abs().max()),
        "theta_C, largest difference": float((on_C - pulled_C[0]).abs().max()),
    }
    assumptions = {ORTHONORMAL: not_orthonormal(model.vocabulary, model.embeddings) < SAME}
    claim = "the parts of the gradient along theta_S and theta_C have Lemma 2's form"
    return Outcome(SOURCE.format("Lemma 2"), claim, assumptions, measured, max(measured.values()) < SAME)


def _own_values(model: ContextModel, points: Points, kind: str) -> tuple[Tensor, Tensor]:
    """v(c, c) and v(c, s) of each point of a kind."""
    chosen, values = points.of(kind), model.values[0]
    return values[chosen.context, chosen.context], values[chosen.context, chosen.subject]


def lemma_3(model: ContextModel, points: Points) -> Outcome:
    """v_0(c, c) and v_0(c, s) of C and C+S points follow from delta_C, delta_M, o_c and o_r."""
    c = read_constants(model, points)
    expected = {CRITICAL: (c.gap_C + c.o_c, c.o_c), OVERLAPPING: (c.gap_C + c.o_c, c.gap_C + c.o_c - c.gap_CS)}
    measured: dict[str, float] = {}
    for kind, wanted in expected.items():
        for name, entries, value in zip(("v(c, c)", "v(c, s)"), _own_values(model, points, kind), wanted, strict=True):
            difference = float((entries - value).abs().max()) if len(entries) else 0.0
            measured |= {f"{kind}: {name}": value, f"{kind}: {name}, largest difference": difference}
    worst = max(value for name, value in measured.items() if name.endswith("difference"))
    chosen = {name: met for name, met in setting(model, points).items() if name in (SYMMETRIC, BOTH)}
    claim = "the values of contexts and subjects have Lemma 3's form"
    return Outcome(SOURCE.format("Lemma 3"), claim, chosen, measured, worst < SAME)


def _leads(model: ContextModel, points: Points, kind: str) -> Float[Tensor, " point"]:
    """M = <v(c) - v(s), e_c - softmax(z)> of each point of a kind, from the forward pass."""
    chosen = points.of(kind)
    columns = _columns(model, chosen)
    return ((columns[..., 0] - columns[..., 1]) * _errors(model, chosen)).sum(dim=-1)


def lemma_4(model: ContextModel, points: Points) -> Outcome:
    """m_C = lambda_C (v_0(c, c) - o_c) and m_C+S = lambda_C+S (logit(delta_C) - logit(delta_M)), eq. 45 and 46."""
    c = read_constants(model, points)
    measured = {"m_C": c.m_C, "m_C+S": c.m_CS, "lambda_C": c.lambda_C, "lambda_C+S": c.lambda_CS}
    worst = 0.0
    for kind, expected in ((CRITICAL, c.m_C), (OVERLAPPING, c.m_CS)):
        leads = _leads(model, points, kind)
        worst = max(worst, float((leads - expected).abs().max()) if len(leads) else 0.0)
    needed = {name: met for name, met in setting(model, points).items() if name in (EVEN, SYMMETRIC, BOTH)}
    claim = "m_C and m_C+S have Lemma 4's form"
    return Outcome(SOURCE.format("Lemma 4"), claim, needed, {**measured, "largest difference": worst}, worst < SAME)


def _signed(model: ContextModel, points: Points) -> dict[str, float]:
    """The mean of m over the points of each kind, from the forward pass; NaN for a missing kind."""
    return {f"m_{kind}": float(_leads(model, points, kind).mean()) for kind in (CRITICAL, OVERLAPPING)}


def _on_values(model: ContextModel, points: Points) -> dict[str, bool]:
    """The assumptions of Lemmas 5 and 6, which concern values and attention but not embeddings."""
    return {name: met for name, met in setting(model, points).items() if name not in (ORTHONORMAL, UNIQUE)}


def lemma_5(model: ContextModel, points: Points) -> Outcome:
    """m_C > 0 > m_C+S if delta_M > delta_C > 1 / K_A."""
    measured = _signed(model, points)
    holds = measured[f"m_{CRITICAL}"] > 0 > measured[f"m_{OVERLAPPING}"]
    return Outcome(SOURCE.format("Lemma 5"), "m_C > 0 > m_C+S", _on_values(model, points), measured, holds)


def lemma_6(model: ContextModel, points: Points) -> Outcome:
    """|m_C| > |m_C+S| (the paper writes m_S), under a condition that the paper lacks.

    As printed it is false, even if delta_C > 3 / (K_A - 1) and delta_M > 2 delta_C: eq. 77 replaces (1 + x) / (1 + y)
    by x / y, which is larger, and reverses a sign. With K_A = 1000, K_S = 2, delta_C = 0.004, delta_M = 0.5 and
    o_c = o_r = 1, |m_C| = 1.4 and |m_C+S| = 5.2. It suffices that memory leads the context by no more than the context
    leads chance, odds(delta_M) / odds(delta_C) <= odds(delta_C) (K_A - 1 + (exp(o_r) + K_S) / exp(o_c)), since
    lambda_C > lambda_C+S always (eq. 75). If delta_M is near 1, the lemma may hold without this condition.
    """
    measured = _signed(model, points)
    holds = abs(measured[f"m_{CRITICAL}"]) > abs(measured[f"m_{OVERLAPPING}"])
    assumptions = _on_values(model, points) | dict(wide(read_constants(model, points)))
    return Outcome(SOURCE.format("Lemma 6"), "|m_C| > |m_C+S|", assumptions, measured, holds)


def lemma_7(model: ContextModel, points: Points, learning_rates: Sequence[float] | None = None) -> Outcome:
    """After one step on W_KQ, the probability of c rises with the learning rate in C points and falls in C+S points.

    The second half needs A_2 > 0, which the paper states only in the text after eq. 94: n > 2 |m_C+S| / (m_C - |m_C+S|)
    for equal numbers. The lemma is checked at the given rates, or at 0 and 16 rates that raise the score of a C point's
    context 0.5 to 8 nats above its subject's. At larger rates attention saturates and rounding hides the changes.
    """
    c = read_constants(model, points)
    if learning_rates is None:
        learning_rates = [8 / abs(c.A_1) * k / 2 for k in range(1, 17)] if c.A_1 else [1.0, 2.0]
    probabilities: dict[str, list[Tensor]] = {CRITICAL: [], OVERLAPPING: []}
    along = attention_descent(model, points)
    for rate in (0.0, *learning_rates):
        after = replace(model, W_KQ=model.W_KQ + rate * along)
        for kind, at_rates in probabilities.items():
            at_rates.append((-losses(after, points.of(kind))[0]).exp())
    rises = {kind: torch.stack(at_rates).diff(dim=0) for kind, at_rates in probabilities.items()}
    measured = {
        "A_1": c.A_1,
        "A_2": c.A_2,
        "least rise in C": float(rises[CRITICAL].min()) if rises[CRITICAL].numel() else math.nan,
        "greatest rise in C+S": float(rises[OVERLAPPING].max()) if rises[OVERLAPPING].numel() else math.nan,
    }
    # A_1 > 0 follows from m_C > 0 > m_C+S and A_2 > 0
    assumptions = setting(model, points) | {ENOUGH: c.A_2 > 0}
    holds = measured["least rise in C"] > 0 > measured["greatest rise in C+S"]
    claim = "as the learning rate grows, the answer's probability rises in C points and falls in C+S points"
    return Outcome(SOURCE.format("Lemma 7"), claim, assumptions, measured, holds)
