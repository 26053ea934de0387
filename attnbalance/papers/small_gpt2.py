"""A GPT-2 without positional embeddings, and its training on short token sequences."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

from attnbalance.errors import DataError, DivergenceError

IGNORED = -100
"""The label of a token without a loss."""


@dataclass(frozen=True)
class Training:
    """AdamW at a constant rate; with `weight_decay` 0 it is Adam.

    Each step uses all sequences, or `batch` of them drawn uniformly, with replacement, from `seed`. Raises `DataError`
    unless steps >= 1 and the rate is finite and > 0.
    """

    steps: int
    rate: float
    weight_decay: float = 0.0
    batch: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Check steps and rate."""
        if self.steps < 1 or not 0 < self.rate < math.inf:
            raise DataError(f"steps must be >= 1 and the rate finite and > 0, got {self.steps} and {self.rate}")


def make_gpt2(vocab: int, *, layers: int = 2, d_model: int = 64, heads: int = 4, seed: int = 0) -> GPT2LMHeadModel:
    """A GPT-2 with random weights, position embeddings fixed at 0, tied embeddings and no dropout.

    Raises `DataError` unless all sizes are >= 1 and `heads` divides `d_model`.
    """
    if min(vocab, layers, heads) < 1 or d_model % heads:
        raise DataError(f"sizes must be >= 1 and heads divide d_model, got {vocab=}, {layers=}, {d_model=}, {heads=}")
    shape = {"vocab_size": vocab, "n_layer": layers, "n_embd": d_model, "n_head": heads, "n_positions": 16}
    rest = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT2LMHeadModel(GPT2Config(**shape, **rest))
    model.transformer.wpe.weight.requires_grad_(False).zero_()
    return model


def train_gpt2(
    model: GPT2LMHeadModel,
    ids: Int[Tensor, "sequence position"],
    labels: Int[Tensor, "sequence position"],
    weights: Float[Tensor, " sequence"],
    training: Training,
    observe: Callable[[int, GPT2LMHeadModel], None] | None = None,
) -> GPT2LMHeadModel:
    """Train a copy of the model and return it.

    The loss is `weighted_loss`. `labels` are aligned with `ids`, as in transformers; tokens labelled `IGNORED` have no
    loss. All sequences have the same length. `observe(step, model)` is called after each step. Raises `DataError` if no
    token is labelled, and `DivergenceError` if the loss is not finite.
    """
    if not bool((labels[:, 1:] != IGNORED).any()):
        raise DataError("at least one token after the first must be labelled, got none")
    model = copy.deepcopy(model).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=training.rate, weight_decay=training.weight_decay)
    drawn, batch = torch.Generator().manual_seed(training.seed), training.batch
    for t in range(1, training.steps + 1):
        chosen = slice(None) if batch is None else torch.randint(len(ids), (batch,), generator=drawn).to(ids.device)
        loss = weighted_loss(model, ids[chosen], labels[chosen], weights[chosen])
        if not bool(loss.isfinite()):
            raise DivergenceError(f"the loss of GPT-2 is {float(loss.detach())} at step {t}; lower the learning rate")
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if observe is not None:
            observe(t, model)
    return model.eval()


def weighted_loss(
    model: GPT2LMHeadModel,
    ids: Int[Tensor, "sequence position"],
    labels: Int[Tensor, "sequence position"],
    weights: Float[Tensor, " sequence"],
) -> Float[Tensor, ""]:
    """Mean cross-entropy over labelled tokens in nats, weighted by sequence.

    The output layer is applied only to positions at which some sequence has a label.
    """
    positions = (labels[:, 1:] != IGNORED).any(0).nonzero()[:, 0]
    state = model.transformer(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[:, positions]
    target = labels[:, 1:][:, positions]
    each = cross_entropy(model.lm_head(state).flatten(0, 1), target.flatten(), reduction="none", ignore_index=IGNORED)
    weight = weights[:, None] * (target != IGNORED)
    return (each.view_as(weight) * weight).sum() / weight.sum()


@torch.no_grad()
def next_token(model: GPT2LMHeadModel, ids: Int[Tensor, "sequence position"]) -> Int[Tensor, " sequence"]:
    """The most likely token after each sequence."""
    return model.lm_head(model.transformer(input_ids=ids, use_cache=False).last_hidden_state[:, -1]).argmax(-1)
