"""The one-layer transformer of Xu & Chen (2025), section 2: attention that filters, an MLP that stores.

A token is a basis direction of R^d, its length 1 but for the context token's. With X = [x_1 .. x_L] the attention of
the last token is s = softmax(X^T Z x_L), its output u = X s (there is no value matrix), h = W_2 ReLU(W_1 u) with a
fixed W_2 that adds up the m neurons of each output coordinate, and the logits are lambda h. There are no positions.
d is the number of tokens: other directions would add coordinates to the softmax that are never a target.

Everything is batched over runs, which may differ in seed, in sentences and in the context token's length.
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
    """Each run's loss in nats, and its gradient with respect to both trained matrices, laid out as they are."""

    loss: Float[Tensor, " run"]
    W_1: Float[Tensor, "run token output neuron"]
    Z: Float[Tensor, "run token token"]


@dataclass(frozen=True)
class AttentionMLP:
    """Softmax attention and a ReLU layer with m neurons for each output coordinate (equations 4 to 8).

    `W_1[run, t, i]` holds, for the m neurons of coordinate i, their weight on token t: the paper's W_1 transposed, so
    that what an input needs lies together. `Z` is indexed [key, query]. `norm` is the length of each token's
    embedding, `scale` the paper's lambda. With `uniform` attention Z is neither used nor trained. All output
    coordinates have their neurons, also those that are never a target: they are in the softmax, and training moves
    them. Only `step` changes a model, in place.
    """

    W_1: Float[Tensor, "run token output neuron"]
    Z: Float[Tensor, "run token token"]
    norm: Float[Tensor, "run token"]
    scale: float
    uniform: bool = False

    def copy(self) -> AttentionMLP:
        """The same model, which later steps leave alone."""
        return replace(self, W_1=self.W_1.clone(), Z=self.Z.clone())

    def run(self, index: int) -> AttentionMLP:
        """A copy of one run alone."""
        W_1, Z, norm = (x[index : index + 1].clone() for x in (self.W_1, self.Z, self.norm))
        return replace(self, W_1=W_1, Z=Z, norm=norm)

    def attention(self, samples: Samples) -> Float[Tensor, "run sample position"]:
        """The scores s: at least 0, adding up to 1, and 0 where there is no token."""
        return self._read(samples).share

    def logits(self, samples: Samples) -> Float[Tensor, "run sample vocab"]:
        """Lambda h, which the softmax over all tokens is taken of."""
        return self._read(samples).logits

    def active(self, samples: Samples) -> Bool[Tensor, "run sample output neuron"]:
        """Which neurons read more than 0."""
        return self._read(samples).active

    def loss(self, samples: Samples) -> Float[Tensor, " run"]:
        """Weighted mean cross-entropy with the targets, in nats."""
        return _cross_entropy(self.logits(samples).log_softmax(-1), samples)

    def accuracy(self, samples: Samples) -> Float[Tensor, " run"]:
        """The share of samples whose largest logit is a token that may come next; NaN without samples."""
        best = self.logits(samples).argmax(-1, keepdim=True)
        return (samples.target.gather(2, best)[..., 0] > 0).to(self.norm.dtype).mean(1)

    def gradient(self, samples: Samples) -> Gradient:
        """The closed-form gradient (Lemma 1, equations 22 and 23), summed over samples by weight.

        With the error e = softmax(logits) - target of a sample and the neurons D_ir = lambda e_i 1[<w_ir, u> > 0]:
        dL/dw_ir = D_ir u, and with g = sum_ir D_ir w_ir, dL/dZ = X (diag(s) - s s^T) X^T g x_L^T. A neuron that reads
        exactly 0 counts as silent.
        """
        seen = self._read(samples)
        log_p = seen.logits.log_softmax(-1)
        error = self.scale * samples.weight[..., None] * (log_p.exp() - samples.target)
        D = torch.where(seen.active, error[..., None], 0).flatten(0, 1).flatten(1)
        W, grown = self._rows(), torch.zeros_like(self._rows())
        place, share = seen.place.flatten(0, 1), seen.share.flatten(0, 1)
        length = seen.norm.flatten(0, 1)
        for token, strength in zip(place.T, (share * length).T, strict=True):
            grown.index_add_(0, token, strength[:, None] * D)
        Z = torch.zeros_like(self.Z)
        if not self.uniform:
            pull = length * torch.stack([(W.index_select(0, token) * D).sum(1) for token in place.T], dim=1)
            change = share * (pull - (share * pull).sum(1, keepdim=True)) * length * length[:, -1:]
            query = samples.tokens[..., -1].flatten()[:, None].expand_as(place)
            Z.flatten(0, 1).index_put_((place, query), change, accumulate=True)
        return Gradient(_cross_entropy(log_p, samples), grown.view_as(self.W_1), Z)

    def step(self, samples: Samples, rate: float, *, rank_one: bool = False) -> Float[Tensor, " run"]:
        """A step of gradient descent in place; each run's loss before it.

        With `rank_one` W_1 moves along the best rank-1 approximation of its gradient (appendix H); Z as ever.
        """
        found = self.gradient(samples)
        W_1 = rank_one_part(found.W_1.flatten(2)).view_as(self.W_1) if rank_one else found.W_1
        self.W_1.sub_(W_1, alpha=rate)
        if not self.uniform:
            self.Z.sub_(found.Z, alpha=rate)
        return found.loss

    def _rows(self) -> Float[Tensor, "row feature"]:
        return self.W_1.flatten(0, 1).flatten(1)

    def _read(self, samples: Samples) -> _Read:
        runs, tokens, outputs, neurons = self.W_1.shape
        present, token = samples.tokens >= 0, samples.tokens.clamp(min=0)
        run = torch.arange(runs)[:, None, None]
        norm = self.norm[run, token] * present
        score = norm * norm[..., -1:] * self.Z[run, token, token[..., -1:]] * (not self.uniform)
        share = score.masked_fill(~present, -math.inf).softmax(-1)
        place = token + tokens * run
        read = embedding_bag(
            place.flatten(0, 1), self._rows(), per_sample_weights=(share * norm).flatten(0, 1), mode="sum"
        ).view(runs, len(samples), outputs, neurons)
        return _Read(place, norm, share, read > 0, self.scale * read.clamp(min=0).sum(-1))


@dataclass(frozen=True)
class _Read:
    """What a forward pass leaves for the gradient; `place` is the row of a token among those of all runs."""

    place: Int[Tensor, "run sample position"]
    norm: Float[Tensor, "run sample position"]
    share: Float[Tensor, "run sample position"]
    active: Bool[Tensor, "run sample output neuron"]
    logits: Float[Tensor, "run sample output"]


def _cross_entropy(log_p: Float[Tensor, "run sample vocab"], samples: Samples) -> Float[Tensor, " run"]:
    return -(samples.weight[..., None] * samples.target * log_p).sum((1, 2))


def rank_one_part(gradient: Float[Tensor, "run token feature"]) -> Float[Tensor, "run token feature"]:
    """The best approximation of each run's matrix by one of rank 1 (Eckart & Young; equations 287 to 289).

    From the largest eigenvector of the small matrix G G^T over those tokens that have a gradient at all: a few dozen in
    finetuning, where a singular value decomposition of the whole (`finetuning.objectives.gradients.low_rank`, which
    also works in float32) would cost more than the rest of the step.
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
    """A model for each seed with W_1 and Z drawn from N(0, spread^2), whichever `dtype` it is kept in.

    `context_norm` is the length of the context token's embedding, one number or one a run; every other token has
    length 1. Raises `DataError` for sizes, scales or lengths that are not above 0.
    """
    norms = [float(context_norm)] * len(seeds) if isinstance(context_norm, int | float) else list(context_norm)
    if not seeds or tokens < 1 or neurons < 1:
        raise DataError(f"a model needs seeds, tokens and neurons; got {len(seeds)} seeds, {tokens}, {neurons}")
    if len(norms) != len(seeds) or min(norms) <= 0 or scale <= 0 or spread < 0:
        raise DataError(
            f"a scale and one length of the context token for each of {len(seeds)} runs above 0 are expected, and a "
            f"spread of at least 0; got scale {scale}, lengths {norms}, spread {spread}"
        )
    drawn = [torch.Generator().manual_seed(seed) for seed in seeds]
    shapes = (tokens, tokens, neurons), (tokens, tokens)
    W_1, Z = (
        torch.stack([torch.randn(shape, generator=one, dtype=torch.float64) for one in drawn]).mul_(spread).to(dtype)
        for shape in shapes
    )
    norm = torch.ones(len(seeds), tokens, dtype=dtype)
    norm[:, CONTEXT] = torch.tensor(norms, dtype=dtype)
    return AttentionMLP(W_1, Z, norm, scale, uniform)
