"""The proof made on load: rows and logits against the family's own eager attention, padding, and causality."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, ModuleList
from transformers import PreTrainedModel

from attnbalance.errors import ModelError
from attnbalance.facts import Fact
from attnbalance.models.forward import NoRowsError, attention_maps, base_of, evaluating, forward_rows, position_limit
from attnbalance.models.rows import IMPLEMENTATION
from attnbalance.prompts import Prompt
from attnbalance.tokens import Encoding, PromptBatch, pad

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference allowed in a row, and in a logit relative to the largest one, by the model's dtype.

In float32 and float64 it holds for every probability: kernels sum in another order (differences of 1e-6 here, 1e-5 in
large models), while a wrong mask, scale or position shows as 1e-2 to 1.

In 16 bits rounding grows from layer to layer, to 0.1 and more in a probability of a sound model of 32. So every layer
after the first is given what it was given in the reference, and rounds once. What must stay below the limit is the
share of attention that lies elsewhere, as a mean over the heads of a layer, since two large scores that are nearly
equal may come to lie the other way round in one head. It is 1e-3 on CPUs in bfloat16, an eighth of that in float16; the
limit leaves room for kernels that sum in 16 bits, whose queries and keys differ in their last bit (some 1e-2 if many
do). Padding that is not masked moves 0.15 to 0.6, a scale wrong by a third mostly 0.04 to 0.1.
"""

LONGEST = 9


@torch.no_grad()
def prove(model: Module, name: str) -> tuple[str, int]:
    """Check a model whose attention is about to be read; returns the kernel ("sdpa" or "eager") and the number of rows.

    Two prompts of random tokens and different lengths: eager attention on each alone, without mask and position ids, is
    the reference; the rows of both together, padded left and right, must equal it, and so must the logits (in 16 bits
    layer by layer, see `TOLERANCE`). A later token must not change an earlier logit. Raises `ModelError` otherwise,
    with the model as it was.
    """
    base = base_of(model)
    own = base.config._attn_implementation
    try:
        with evaluating(model):
            return _prove(model, base, name)
    except Exception as error:
        base.config._attn_implementation = own
        if isinstance(error, ModelError) and not isinstance(error, NoRowsError):
            raise
        raise ModelError(
            f"{name} ({type(base).__name__}) gives no attention that could be read from a prompt of random tokens: "
            f"{type(error).__name__}: {str(error)[:200]}"
        ) from error


def _prove(model: Module, base: PreTrainedModel, name: str) -> tuple[str, int]:
    encodings = _random_prompts(base)
    interface = _interface(base)
    _set_attention(base, "eager", interface)
    reference = [_reference(model, one) for one in encodings]
    if not all(bool(part.isfinite().all()) for one in reference for part in (one.rows, one.logits)):
        raise ModelError(
            f"{name} gives NaN or infinite numbers; its weights may be damaged, or its dtype too narrow "
            "(try --dtype float32)"
        )
    if interface:
        _set_attention(base, IMPLEMENTATION, interface)
    kernel = "sdpa" if interface and _gives_rows(model, encodings) else "eager"
    if kernel == "eager":
        _set_attention(base, "eager", interface)
    _check_causal(model, encodings[0], name)
    for side in ("left", "right"):
        _check_rows(model, pad(encodings, padding_side=side), reference, kernel, f"{name}, padded {side}")
    return kernel, len(reference[0].rows)


def _interface(base: PreTrainedModel) -> bool:
    """Whether the family takes attention functions, ours among them."""
    try:
        if not type(base)._can_set_attn_implementation():
            return False
        base.set_attn_implementation(IMPLEMENTATION)
    except (ValueError, KeyError, AttributeError):
        return False
    return True


def _set_attention(base: PreTrainedModel, implementation: str, interface: bool) -> None:
    """Set the attention; a family outside the interface looks it up in its configuration, where it looks at all.

    Falcon, left at SDPA, builds the mask for SDPA and then adds it as if it were eager's: padding is not masked.
    """
    if interface:
        base.set_attn_implementation(implementation)
    else:
        base.config._attn_implementation = implementation


def _gives_rows(model: Module, encodings: list[Encoding]) -> bool:
    """Whether the query index reaches the attention function and its row comes back (some layers drop keywords)."""
    try:
        batch = pad(encodings)
        rows, _ = forward_rows(model, batch, "sdpa")
    except (NoRowsError, TypeError):
        return False
    return rows.dim() == 4 and rows.shape[-1] == batch.input_ids.shape[1]


def _random_prompts(base: PreTrainedModel) -> list[Encoding]:
    vocabulary = base.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    longest = min(LONGEST, position_limit(base.config) or LONGEST)
    fact = Fact("s", "r", ("a",))
    return [
        Encoding(
            Prompt("random tokens", {}, str(i), fact),
            tuple(torch.randint(vocabulary, (n,), generator=generator).tolist()),
            ("",) * n,
            {},
        )
        for i, n in enumerate((longest, (longest + 1) // 2))
    ]


class _Reference(NamedTuple):
    """Rows [layer, head, position], last logits, and each layer's input [position, d_model] of one prompt alone."""

    rows: Tensor
    logits: Tensor
    inputs: dict[int, Tensor]


def _reference(model: Module, encoding: Encoding) -> _Reference:
    """What the model's whole attention maps say."""
    ids = torch.tensor([encoding.ids], device=base_of(model).device)
    inputs: dict[int, Tensor] = {}

    def keep(layer: int, hidden: Tensor) -> Tensor:
        inputs[layer] = hidden[0].clone()
        return hidden

    with _layer_inputs(base_of(model), keep):
        output = model(input_ids=ids, output_attentions=True, use_cache=False)
    maps, logits = attention_maps(output)
    return _Reference(torch.stack([one[0, :, -1].to(ids.device) for one in maps]).float(), logits[0, -1], inputs)


@contextmanager
def _layer_inputs(base: PreTrainedModel, change: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
    """The model with `change`(number of the layer, hidden states [prompt, position, d_model]) put before each layer.

    A model whose layers do not stand in one list, or take something else, is left as it is.
    """
    count = base.config.get_text_config().num_hidden_layers
    layers = next((part for part in base.modules() if isinstance(part, ModuleList) and len(part) == count), [])

    def before(number: int, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(hidden, Tensor) or hidden.dim() != 3:
            return args, kwargs
        changed = change(number, hidden)
        return ((changed, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": changed})

    hooks = [
        layer.register_forward_pre_hook(lambda _, args, kwargs, i=i: before(i, args, kwargs), with_kwargs=True)
        for i, layer in enumerate(layers)
    ]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


def _check_rows(model: Module, batch: PromptBatch, reference: list[_Reference], kernel: str, where: str) -> None:
    dtype = base_of(model).dtype
    tolerance = TOLERANCE.get(dtype, 5e-2)
    coarse = dtype not in (torch.float32, torch.float64)

    def from_reference(layer: int, hidden: Tensor) -> Tensor:
        if layer == 0:  # its own: wrong positions would be hidden otherwise
            return hidden
        hidden = hidden.clone()
        for i, one in enumerate(reference):
            hidden[i, (batch.attention_mask[i] != 0).to(hidden.device)] = one.inputs[layer].to(hidden.device)
        return hidden

    with _layer_inputs(base_of(model), from_reference) if coarse else nullcontext():
        rows, logits = forward_rows(model, batch, kernel)
    for i, (expected, expected_logits, _) in enumerate(reference):
        places = (batch.attention_mask[i] != 0).to(rows.device)
        difference = (rows[i][..., places] - expected.to(rows.device)).abs()
        off = float((difference.sum(-1).mean(-1) / 2 if coarse else difference).max())
        scale = 1 + float(expected_logits.abs().max())
        at_query = logits[i, -1] if logits.shape[1] == 1 else logits[i, int(batch.query_index[i])]
        is_query = logits.shape[1] > 1 or int(batch.query_index[i]) == batch.input_ids.shape[1] - 1
        off_logits = float((at_query - expected_logits.to(logits.device)).abs().max()) / scale if is_query else 0.0
        if not (off <= tolerance and off_logits <= tolerance):  # NaN fails too
            raise ModelError(
                f"{where}: rows differ by {off:.1e} and logits by {off_logits:.1e} from eager attention on one prompt "
                f"alone (allowed {tolerance:.0e}); this model cannot be read reliably"
            )


def _check_causal(model: Module, encoding: Encoding, name: str) -> None:
    base = base_of(model)
    ids = torch.tensor([encoding.ids, encoding.ids], device=base.device)
    ids[1, -1] = (ids[1, -1] + 1) % base.config.get_text_config().vocab_size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    change = float((logits[0] - logits[1]).abs().max())
    if change > TOLERANCE.get(base.dtype, 5e-2) * (1 + float(logits.abs().max())):
        raise ModelError(
            f"{name} is not causal: a later token changes an earlier logit by {change:.2g}; it reads ahead"
        )
