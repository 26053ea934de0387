"""The reference of the self-check: eager attention on one prompt alone, compared with rows and logits of a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from attnbalance.data.batches import PromptBatch, pad
from attnbalance.data.tokens import Encoding
from attnbalance.errors import ModelError
from attnbalance.models.forward import attention_maps, base_of, device_of, forward_rows, layer_list, taken

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference allowed in a row, and in a logit relative to the largest one, by the model's dtype.

In float32 and float64 it holds for every probability: kernels sum in another order (differences of 1e-6 here, 1e-5 in
large models), while a wrong mask, scale or position shows as 1e-2 to 1.

In 16 bits rounding grows from layer to layer, to 0.1 and more in a probability of a sound model of 32 layers. So every
layer after the first gets the input that it had in the reference, and rounds once. What must stay below the limit is
the share of attention that goes to other keys, as a mean over the heads of a layer, since two large scores that are
nearly equal may change their order in one head. The share is 1e-3 on CPUs in bfloat16, an eighth of that in float16;
the limit leaves room for kernels that sum in 16 bits, whose queries and keys differ in their last bit (1e-2 if many
do). Padding that is not masked moves 0.15 to 0.6, a scale wrong by a third mostly 0.04 to 0.1.
"""

SLOPE = 0.02
"""Largest deviation from 1 allowed in 16 bits, beyond five standard errors, of the slope of the reference's logarithms
on ours over the keys of a layer. Rounding, as often up as down, leaves it at 1; a score scale wrong by 5% does not."""


class Reference(NamedTuple):
    """What whole attention maps say of one prompt, run alone."""

    rows: Float[Tensor, "layer head position"]
    """The last token's rows, in float32."""
    logits: Float[Tensor, " vocab"]
    """The last token's logits."""
    inputs: dict[int, Float[Tensor, "position d_model"]]
    """The input of each layer, where layers can be hooked."""

    def is_finite(self) -> bool:
        """Whether rows and logits are numbers."""
        return bool(self.rows.isfinite().all()) and bool(self.logits.isfinite().all())


def eager_reference(model: Module, encoding: Encoding) -> Reference:
    """The reference for one prompt, without mask and position ids; the model must be set to eager attention."""
    ids = torch.tensor([encoding.ids], device=device_of(base_of(model)))
    inputs: dict[int, Tensor] = {}

    def keep(layer: int, hidden: Tensor) -> Tensor:
        inputs[layer] = hidden[0].clone()
        return hidden

    last = taken(base_of(model), {"logits_to_keep": 1})
    with layer_inputs(base_of(model), keep):
        output = model(input_ids=ids, output_attentions=True, use_cache=False, **last)
    maps, logits = attention_maps(output)
    rows = torch.stack([layer[0, :, -1].to(ids.device) for layer in maps]).float()
    return Reference(rows, logits[0, -1], inputs)


def check_rows(model: Module, prompts: Sequence[tuple[Encoding, Reference]], side: str, kernel: str, name: str) -> None:
    """Raise `ModelError` unless rows and logits of prompts in one batch equal their references; see `TOLERANCE`.

    `side` is the side that is padded, `kernel` the one that rows are read with, `name` the model's for the message.
    """
    batch = pad([encoding for encoding, _ in prompts], padding_side=side)
    references = [reference for _, reference in prompts]
    dtype = base_of(model).dtype
    tolerance, coarse = TOLERANCE.get(dtype, 5e-2), dtype not in (torch.float32, torch.float64)
    with _inputs_of(references, base_of(model), batch) if coarse else nullcontext():
        rows, logits = forward_rows(model, batch, kernel)
    masks = [(mask != 0).to(rows.device) for mask in batch.attention_mask]
    ours = [row[..., mask] for row, mask in zip(rows, masks, strict=True)]
    theirs = [reference.rows.to(rows.device) for reference in references]
    off_slope = _slope_error(ours, theirs, torch.finfo(dtype).eps / math.sqrt(12)) if coarse else 0.0
    for i, reference in enumerate(references):
        difference = (ours[i] - theirs[i]).abs()
        off = float((difference.sum(-1).mean(-1) / 2 if coarse else difference).max())
        off_logits = _logits_error(logits[i], reference, batch, i)
        if not (off <= tolerance and off_logits <= tolerance and off_slope <= SLOPE):  # NaN fails too
            by_slope = f", their logarithms by a factor off by {off_slope:.1%} (allowed {SLOPE:.0%})" if coarse else ""
            raise ModelError(
                f"{name}, padded {side}: rows differ by {off:.1e} and logits by {off_logits:.1e} from eager attention "
                f"on one prompt alone (allowed {tolerance:.0e}){by_slope}; this model cannot be read reliably"
            )


def _logits_error(
    logits: Float[Tensor, "logit_position vocab"], reference: Reference, batch: PromptBatch, prompt: int
) -> float:
    """The largest difference of a prompt's logits from the reference, relative to 1 + the largest logit.

    0 if the model gives the last position's logits only and this is not the prompt's last token (padded right).
    """
    query, last = int(batch.query_index[prompt]), batch.input_ids.shape[1] - 1
    if len(logits) == 1 and query != last:
        return 0.0
    at_query = logits[-1] if len(logits) == 1 else logits[query]
    scale = 1 + float(reference.logits.abs().max())
    return float((at_query - reference.logits.to(logits.device)).abs().max()) / scale


def _slope_error(ours: Sequence[Tensor], theirs: Sequence[Tensor], rounding: float) -> float:
    """How far the slope of the references' logarithms on ours is from 1, beyond five standard errors: the worst layer.

    Least squares over the keys of all heads and prompts of a layer with probabilities above 1e-3, each row with its own
    intercept. Our rows are computed in float32, so that the rounding is all on the other side; `rounding` is its
    standard deviation in a logarithm, below which no error is taken to be (rows that are uniform but for rounding).
    """
    xx, xy, yy, free = (torch.zeros(len(ours[0]), dtype=torch.float64, device=ours[0].device) for _ in range(4))
    for row, reference in zip(ours, theirs, strict=True):
        kept = row > 1e-3
        count = kept.sum(-1, keepdim=True).clamp(min=1)
        x, y = (part.double().clamp(min=1e-8).log().masked_fill(~kept, 0.0) for part in (row, reference))
        x, y = ((part - part.sum(-1, keepdim=True) / count).masked_fill(~kept, 0.0) for part in (x, y))
        xx, xy, yy = xx + (x * x).sum((1, 2)), xy + (x * y).sum((1, 2)), yy + (y * y).sum((1, 2))
        free = free + (kept.sum(-1) - 1).clamp(min=0).sum(-1)
    slope = xy / xx
    variance = ((yy - slope * xy).clamp(min=0) / (free - 1).clamp(min=1)).clamp(min=rounding**2)
    error = (variance / xx).sqrt()
    off = ((slope - 1).abs() - 5 * error).nan_to_num(0.0)  # a layer without two keys says nothing
    return float(off.clamp(min=0).max())


@contextmanager
def _inputs_of(references: Sequence[Reference], base: PreTrainedModel, batch: PromptBatch) -> Iterator[None]:
    """The model with every layer after the first given the inputs that it had in the references."""

    def from_reference(layer: int, hidden: Tensor) -> Tensor:
        if layer == 0:  # its own: wrong positions would be hidden otherwise
            return hidden
        hidden = hidden.clone()
        for i, reference in enumerate(references):
            hidden[i, (batch.attention_mask[i] != 0).to(hidden.device)] = reference.inputs[layer].to(hidden.device)
        return hidden

    with layer_inputs(base, from_reference):
        yield


@contextmanager
def layer_inputs(base: PreTrainedModel, change: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
    """The model with the hidden states before each layer put through `change`(layer number, hidden states).

    Hidden states are [prompt, position, d_model]. A model whose layers are not in one list, or take something else, is
    left as it is.
    """

    def before(number: int, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(hidden, Tensor) or hidden.dim() != 3:
            return args, kwargs
        changed = change(number, hidden)
        return ((changed, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": changed})

    hooks = [
        layer.register_forward_pre_hook(lambda _, args, kwargs, i=i: before(i, args, kwargs), with_kwargs=True)
        for i, layer in enumerate(layer_list(base))
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
