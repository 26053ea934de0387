"""The attention function that runs a model's own kernel and, beside it, one query's softmax: the row."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Module
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from attnbalance.errors import ModelError

IMPLEMENTATION = "attnbalance_row"
"""The name of our function in transformers' AttentionInterface (none of the words that transformers looks for)."""


def register() -> None:
    """Make the attention function known to transformers; calling it again changes nothing.

    The mask function of the same name is the SDPA one: without it padding would be ignored silently.
    """
    AttentionInterface.register(IMPLEMENTATION, attention)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


def attention(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    query_index: Tensor | None = None,
    row_edit: Callable[[int, Tensor], Tensor] | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """The model's own attention output, and the row of `query_index` [prompt] as float32 [prompt, head, position].

    Called by transformers, with query [prompt, head, query, d_head] and key and value [prompt, kv_head, position,
    d_head] after rotary embedding and normalisation. Without `query_index` (as in generation) there is no row. The
    output is that of SDPA; of the family's eager attention where SDPA cannot express it (softcap, attention sinks).
    `row_edit` changes the last query's row (see `models.edits`); the row returned is the model's own.
    Not checked by jaxtyping at run time, so that it can be compiled.
    """
    row = None
    if query_index is not None:
        row = query_row(module, query, key, attention_mask, query_index, **kwargs)  # pyright: ignore[reportArgumentType]
    shift = None
    if row_edit is not None and query.shape[2] == key.shape[2]:  # whole prompts, not the steps of generation
        shift = _shift(module, query, key, value, attention_mask, row_edit, **kwargs)
    kwargs.pop("output_attentions", None)
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        output = _family_attention(module, query, key, value, attention_mask, **kwargs)
    else:
        output = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)[0]  # pyright: ignore[reportArgumentType]
    if shift is not None:
        output = torch.cat([output[:, :-1], output[:, -1:] + shift[:, None].to(output.dtype)], dim=1)
    return output, row


def _shift(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    row_edit: Callable[[int, Tensor], Tensor],
    **kwargs: object,
) -> Tensor:
    """What an edit adds to the attention output at the last query, [prompt, head, d_head].

    (edited row - own row) @ values: exactly zero where the edit changes nothing, so that the output stays the kernel's
    own to the last bit.
    """
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise ModelError(f"{type(module).__name__} does not say its layer number: its rows cannot be edited")
    last = torch.full((len(query),), query.shape[2] - 1, device=query.device)
    row = query_row(module, query, key, attention_mask, last, **kwargs)  # pyright: ignore[reportArgumentType]
    change = row_edit(layer, row) - row
    values = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return torch.einsum("bhk,bhkd->bhd", change, values.to(change.dtype))


def query_row(
    module: Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    query_index: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    **_: object,
) -> Tensor:
    """Attention probabilities of one query a prompt over all keys, as the family's eager attention computes them.

    softmax(softcap(q k^T scaling) + bias + mask), over the keys and the head's sink logit (`s_aux`) where there is
    one, whose column is then dropped, so that a row may sum to less than 1. Differentiable; before dropout.
    """
    prompts, heads, queries, d_head = query.shape
    kv_heads, positions = key.shape[1], key.shape[2]
    each = torch.arange(prompts, device=query.device)
    index = query_index.to(query.device)
    q = query[each, :, index].view(prompts, kv_heads, heads // kv_heads, d_head)
    scores = torch.einsum("bgrd,bgkd->bgrk", q, key).reshape(prompts, heads, positions)
    scores = scores * (d_head**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if position_bias is not None:
        scores = scores + position_bias.expand(prompts, -1, -1, -1)[each, :, index, :positions]
    lowest = torch.finfo(scores.dtype).min
    if attention_mask is not None:
        mask = attention_mask.expand(prompts, -1, -1, -1)[each, :, index, :positions]
        scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    elif queries > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        later = torch.arange(positions, device=query.device) > index[:, None, None]
        scores = scores.masked_fill(later, lowest)
    if s_aux is None:
        return torch.softmax(scores, dim=-1, dtype=torch.float32)
    sink = s_aux.view(1, heads, 1).expand(prompts, heads, 1).to(scores.dtype)
    return torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1, dtype=torch.float32)[..., :-1]


def _family_attention(
    module: Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: object
) -> Tensor:
    """The output of the eager attention of the module's own modeling file, given the mask in the form it expects."""
    eager: Callable[..., tuple[Tensor, Tensor]] | None
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise ModelError(f"{type(module).__name__} uses softcap or sinks but has no eager attention to run them")
    queries = query.shape[2]
    causal = kwargs.get("is_causal")
    if attention_mask is None and queries > 1 and (getattr(module, "is_causal", True) if causal is None else causal):
        key, value = key[:, :, :queries], value[:, :, :queries]
        attention_mask = torch.ones(queries, queries, dtype=torch.bool, device=query.device).tril()[None, None]
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        zeros = torch.zeros(attention_mask.shape, dtype=query.dtype, device=query.device)
        # the softmax is in float32, where float64's lowest number would be -inf, and padding's own rows NaN
        lowest = max(torch.finfo(query.dtype).min, torch.finfo(torch.float32).min)
        attention_mask = zeros.masked_fill(~attention_mask, lowest)
    return eager(module, query, key, value, attention_mask, **kwargs)[0]
