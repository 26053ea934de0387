"""The self-check on loading: rows and logits against the family's own eager attention, padding, and causality."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from attnbalance.data.batches import pad
from attnbalance.data.facts import Fact
from attnbalance.data.prompts import Prompt
from attnbalance.data.tokens import Encoding
from attnbalance.errors import ModelError
from attnbalance.models.eager_reference import TOLERANCE, Reference, check_rows, eager_reference
from attnbalance.models.evaluating import evaluating
from attnbalance.models.forward import (
    NoRowsError,
    attention_layers,
    base_of,
    depth_of,
    device_of,
    editing,
    forward_rows,
    position_limit,
)
from attnbalance.models.length_thresholds import FARTHEST, length_thresholds
from attnbalance.models.own_attention import check_own, own_outputs
from attnbalance.models.rows import IMPLEMENTATION, UnknownTensorError, UnnumberedLayerError

LONGEST = 9
"""Tokens in the longer of the two short prompts, and beyond a threshold in the third."""
LONG = 64
"""Tokens of the prompt on which the model must compute what it computed before."""


class SelfCheck(NamedTuple):
    """What the self-check learns of a model; the fields are those of `HookedModel`."""

    kernel: str
    layers: tuple[int, ...]
    alike_from: int | None
    editable: bool


@torch.no_grad()
def self_check(model: Module, name: str) -> SelfCheck:
    """Check a model whose attention is about to be read, and learn how to read it.

    Two prompts of random tokens and different lengths: eager attention on each alone, without mask and position ids, is
    the reference; the rows of both together, padded left and right, must equal it, and so must the logits (in 16 bits
    layer by layer, see `eager_reference.TOLERANCE`). A third prompt crosses the thresholds of length that the
    configuration names, up to `FARTHEST`: if it is right alone but not in a batch with the others, prompts as long may
    only be read in batches of prompts of their own length. A later token must not change an earlier logit. And with the
    attention that is set at last, the model must compute what it computed before, layer by layer (see `check_own`).
    Raises `ModelError` otherwise, with the model as it was.
    """
    base = base_of(model)
    own = base.config._attn_implementation or "eager"
    try:
        with evaluating(model):
            crossed, unsure = length_thresholds(base.config)
            limit = position_limit(base.config) or FARTHEST + LONGEST
            lengths = {min(LONG, (limit + 1) // 2)} | {min(threshold + LONGEST, limit) for threshold in crossed[-1:]}
            before = [(prompt, own_outputs(model, prompt)) for prompt in _random_prompts(base, sorted(lengths))]
            learned = _checked(model, base, name, crossed, unsure)
            for prompt, outputs in before:
                check_own(model, prompt, outputs, name, own)
            return learned
    except Exception as error:
        base.config._attn_implementation = own
        _set_copies(base, own)
        if isinstance(error, ModelError) and not isinstance(error, NoRowsError):
            raise
        kind = type(base).__name__
        who = name if name == kind else f"{name} ({kind})"
        if isinstance(error, NoRowsError):
            raise ModelError(f"{who} {error}") from error
        raise ModelError(
            f"{who} gives no attention that could be read from a prompt of random tokens: "
            f"{type(error).__name__}: {str(error)[:200]}"
        ) from error


def _checked(
    model: Module, base: PreTrainedModel, name: str, crossed: Sequence[int], unsure: Sequence[int]
) -> SelfCheck:
    limit = position_limit(base.config) or FARTHEST + LONGEST
    longest = min(LONGEST, limit)
    beyond = [min(threshold + LONGEST, limit) for threshold in crossed[-1:]]
    encodings = _random_prompts(base, [longest, (longest + 1) // 2, *beyond])
    interface = _takes_our_function(base)
    _set_attention(base, "eager", interface)
    references = [eager_reference(model, encoding) for encoding in encodings]
    if not all(reference.is_finite() for reference in references):
        raise ModelError(
            f"{name} gives NaN or infinite numbers; its weights may be damaged, or its dtype too narrow (try float32)"
        )
    if interface:
        _set_attention(base, IMPLEMENTATION, interface)
    kernel = "sdpa" if interface and _gives_rows(model, encodings[:2]) else "eager"
    if kernel == "eager":
        _set_attention(base, "eager", interface)
    _check_causal(model, encodings[0], name)
    layers, editable = _layers(model, base, encodings[0], kernel, len(references[0].rows))
    if not _right_in_any_batch(model, list(zip(encodings, references, strict=True)), kernel, name, crossed):
        unsure = [*unsure, *crossed[:1]]
    return SelfCheck(kernel, layers, min(unsure, default=None), editable)


def _right_in_any_batch(
    model: Module, prompts: Sequence[tuple[Encoding, Reference]], kernel: str, name: str, thresholds: Sequence[int]
) -> bool:
    """Whether prompts of all lengths are right in one batch, padded on either side.

    If they are not, those below the first threshold must be right together, and each other one alone.
    """
    try:
        for side in ("left", "right"):
            check_rows(model, prompts, side, kernel, name)
    except ModelError:
        if not thresholds:
            raise
        below = [prompt for prompt in prompts if len(prompt[0].ids) < thresholds[0]]
        groups = [[prompt] for prompt in prompts if prompt not in below] + ([below] if below else [])
        for group, side in product(groups, ("left", "right")):
            check_rows(model, group, side, kernel, name)
        return False
    return True


def _layers(
    model: Module, base: PreTrainedModel, encoding: Encoding, kernel: str, count: int
) -> tuple[tuple[int, ...], bool]:
    """The layer number of each of the `count` rows, and whether each number means one row, which can then be edited.

    The attention calls themselves say it, since their modules know their numbers; else the configuration does.
    """
    calls: dict[int, Tensor] = {}
    same = True

    def note(layer: int, row: Tensor) -> Tensor:
        nonlocal same
        same = same and torch.equal(calls.setdefault(layer, row), row)
        return row

    if kernel == "eager":
        return attention_layers(base, count), False
    try:
        with editing(base, note):
            forward_rows(model, pad([encoding]), kernel)
    except UnnumberedLayerError:
        return attention_layers(base, count), False
    numbered = same and len(calls) == count and list(calls) == sorted(calls)
    layers = tuple(calls) if numbered and count < depth_of(base) else attention_layers(base, count)
    return layers, numbered and set(calls) == set(layers)


def _takes_our_function(base: PreTrainedModel) -> bool:
    """Whether the family takes attention functions through transformers' interface; if so, ours is set."""
    try:
        if not type(base)._can_set_attn_implementation():
            return False
        base.set_attn_implementation(IMPLEMENTATION)
    except (ValueError, KeyError, AttributeError):
        return False
    return True


def _set_attention(base: PreTrainedModel, implementation: str, interface: bool) -> None:
    """Set the attention; a family outside the interface reads it from its configuration, if it reads it at all.

    Falcon, left at SDPA, builds the mask for SDPA and then adds it as if it were eager's: padding is not masked.
    """
    if interface:
        base.set_attn_implementation(implementation)
    else:
        base.config._attn_implementation = implementation
    _set_copies(base, implementation)


def _set_copies(base: PreTrainedModel, implementation: str) -> None:
    """Set the attention of layers with a configuration of their own: a layer copied in memory has a copy."""
    config = base.config.get_text_config()
    for module in base.modules():
        own: Any = getattr(module, "config", None)
        if own is not config and type(own) is type(config) and not isinstance(module, PreTrainedModel):
            own._attn_implementation = implementation


def _gives_rows(model: Module, encodings: list[Encoding]) -> bool:
    """Whether the row comes back: some layers drop the query index, some pass on a tensor that we do not know."""
    try:
        batch = pad(encodings)
        rows, _ = forward_rows(model, batch, "sdpa")
    except (NoRowsError, UnknownTensorError, TypeError):
        return False
    return rows.dim() == 4 and rows.shape[-1] == batch.input_ids.shape[1]


def _random_prompts(base: PreTrainedModel, lengths: Sequence[int]) -> list[Encoding]:
    """Prompts of random tokens."""
    vocabulary = base.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    tokens = [tuple(torch.randint(vocabulary, (n,), generator=generator).tolist()) for n in lengths]
    fact = Fact("s", "r", ("a",))
    return [
        Encoding(Prompt("random tokens", {}, str(i), fact), ids, ("",) * len(ids), {}) for i, ids in enumerate(tokens)
    ]


def _check_causal(model: Module, encoding: Encoding, name: str) -> None:
    """Raise `ModelError` if another last token changes an earlier logit."""
    base = base_of(model)
    ids = torch.tensor([encoding.ids, encoding.ids], device=device_of(base))
    ids[1, -1] = (ids[1, -1] + 1) % base.config.get_text_config().vocab_size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    change = float((logits[0] - logits[1]).abs().max())
    if change > TOLERANCE.get(base.dtype, 5e-2) * (1 + float(logits.abs().max())):
        raise ModelError(
            f"{name} is not causal: a later token changes an earlier logit by {change:.2g}; it reads ahead"
        )
