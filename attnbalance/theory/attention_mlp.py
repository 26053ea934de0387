"""The one-layer transformer of Xu & Chen (2025), section 2: attention filters out the context, an MLP stores facts.

A token is a basis vector of R^d with length 1; only the context token's length differs. With X = [x_1 .. x_L], the
last token's attention is s = softmax(X^T Z x_L) and its output u = X s (there is no value matrix). The MLP computes
h = W_2 ReLU(W_1 u), where the fixed W_2 sums the m neurons of each output coordinate. The logits are lambda h. There
are no positional embeddings. d is the number of tokens: more dimensions would add softmax coordinates that are never a
target.

All computations are batched over runs, which may differ in seed, sentences and the context token's length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import embedding_bag

from attnbalance.errors import DataError
from attnbalance.theory.sentences import CONTEXT, Samples


@dataclass(frozen=True)
class Gradient:
    """Each run's loss in nats, and its gradient by both trained matrices, in their layout."""

    loss: Float[Tensor, " run"]
    W_1: Float[Tensor, "run token output neuron"]
    Z: Float[Tensor, "run token token"]


@dataclass(frozen=True)
class AttentionMLP:
    """Softmax attention and a ReLU layer with m neurons for each output coordinate (equations 4 to 8).

    `W_1[run, t, i]` holds the weights on token t of the m neurons of output coordinate i. This is the paper's W_1
    transposed, so that the weights an input needs are contiguous. `Z` is indexed [key, query]. `norm` is the length of
    each token's embedding, `scale` the paper's lambda. With `uniform` attention, Z is neither used nor trained. Output
    coordinates that are never a target have neurons too: they are in the softmax, and training changes them. Only
    `step` changes a model, in place.
    """

    W_1: Float[Tensor, "run token output neuron"]
    Z: Float[Tensor, "run token token"]
    norm: Float[Tensor, "run token"]
    scale: float
    uniform: bool = False

    def copy(self) -> AttentionMLP:
        """A copy that later steps of this model do not change."""
        return replace(self, W_1=self.W_1.clone(), Z=self.Z.clone())

    def run(self, index: int) -> AttentionMLP:
        """A copy that holds only this run."""
        W_1, Z, norm = (x[index : index + 1].clone() for x in (self.W_1, self.Z, self.norm))
        return replace(self, W_1=W_1, Z=Z, norm=norm)

    def attention(self, samples: Samples) -> Float[Tensor, "run sample position"]:
        """The attention s: non-negative, summing to 1, and 0 at empty positions."""
        return self._read(samples).share

    def logits(self, samples: Samples) -> Float[Tensor, "run sample vocab"]:
        """The logits lambda h; the softmax runs over all tokens."""
        return self._read(samples).logits

    def active(self, samples: Samples) -> Bool[Tensor, "run sample output neuron"]:
        """Which neurons have an input > 0."""
        return self._read(samples).active

    def loss(self, samples: Samples) -> Float[Tensor, " run"]:
        """Weighted mean cross-entropy with the targets, in nats."""
        return _cross_entropy(self.logits(samples).log_softmax(-1), samples)

    def accuracy(self, samples: Samples) -> Float[Tensor, " run"]:
        """The share of samples whose largest logit is a possible next token; NaN if there are no samples."""
        best = self.logits(samples).argmax(-1, keepdim=True)
        return (samples.target.gather(2, best)[..., 0] > 0).to(self.norm.dtype).mean(1)

    def gradient(self, samples: Samples) -> Gradient:
        """The closed-form gradient (Lemma 1, equations 22 and 23), summed over samples by weight.

        With the error e = softmax(logits) - target of a sample and the neurons D_ir = lambda e_i 1[<w_ir, u> > 0]:
        dL/dw_ir = D_ir u, and with g = sum_ir D_ir w_ir, dL/dZ = X (diag(s) - s s^T) X^T g x_L^T. At an input of
        exactly 0 ReLU's derivative is taken as 0.
        """
        seen = self._read(samples)
        log_p = seen.logits.log_softmax(-1)
        error = self.scale * samples.weight[..., None] * (log_p.exp() - samples.target)
        D = torch.where(seen.active, error[..., None], 0).flatten(0, 1).flatten(1)
        W, grown = self._rows(), torch.zeros_like(self._rows())
        row, share = seen.row.flatten(0, 1), seen.share.flatten(0, 1)
        length = seen.norm.flatten(0, 1)
        for token, strength in zip(row.T, (share * length).T, strict=True):
            grown.index_add_(0, token, strength[:, None] * D)
        Z = torch.zeros_like(self.Z)
        if not self.uniform:
            pull = length * torch.stack([(W.index_select(0, token) * D).sum(1) for token in row.T], dim=1)
            change = share * (pull - (share * pull).sum(1, keepdim=True)) * length * length[:, -1:]
            query = samples.tokens[..., -1].flatten()[:, None].expand_as(row)
            Z.flatten(0, 1).index_put_((row, query), change, accumulate=True)
        return Gradient(_cross_entropy(log_p, samples), grown.view_as(self.W_1), Z)

    def step(self, samples: Samples, rate: float, *, rank_one: bool = False) -> Float[Tensor, " run"]:
        """Take one step of gradient descent in place; return each run's loss before the step.

        With `rank_one`, W_1 moves along the best rank-1 approximation of its gradient (appendix H). Z always moves
        along its full gradient.
        """
        gradient = self.gradient(samples)
        W_1 = rank_one_part(gradient.W_1.flatten(2)).view_as(self.W_1) if rank_one else gradient.W_1
        self.W_1.sub_(W_1, alpha=rate)
        if not self.uniform:
            self.Z.sub_(gradient.Z, alpha=rate)
        return gradient.loss

    def _rows(self) -> Float[Tensor, "row feature"]:
        return self.W_1.flatten(0, 1).flatten(1)

    def _read(self, samples: Samples) -> _Read:
        runs, tokens, outputs, neurons = self.W_1.shape
        present, token = samples.tokens >= 0, samples.tokens.clamp(min=0)
        run = torch.arange(runs)[:, None, None]
        norm = self.norm[run, token] * present
        score = norm * norm[..., -1:] * self.Z[run, token, token[..., -1:]] * (not self.uniform)
        share = score.masked_fill(~present, -math.inf).softmax(-1)
        row = token + tokens * run
        read = embedding_bag(
            row.flatten(0, 1), self._rows(), per_sample_weights=(share * norm).flatten(0, 1), mode="sum"
        ).view(runs, len(samples), outputs, neurons)
        return _Read(row, norm, share, read > 0, self.scale * read.clamp(min=0).sum(-1))


@dataclass(frozen=True)
class _Read:
    """Intermediate results of a forward pass; `row` is a token's row in `_rows`, which concatenates all runs."""

    row: Int[Tensor, "run sample position"]
    norm: Float[Tensor, "run sample position"]
    share: Float[Tensor, "run sample position"]
    active: Bool[Tensor, "run sample output neuron"]
    logits: Float[Tensor, "run sample output"]


def _cross_entropy(log_p: Float[Tensor, "run sample vocab"], samples: Samples) -> Float[Tensor, " run"]:
    return -(samples.weight[..., None] * samples.target * log_p).sum((1, 2))


def rank_one_part(gradient: Float[Tensor, "run token feature"]) -> Float[Tensor, "run token feature"]:
    """The best rank-1 approximation of each run's matrix (Eckart & Young; equations 287 to 289).

    Computed from the top eigenvector of G G^T, restricted to the tokens with a gradient: a few dozen in finetuning. A
    singular value decomposition of the whole matrix (`finetuning.objectives.gradients.low_rank`) would cost more than
    the rest of the step.
    """
    rows = gradient.abs().amax((0, 2)).nonzero()[:, 0]
    if not len(rows):
        return gradient
    G = gradient[:, rows]
    left = torch.linalg.eigh(G @ G.mT).eigenvectors[..., -1:]
    return torch.zeros_like(gradient).index_copy_(1, rows, left @ (left.mT @ G))


def make_attention_mlp(
    seeds: Sequence[int],
    tokens: int,
    *,
    neurons: int = 8,
    scale: float = 4.0,
    context_norm: float | Sequence[float] = 2.0,
    spread: float = 0.01,
    uniform: bool = False,
    dtype: torch.dtype = torch.float64,
) -> AttentionMLP:
    """A model for each seed, with W_1 and Z drawn from N(0, spread^2) in float64 and then cast to `dtype`.

    `context_norm` is the length of the context token's embedding: one number, or one per run. All other tokens have
    length 1. Raises `DataError` for sizes, scales or lengths <= 0, or a negative spread.
    """
    norms = [float(context_norm)] * len(seeds) if isinstance(context_norm, int | float) else list(context_norm)
    if not seeds or tokens < 1 or neurons < 1:
        raise DataError(
            f"expected at least one seed, token and neuron, got {len(seeds)} seeds, {tokens} tokens, {neurons} neurons"
        )
    if len(norms) != len(seeds) or min(norms) <= 0 or scale <= 0 or spread < 0:
        raise DataError(
            f"scale must be > 0, spread >= 0, and context_norm one length > 0 for each of {len(seeds)} runs; "
            f"got {scale}, {spread} and {norms}"
        )
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    shapes = (tokens, tokens, neurons), (tokens, tokens)
    W_1, Z = (
        torch.stack([torch.randn(shape, generator=generator, dtype=torch.float64) for generator in generators])
        .mul_(spread)
        .to(dtype)
        for shape in shapes
    )
    norm = torch.ones(len(seeds), tokens, dtype=dtype)
    norm[:, CONTEXT] = torch.tensor(norms, dtype=dtype)
    return AttentionMLP(W_1, Z, norm, scale, uniform)
