"""The attention-only transformer of Ghosal et al. (2024), section 4 and appendix A.1, with closed-form gradients.

Tokens are basis vectors, so W_V phi(t) is column t of W_V and phi(k)^T W_KQ phi(q) is an entry of W_KQ. A prompt (s, q)
is a subject and a relation or prompt token q; q is the query. All computations are batched over runs, which may differ
in seed, facts and learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnbalance.errors import DataError
from attnbalance.theory.triples import Examples


@dataclass(frozen=True)
class Gradient:
    """Minus the gradient of the weighted mean loss: the direction of a descent step."""

    W_V: Float[Tensor, "run vocab token"]
    W_KQ: Float[Tensor, "run token token"]


@dataclass(frozen=True)
class Relevance:
    """Relevance of the subject and of the prompt token to the answer, s_rel and p_rel (Definitions 4.3 and 4.4).

    Definition 4.4 prints f(r, p_r); its derivation in A.5 shows that f(s, p_r) is meant, which is used here.
    """

    subject: Float[Tensor, "run example"]
    prompt: Float[Tensor, "run example"]


@dataclass(frozen=True)
class AttentionOnly:
    """f(s, q) = softmax(W_V X softmax(X^T W_KQ phi(q))) with X = [phi(s), phi(q)] (section 4).

    `W_KQ` is indexed [key, query]. Only `step` changes a model, in place.
    """

    W_V: Float[Tensor, "run vocab token"]
    W_KQ: Float[Tensor, "run token token"]

    def copy(self) -> AttentionOnly:
        """A copy that later steps of this model do not change."""
        return AttentionOnly(self.W_V.mT.clone().mT, self.W_KQ.clone())

    def attention(self, asked: Examples) -> Float[Tensor, "run example"]:
        """Att_s, the attention on the subject, in [0, 1]; the prompt token gets 1 - Att_s."""
        runs = _runs(self.W_KQ)
        to_subject, to_query = (self.W_KQ[runs, key, asked.query] for key in (asked.subject, asked.query))
        return torch.sigmoid(to_subject - to_query)

    def logits(self, asked: Examples) -> Float[Tensor, "run example vocab"]:
        """Att_s W_V phi(s) + Att_q W_V phi(q); the softmax runs over all tokens."""
        return self.mixed(asked, self.attention(asked))

    def mixed(self, asked: Examples, share: Float[Tensor, "run example"]) -> Float[Tensor, "run example vocab"]:
        """The logits if the attention on the subject were `share`; W_KQ is not used."""
        return share[..., None] * self.values(asked.subject) + (1 - share)[..., None] * self.values(asked.query)

    def values(self, token: Int[Tensor, "run example"]) -> Float[Tensor, "run example vocab"]:
        """W_V phi(t) for each token."""
        return self.W_V.mT[_runs(self.W_V), token]

    def loss(self, asked: Examples) -> Float[Tensor, " run"]:
        """Weighted mean cross-entropy in nats."""
        surprisal = -self.logits(asked).log_softmax(-1).gather(-1, asked.answer[..., None])[..., 0]
        return (surprisal * asked.weight).sum(-1)

    def predicted(
        self, asked: Examples, share: Float[Tensor, "run example"] | None = None
    ) -> Int[Tensor, "run example"]:
        """The token of arg max decoding, with the model's own attention or with `share` on the subject.

        Ties go to the lowest token.
        """
        logits = self.logits(asked) if share is None else self.mixed(asked, share)
        return logits.argmax(-1)

    def correct(
        self, asked: Examples, share: Float[Tensor, "run example"] | None = None
    ) -> Bool[Tensor, "run example"]:
        """Whether `predicted` is the answer."""
        return self.predicted(asked, share) == asked.answer

    def salience(self, asked: Examples) -> Float[Tensor, "run example"]:
        """S(s, r, a) = phi(a)^T W_V phi(s) in logits (Definition 4.1): the stored value, independent of attention."""
        return self.W_V[_runs(self.W_V), asked.answer, asked.subject]

    def relevance(self, asked: Examples) -> Relevance:
        """(e_a - f(s, q))^T W_V phi(t) for t = s and t = q."""
        residual = _residual(self.logits(asked), asked)
        return Relevance(*((residual * self.values(token)).sum(-1) for token in (asked.subject, asked.query)))

    def gradient(self, asked: Examples) -> Gradient:
        """Minus the gradient of `loss`, as dense matrices.

        -dL/dW_V = sum of (e_a - f)(Att_s phi(s) + Att_q phi(q))^T and -dL/dW_KQ = sum of Att_s Att_q (s_rel - p_rel)
        (phi(s) - phi(q)) phi(q)^T, weighted by example (A.4, A.5; A.5's condensed form omits Att_s Att_q).
        """
        share, relevance = self.attention(asked), self.relevance(asked)
        residual = _residual(self.logits(asked), asked) * asked.weight[..., None]
        runs, values, scores = _runs(self.W_V), torch.zeros_like(self.W_V.mT), torch.zeros_like(self.W_KQ)
        values.index_put_((runs, asked.subject), residual * share[..., None], accumulate=True)
        values.index_put_((runs, asked.query), residual * (1 - share)[..., None], accumulate=True)
        push = asked.weight * share * (1 - share) * (relevance.subject - relevance.prompt)
        scores.index_put_((runs, asked.subject, asked.query), push, accumulate=True)
        scores.index_put_((runs, asked.query, asked.query), -push, accumulate=True)
        return Gradient(values.mT, scores)

    def step(
        self, asked: Examples, rate_V: float | Float[Tensor, " run"], rate_KQ: float | Float[Tensor, " run"]
    ) -> Float[Tensor, " run"]:
        """Take one step of gradient descent in place, with one learning rate per matrix; return the loss before it.

        Only the rows W_V phi(t) and the scores of tokens that occur change, so only these are read and written. The
        few queries are shared by many examples; their rows form one small matrix. The result equals a dense step along
        `gradient`. An answer's probability is clamped to the smallest normal float, which bounds the returned loss.
        Raises `DataError` unless rates are finite and >= 0.
        """
        _check_rates(rate_V, rate_KQ)
        runs, tokens = _runs(self.W_V), self.W_V.mT
        queries, column = asked.query.unique(return_inverse=True)
        rows, shared, share = tokens[runs, asked.subject], tokens[:, queries], self.attention(asked)
        mix = torch.zeros(*column.shape, len(queries), dtype=rows.dtype, device=rows.device)
        mix.scatter_(-1, column[..., None], (1 - share)[..., None])
        logits = (rows * share[..., None]).baddbmm_(mix, shared)
        excess, answer = torch.softmax(logits, -1, out=logits), asked.answer[..., None]  # becomes f - e_a below
        loss = -excess.gather(-1, answer)[..., 0].clamp(min=torch.finfo(excess.dtype).tiny).log()
        excess.scatter_add_(-1, answer, -torch.ones_like(excess[..., :1]))
        on_subject = torch.linalg.vecdot(excess, rows)
        on_query = torch.bmm(excess, shared.mT).gather(-1, column[..., None])[..., 0]
        push = asked.weight * share * (1 - share) * (on_query - on_subject) * _column(rate_KQ)
        amount = asked.weight * _column(rate_V)
        tokens[:, queries] -= torch.bmm((mix * amount[..., None]).mT, excess)
        excess *= (share * amount)[..., None]
        for own, subject, change in zip(tokens, asked.subject, excess, strict=True):
            own.index_add_(0, subject, change, alpha=-1)  # in place for any memory layout of W_V
        self.W_KQ.index_put_((runs, asked.subject, asked.query), push, accumulate=True)
        self.W_KQ.index_put_((runs, asked.query, asked.query), -push, accumulate=True)
        return (loss * asked.weight).sum(-1)


def attention_only(tokens: int, seeds: Sequence[int], *, scale: float = 1e-3) -> AttentionOnly:
    """A model for each seed with `tokens` tokens and entries drawn from N(0, scale^2) (appendix C.1: 0.001).

    Each token's column of W_V is contiguous in memory. Raises `DataError` for fewer than 3 tokens, no seed or a
    negative scale.
    """
    if tokens < 3 or not seeds or scale < 0:
        raise DataError(f"expected tokens >= 3, at least one seed and scale >= 0, got {tokens}, {seeds} and {scale}")
    drawn = [
        torch.randn(2, tokens, tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        for seed in seeds
    ]
    values, scores = (scale * torch.stack(matrices) for matrices in zip(*drawn, strict=True))
    return AttentionOnly(values.mT, scores)


def _runs(table: Tensor) -> Int[Tensor, "run 1"]:
    return torch.arange(len(table), device=table.device)[:, None]


def _check_rates(*rates: float | Tensor) -> None:
    for rate in rates:
        values = rate.tolist() if isinstance(rate, Tensor) else [rate]
        if not all(0 <= value < math.inf for value in values):
            raise DataError(f"learning rates must be finite and >= 0, got {values}")


def _column(rate: float | Tensor) -> float | Tensor:
    return rate[:, None] if isinstance(rate, Tensor) else rate


def _residual(logits: Tensor, asked: Examples) -> Float[Tensor, "run example vocab"]:
    """e_a - f(s, q)."""
    return (-logits.softmax(-1)).scatter_add(-1, asked.answer[..., None], torch.ones_like(logits[..., :1]))
