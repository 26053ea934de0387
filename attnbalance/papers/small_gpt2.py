"""A GPT-2 without positions, trained by plain steps on a full batch of short token sequences."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

from attnbalance.errors import DataError, DivergenceError

IGNORED = -100
"""The label of a token that carries no loss."""


def make_gpt2(vocab: int, *, layers: int = 2, d_model: int = 64, heads: int = 4, seed: int = 0) -> GPT2LMHeadModel:
    """A GPT-2 with random weights whose position embeddings are 0 and stay so; no dropout, tied embeddings.

    Raises `DataError` for sizes that do not fit together.
    """
    if min(vocab, layers, heads) < 1 or d_model % heads:
        raise DataError(f"d_model is a multiple of the heads, and every size at least 1; got {d_model} and {heads}")
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
    *,
    steps: int,
    rate: float,
    weight_decay: float | None = None,
    batch: int | None = None,
    seed: int = 0,
    observe: Callable[[int, GPT2LMHeadModel], None] | None = None,
) -> GPT2LMHeadModel:
    """A copy of the model after `steps` steps of AdamW (Adam where `weight_decay` is None) at a constant rate.

    Each step sees all sequences, or `batch` of them drawn evenly with `seed`. The loss is the mean over labelled
    tokens, weighted by their sequence's weight; a label is at its own token, as in transformers; `IGNORED` ones
    count for nothing. Sequences have one length: there is no padding. `observe(step, model)` is called after each step.
    Raises `DataError` for a rate or steps that cannot be and `DivergenceError` where the loss is no finite number.
    """
    if not 0 < rate < math.inf or steps < 1 or not bool((labels[:, 1:] != IGNORED).any()):
        raise DataError(f"a rate above 0, at least one step and one labelled token are needed; got {rate}, {steps}")
    model = copy.deepcopy(model).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decay = weight_decay or 0.0
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=decay)  # without decay it is Adam
    drawn = torch.Generator().manual_seed(seed)
    for t in range(1, steps + 1):
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

    Only positions that some sequence has a label for go through the output layer.
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
