"""Caches of prefixes and of answers, and checks that reading after them gives the same as whole passes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor
from torch.nn import Module
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from attnbalance.data.batches import PromptBatch, pad
from attnbalance.data.facts import Fact
from attnbalance.data.prompts import Prompt
from attnbalance.data.tokens import Encoding
from attnbalance.models.eager_reference import TOLERANCE
from attnbalance.models.evaluating import evaluating
from attnbalance.models.forward import base_of, device_of, forward_rows, position_limit, taken
from attnbalance.models.length_thresholds import length_thresholds

PREFIX, LENGTHS = 5, (12, 7)
"""Tokens of the prefix and of the two whole prompts that prove a model; the shorter one is padded. Of answers, the
prompts are longer where the model's configuration names a length that they would not cross."""
ANSWERED = 4
"""Tokens of the answers that prove a model's cache."""


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


@torch.no_grad()
def same_with_cache(model: Module) -> bool:
    """Whether the model's generation has the same logits with its cache as without it.

    A cache of the keys and values of all tokens is trusted, unless the configuration names a length at which attention
    changes (`length_thresholds`). Others (sliding windows, recurrent states) are tried with greedy answers to a prompt
    of random tokens, and to two in one batch that is padded left. The longer one crosses the lengths of up to
    `length_thresholds.FARTHEST` tokens that the configuration names, since some families keep only a window's keys
    although they attend to all (a Llama with `sliding_window` or such `layer_types`). The logits of an answer are
    compared until its two ways choose different tokens. Tolerance: `TOLERANCE`, relative to the largest logit; so in
    16 bits a cache whose faults are as small as rounding is trusted (zamba2's are 1% of the largest
    logit). The cache is also trusted if the family cannot generate such answers without it, and if logits are NaN or
    infinite.
    """
    base = base_of(model)
    prompts = _random_prompts(base, _crossing(base))
    with evaluating(model):
        with suppress(Exception):  # whatever a family's own code raises
            if not length_thresholds(base.config).crossed and read_prefix(model, prompts[0].ids) is not None:
                return True
        return all(_answers_alike(base, pad(prompts[:count], padding_side="left")) for count in (1, 2))


def _answers_alike(base: PreTrainedModel, batch: PromptBatch) -> bool:
    """Whether greedy answers to a batch have the same logits with the cache as without it."""
    try:
        whole = _answer(base, batch, use_cache=False)
    except Exception:  # whatever a family's own code raises
        return True
    try:
        cached = _answer(base, batch, use_cache=True)
    except Exception:
        return False
    if not all(bool(logits.amax(1).isfinite().all()) for logits in whole):
        return True
    return _are_close_until_they_part(cached, whole, TOLERANCE.get(base.dtype, 5e-2))


def _crossing(base: PreTrainedModel) -> tuple[int, int]:
    """The lengths of two prompts, the longer of which crosses the thresholds of the configuration if it can."""
    limit = position_limit(base.config)
    longest = max(LENGTHS[0], *(length + 2 for length in length_thresholds(base.config).crossed), 0)
    return (longest if limit is None else max(LENGTHS[0], min(longest, limit - ANSWERED))), LENGTHS[1]


def _are_close_until_they_part(cached: Sequence[Tensor], whole: Sequence[Tensor], tolerance: float) -> bool:
    """Whether the logits of each answer are close up to the first step at which its two ways choose other tokens."""
    alike = torch.ones(len(whole[0]), dtype=torch.bool, device=whole[0].device)
    for ours, theirs in zip(cached, whole, strict=True):
        off = (ours - theirs).abs().masked_fill(ours == theirs, 0.0).amax(1)  # both may be minus infinity
        off = off / (1 + theirs.masked_fill(theirs.isinf(), 0.0).abs().amax(1))
        if not bool((off <= tolerance)[alike].all()):
            return False
        alike &= ours.argmax(1) == theirs.argmax(1)
    return True


def _answer(base: PreTrainedModel, batch: PromptBatch, use_cache: bool) -> list[Tensor]:
    """The logits of each token of the greedy answers to a batch, in float32."""
    settings = GenerationConfig(
        max_new_tokens=ANSWERED,
        do_sample=False,
        use_cache=use_cache,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    with only_settings(base, settings):
        output = base.generate(  # pyright: ignore[reportCallIssue]
            input_ids=batch.input_ids.to(device_of(base)),
            attention_mask=(batch.attention_mask != 0).long().to(device_of(base)),
            generation_config=settings,
        )
    return [logits.float() for logits in output.logits]


@contextmanager
def only_settings(base: PreTrainedModel, settings: GenerationConfig) -> Iterator[None]:
    """The model with only these generation settings: transformers fills what is not set from the model's own."""
    own = base.generation_config
    base.generation_config = settings
    try:
        yield
    finally:
        base.generation_config = own


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


def _random_prompts(base: PreTrainedModel, lengths: Sequence[int] = LENGTHS) -> list[Encoding]:
    """Prompts of random tokens that begin with the same prefix."""
    vocabulary = base.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    prefix, *rests = (
        torch.randint(vocabulary, (n,), generator=generator).tolist() for n in (PREFIX, *(n - PREFIX for n in lengths))
    )
    prompt = Prompt("random tokens", {}, "0", Fact("s", "r", ("a",)))
    return [Encoding(prompt, (*prefix, *rest), ("",) * (PREFIX + len(rest)), {}) for rest in rests]
