"""The one-layer model of Goyal et al. (2024), section 4: it answers from the context or from the subject."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnbalance.errors import DataError
from attnbalance.theory.context_points import Points, Vocabulary
from attnbalance.theory.dynamics import Trajectory, descend


@dataclass(frozen=True)
class Embeddings:
    """phi(i) as columns of `tokens`, and the unit vectors shared by all subjects and by all contexts (eq. 2, 3)."""

    tokens: Float[Tensor, "run d_model token"]
    theta_S: Float[Tensor, "run d_model"]
    theta_C: Float[Tensor, "run d_model"]


def embed(vocabulary: Vocabulary, d_model: int | None = None, *, runs: int = 1, seed: int | None = None) -> Embeddings:
    """Embeddings that meet Assumptions 2 to 4: phi(s) = (s~ + theta_S) / sqrt(2), phi(c) = (c~ + theta_C) / sqrt(2).

    All s~, c~, theta_S, theta_C and phi(r) are orthonormal: the standard basis, or, with a seed, a random rotation of
    it for each run. Raises `DataError` if d_model < K_S + K_A + 3, the default.
    """
    needed = vocabulary.size + 2
    d_model = needed if d_model is None else d_model
    if d_model < needed:
        raise DataError(f"expected d_model of at least K_S + K_A + 3 = {needed}, got {d_model}: raise it")
    frame = torch.eye(d_model, dtype=torch.float64).expand(runs, -1, -1)
    if seed is not None:
        noise = torch.Generator().manual_seed(seed)
        frame = torch.linalg.qr(torch.randn(runs, d_model, d_model, generator=noise, dtype=torch.float64))[0]
    own, shared = frame[..., : vocabulary.size], frame[..., vocabulary.size : needed]
    tokens = own.clone()
    subjects, answers = slice(vocabulary.subjects), slice(vocabulary.subjects, vocabulary.relation)
    for group, k in ((subjects, 0), (answers, 1)):
        tokens[..., group] = (own[..., group] + shared[..., k : k + 1]) / math.sqrt(2)
    return Embeddings(tokens, shared[..., 0], shared[..., 1])


def not_orthonormal(vocabulary: Vocabulary, embeddings: Embeddings) -> float:
    """The largest error of an inner product among s~, c~, phi(r), theta_S and theta_C (Assumptions 2 to 4)."""
    last = vocabulary.relation
    shared = torch.stack([embeddings.theta_S] * vocabulary.subjects + [embeddings.theta_C] * vocabulary.answers, -1)
    own = math.sqrt(2) * embeddings.tokens[..., :last] - shared
    ends = (embeddings.tokens[..., last:], embeddings.theta_S[..., None], embeddings.theta_C[..., None])
    frame = torch.cat([own, *ends], dim=-1)
    return float((frame.mT @ frame - torch.eye(vocabulary.size + 2, dtype=frame.dtype)).abs().max())


@dataclass(frozen=True)
class ContextModel:
    """One layer, one head: logits = W_H^T W_V sum_y sigma_y phi(y), where W_H holds the embeddings (eq. 4).

    sigma is the softmax over keys y of phi(y)^T W_KQ phi(r), with `self_score` added for the key r. Minus infinity
    gives Assumption 5's sigma_r = 0; with a finite value r attends to itself too. Eq. 1 writes the query on the left of
    the scores; the later formulas, used here, write the key there.
    """

    vocabulary: Vocabulary
    embeddings: Embeddings
    W_V: Float[Tensor, "run d_model d_model"]
    W_KQ: Float[Tensor, "run d_model d_model"]
    self_score: float = -math.inf

    @property
    def values(self) -> Float[Tensor, "run token token"]:
        """v(i, y) = phi(i)^T W_V phi(y), the logit of i in the value of y (eq. 16)."""
        return self.embeddings.tokens.mT @ self.W_V @ self.embeddings.tokens


def context_model(
    vocabulary: Vocabulary,
    embeddings: Embeddings,
    values: Float[Tensor, "run token token"],
    *,
    self_score: float = -math.inf,
) -> ContextModel:
    """The model whose W_V has exactly these values v(i, y); W_KQ is 0, which makes attention uniform.

    The embeddings are linearly independent, so their pseudo-inverse solves for W_V. Raises `DataError` if the
    embeddings violate Assumptions 2 to 4.
    """
    wrong = not_orthonormal(vocabulary, embeddings)
    if not wrong < 1e-8:
        raise DataError(
            f"embeddings not orthonormal: expected inner products of 0 and 1 (Assumptions 2-4), got an error of "
            f"{wrong:.3g}; make them with embed()"
        )
    inverse = torch.linalg.pinv(embeddings.tokens)
    W_V = inverse.mT @ values @ inverse
    return ContextModel(vocabulary, embeddings, W_V, torch.zeros_like(W_V), self_score)


def _keys(model: ContextModel, points: Points) -> tuple[Int[Tensor, "point 3"], Float[Tensor, "point 3"]]:
    """The tokens c, s, r of each point and the terms added to their scores; minus infinity for a missing context."""
    r = torch.full_like(points.subject, model.vocabulary.relation)
    present = points.context >= 0
    added = torch.zeros(len(points), 3, dtype=torch.float64)
    added[~present, 0] = -math.inf
    added[:, 2] = model.self_score
    return torch.stack([torch.where(present, points.context, r), points.subject, r], dim=-1), added


def _key_embeddings(model: ContextModel, points: Points) -> Float[Tensor, "run point 3 d_model"]:
    return model.embeddings.tokens.mT[:, _keys(model, points)[0]]


def attention(model: ContextModel, points: Points) -> Float[Tensor, "run point 3"]:
    """sigma_c, sigma_s, sigma_r: the attention of r, the last token, over each point; rows sum to 1."""
    tokens, added = _keys(model, points)
    r = model.embeddings.tokens[..., -1:]
    scores = (model.embeddings.tokens.mT @ (model.W_KQ @ r))[..., 0]
    return (scores[:, tokens] + added).softmax(dim=-1)


def _mixture(model: ContextModel, points: Points) -> Float[Tensor, "run point d_model"]:
    return torch.einsum("bpk,bpkd->bpd", attention(model, points), _key_embeddings(model, points))


def logits(model: ContextModel, points: Points) -> Float[Tensor, "run point token"]:
    """Z of eq. 4, in nats."""
    return _mixture(model, points) @ model.W_V.mT @ model.embeddings.tokens


def losses(model: ContextModel, points: Points) -> Float[Tensor, "run point"]:
    """-log softmax(z)_answer, in nats (eq. 5 before the mean)."""
    return -logits(model, points).log_softmax(dim=-1)[:, torch.arange(len(points)), points.answer]


def context_share(model: ContextModel, points: Points) -> Float[Tensor, "run point"]:
    """M_C of eq. 14, in [0, 1]: P(context's answer) / (P(context's answer) + P(stored answer)).

    Raises `DataError` if a point lacks a context or a stored answer.
    """
    if bool(((points.context < 0) | (points.stored < 0)).any()):
        raise DataError(
            "every point must have a context and a stored answer; select them first, such as points.of(CONFLICT)"
        )
    z, every = logits(model, points), torch.arange(len(points))
    return torch.sigmoid(z[:, every, points.context] - z[:, every, points.stored])


def _surprise(model: ContextModel, points: Points) -> Float[Tensor, "run point d_model"]:
    """W_H (e_answer - softmax(z)): the loss's descent direction in the residual stream."""
    error = -logits(model, points).softmax(dim=-1)
    error[:, torch.arange(len(points)), points.answer] += 1
    return error @ model.embeddings.tokens.mT


def key_pull(model: ContextModel, points: Points) -> Float[Tensor, "run point 3"]:
    """The coefficients g_y in -grad of a point's loss by W_KQ = sum_y g_y phi(y) phi(r)^T, y = c, s, r (Lemma 1).

    g_y = sigma_y sum_y' sigma_y' (h_y - h_y') with h_y = v(y)^T (e_answer - softmax(z)). Lemma 1's (diag(sigma) - sigma
    sigma^T) h is equal, but loses all digits if one sigma is nearly 1.
    """
    back = _surprise(model, points) @ model.W_V
    h = torch.einsum("bpd,bpkd->bpk", back, _key_embeddings(model, points))
    sigma = attention(model, points)
    return sigma * torch.einsum("bpj,bpkj->bpk", sigma, h[..., :, None] - h[..., None, :])


def attention_descent(model: ContextModel, points: Points) -> Float[Tensor, "run d_model d_model"]:
    """-grad of the mean loss by W_KQ, in closed form (Lemma 1)."""
    pulled = torch.einsum("bpk,bpkd->bd", key_pull(model, points), _key_embeddings(model, points)) / len(points)
    return pulled[..., None] * model.embeddings.tokens[:, None, :, -1]


def value_descent(model: ContextModel, points: Points) -> Float[Tensor, "run d_model d_model"]:
    """-grad of the mean loss by W_V, in closed form (eq. 125, any attention)."""
    return _surprise(model, points).mT @ _mixture(model, points) / len(points)


def shared_pull(model: ContextModel, points: Points) -> tuple[Float[Tensor, "run point"], Float[Tensor, "run point"]]:
    """theta_S^T G phi(r) and theta_C^T G phi(r), where G is -grad of each point's loss by W_KQ (Lemma 2).

    If positive, the step raises the attention scores of all subjects, or of all contexts.
    """
    g, keys = key_pull(model, points), _key_embeddings(model, points)
    length = model.embeddings.tokens[..., -1].square().sum(-1)[:, None]
    directions = (model.embeddings.theta_S, model.embeddings.theta_C)
    on_subjects, on_contexts = (torch.einsum("bpk,bpkd,bd->bp", g, keys, theta) * length for theta in directions)
    return on_subjects, on_contexts


def descended(
    model: ContextModel, points: Points, *, attention_rate: float | None = None, value_rate: float | None = None
) -> ContextModel:
    """The model after one step of gradient descent on the mean loss; W_KQ and W_V have separate learning rates.

    A matrix without a rate is frozen. Raises `DataError` unless there is a rate and every rate is finite and > 0.
    """
    rates = [rate for rate in (attention_rate, value_rate) if rate is not None]
    if not rates or not all(0 < rate < math.inf for rate in rates):
        raise DataError(
            f"learning rates must be finite and > 0, got {rates or 'none'}: give attention_rate, value_rate or both"
        )
    W_KQ, W_V = model.W_KQ, model.W_V
    if attention_rate is not None:
        W_KQ = W_KQ + attention_rate * attention_descent(model, points)
    if value_rate is not None:
        W_V = W_V + value_rate * value_descent(model, points)
    return replace(model, W_KQ=W_KQ, W_V=W_V)


def train(
    model: ContextModel,
    points: Points,
    observe: Callable[[ContextModel], Mapping[str, Tensor]],
    *,
    steps: int,
    at: Sequence[int],
    attention_rate: float | None = None,
    value_rate: float | None = None,
) -> Trajectory:
    """Take `steps` steps of `descended`; record `observe(model)` after the steps in `at`, where 0 is the start.

    Raises `DataError` as `descended` does, and `DivergenceError` if the loss diverges.
    """
    now = model

    def step(_: int) -> Float[Tensor, " run"]:
        nonlocal now
        loss = losses(now, points).mean(dim=-1)
        now = descended(now, points, attention_rate=attention_rate, value_rate=value_rate)
        return loss

    return descend(step, lambda: observe(now), steps, at, lambda: losses(now, points).mean(dim=-1))
