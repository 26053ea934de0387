"""The keys and values of a prefix, and whether prompts read after them have the rows of whole prompts."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Module
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from attnbalance.data.batches import pad
from attnbalance.data.facts import Fact
from attnbalance.data.prompts import Prompt
from attnbalance.data.tokens import Encoding
from attnbalance.models.eager_reference import TOLERANCE
from attnbalance.models.evaluating import evaluating
from attnbalance.models.forward import base_of, device_of, forward_rows, taken

PREFIX, LENGTHS = 5, (12, 7)
"""Tokens of the prefix and of the two whole prompts that prove a model; the shorter one is padded."""


@torch.no_grad()
def read_prefix(model: Module, ids: Sequence[int]) -> DynamicCache | None:
    """The cache of a prefix; None for a model that keeps anything but the keys and values of all tokens.

    Such are sliding windows and recurrent states. The model must be in evaluation mode.
    """
    base = base_of(model)
    inputs = torch.tensor([list(ids)], device=device_of(base))
    last = taken(base, {"logits_to_keep": 1})
    outputs = base(input_ids=inputs, attention_mask=torch.ones_like(inputs), use_cache=True, **last)
    cache = getattr(outputs, "past_key_values", None)
    if type(cache) is not DynamicCache or any(type(layer) is not DynamicLayer for layer in cache.layers):
        return None
    return cache


def copies(prefix: DynamicCache, count: int) -> DynamicCache:
    """The cache of a prefix for a batch of so many prompts; the prefix's own stays as it is."""
    cache = copy.deepcopy(prefix)
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None:  # own keys
            layer.keys, layer.values = (part.expand(count, -1, -1, -1) for part in (layer.keys, layer.values))
    return cache


@torch.no_grad()
def same_after_prefix(model: Module, kernel: str) -> bool:
    """Whether prompts that are read after the cache of their prefix have the rows and logits of whole prompts.

    Two prompts of random tokens and different lengths are read both ways, padded right: by whole passes, which the
    self-check has compared with eager attention, and after the cache. What is allowed is `eager_reference.TOLERANCE`:
    in 32 bits and more for each probability; in 16 bits, where both ways round otherwise, for the share of attention
    that goes to other keys, as a mean over heads, in the worst layer.
    """
    base = base_of(model)
    batch = pad(_random_prompts(base), padding_side="right")
    prefix = batch.input_ids[0, :PREFIX].tolist()
    with evaluating(model):
        try:
            cache = read_prefix(model, prefix)
            if cache is None:
                return False
            rows, logits = forward_rows(model, batch, kernel)
            after, after_logits = forward_rows(model, batch, kernel, copies(cache, len(LENGTHS)))
        except Exception:  # whatever a family's own code raises for a cache
            return False
    return _is_close(rows, after, logits, after_logits, base)


def _is_close(rows: Tensor, after: Tensor, logits: Tensor, after_logits: Tensor, base: PreTrainedModel) -> bool:
    tolerance = TOLERANCE.get(base.dtype, 5e-2)
    if rows.shape != after.shape or not bool(rows.isfinite().all()):
        return False
    difference = (rows - after).abs()
    coarse = base.dtype not in (torch.float32, torch.float64)
    off = float(difference.sum(-1).mean(-1).max() / 2 if coarse else difference.max())  # [prompt, layer, head, ...]
    last = logits[0, -1].float()  # of the longest prompt, which ends the batch
    off_logits = float((last - after_logits[0, -1].float()).abs().max()) / (1 + float(last.abs().max()))
    return off <= tolerance and off_logits <= tolerance


def _random_prompts(base: PreTrainedModel) -> list[Encoding]:
    """Two prompts of random tokens that begin with the same prefix."""
    vocabulary = base.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    prefix, *rests = (
        torch.randint(vocabulary, (n,), generator=generator).tolist() for n in (PREFIX, *(n - PREFIX for n in LENGTHS))
    )
    prompt = Prompt("random tokens", {}, "0", Fact("s", "r", ("a",)))
    return [Encoding(prompt, (*prefix, *rest), ("",) * (PREFIX + len(rest)), {}) for rest in rests]
