"""The attention function that runs a model's usual attention and also returns one query's probabilities: the row."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from attnbalance.errors import ModelError

IMPLEMENTATION = "attnbalance_row"
"""The name of our function in transformers' AttentionInterface; transformers looks for words in it, and finds none."""


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
    on_row: Callable[[Module, Tensor], None] | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """The model's own attention output, and the row of `query_index` [prompt] as float32 [prompt, head, position].

    Called by transformers, after rotary embedding and normalisation. The output is that of SDPA, or of the family's
    eager attention if SDPA cannot express it (softcap, attention sinks). If a family's sparse attention selects keys,
    the others are masked. Raises `UnknownTensorError` for a keyword with a tensor that neither the row nor the output
    would follow. Not checked by jaxtyping at run time, so that it can be compiled.

    Arguments:
        module: the attention module.
        query: [prompt, head, query, d_head].
        key: [prompt, kv_head, position, d_head].
        value: as `key`.
        attention_mask: boolean or added to scores; None for causal attention without padding.
        query_index: the position of each prompt's query; without it (as in generation) there is no row.
        row_edit: changes the last query's row (see `models.interventions`); the row returned is the model's own.
        on_row: called with the module and its row before the output is computed; it may end the pass by raising.
        kwargs: what else the family passes to its attention.
    """
    attention_mask = _sparse_mask(module, query, key, attention_mask, kwargs)
    _check_keywords(module, kwargs)
    row = None
    if query_index is not None:
        row = query_row(module, query, key, attention_mask, query_index, **kwargs)
        if on_row is not None:
            on_row(module, row)
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


class UnknownTensorError(ModelError):
    """A family passes its attention a tensor that our function does not know, such as another kind of bias."""


class UnnumberedLayerError(ModelError):
    """An attention module does not say which layer it belongs to."""


KNOWN = ("softcap", "s_aux", "position_bias")
"""Keywords with tensors that the row and the output follow."""

APPLIED = ("position_ids", "cache_position", "position_embeddings", "token_type_ids", "num_items_in_batch")
"""Keywords with tensors that are in the query, the key or the mask already, and Trainer's divisor of the loss."""


def _check_keywords(module: Module, kwargs: Mapping[str, object]) -> None:
    for name, value in kwargs.items():
        parts = value if isinstance(value, tuple | list) else (value,)
        if name not in KNOWN + APPLIED and any(isinstance(part, Tensor) for part in parts):
            raise UnknownTensorError(
                f"{type(module).__name__} passes its attention a tensor {name!r} that is not known here: rows and "
                "outputs would be wrong"
            )


def _sparse_mask(
    module: Module, query: Tensor, key: Tensor, attention_mask: Tensor | None, kwargs: dict[str, object]
) -> Tensor | None:
    """The mask, with the keys masked that sparse attention did not select; takes its keywords out of `kwargs`.

    Sparse families mask them only for implementations named "eager" and "sdpa", and pass the selection to all others:
    `indices` [prompt, query, selected] are keys (DeepSeek-V3.2 and similar families), `block_indices` blocks of keys,
    which MiniMax-M3's own function turns into a mask.
    """
    indices, blocks = kwargs.pop("indices", None), kwargs.pop("block_indices", None)
    queries, positions = query.shape[2], key.shape[2]
    if isinstance(blocks, Tensor):
        ids = kwargs.get("position_ids")
        if not isinstance(ids, Tensor):
            ids = torch.arange(positions - queries, positions, device=query.device)[None]
        indexer: Any = module.indexer
        attention_mask = indexer.build_block_mask(blocks, attention_mask, positions, query.dtype, query.device, ids)
    if not isinstance(indices, Tensor):
        return attention_mask
    shape = (len(query), queries, positions)
    selected = torch.zeros(shape, dtype=torch.bool, device=query.device).scatter(-1, indices.long(), True)[:, None]
    if attention_mask is None:
        return selected & selected.new_ones(queries, positions).tril(positions - queries)
    if attention_mask.dtype == torch.bool:
        return attention_mask & selected
    return attention_mask.masked_fill(~selected, torch.finfo(attention_mask.dtype).min)


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

    (edited row - own row) @ values: exactly zero if the edit changes nothing, so that the output stays the kernel's
    own to the last bit. Arguments as in `attention`.
    """
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise UnnumberedLayerError(f"{type(module).__name__} does not say its layer number: its rows cannot be edited")
    last = torch.full((len(query),), query.shape[2] - 1, device=query.device)
    row = query_row(module, query, key, attention_mask, last, **kwargs)
    change = row_edit(layer, row) - row
    values = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return torch.einsum("bhk,bhkd->bhd", change, values.to(change.dtype))


def query_row(
    module: Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    query_index: Tensor,
    **kwargs: Any,
) -> Tensor:
    """Attention probabilities of one query a prompt over all keys, as the family's eager attention computes them.

    softmax(softcap(q k^T scaling) + bias + mask), over the keys and the head's sink logit (`s_aux`) if there is one,
    whose column is then dropped, so that a row may sum to less than 1. Scores are float32 (float64 in models of
    float64): in 16 bits, as eager attention has them, they would move a probability by up to 0.02. Differentiable;
    before dropout. Arguments as in `attention`; of `kwargs`, `scaling`, `softcap`, `s_aux`, `position_bias` and
    `is_causal` count.
    """
    scores = _scores(query, key, query_index, kwargs.get("scaling"), kwargs.get("softcap"))
    prompts, heads, positions = scores.shape
    each, index = torch.arange(prompts, device=query.device), query_index.to(query.device)
    position_bias, is_causal, sinks = (kwargs.get(name) for name in ("position_bias", "is_causal", "s_aux"))
    if position_bias is not None:
        scores = scores + position_bias.expand(prompts, -1, -1, -1)[each, :, index, :positions]
    lowest = torch.finfo(scores.dtype).min
    if attention_mask is not None:
        mask = attention_mask.expand(prompts, -1, -1, -1)[each, :, index, :positions]
        scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    elif query.shape[2] > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        later = torch.arange(positions, device=query.device) > index[:, None, None]
        scores = scores.masked_fill(later, lowest)
    if sinks is None:
        return torch.softmax(scores, dim=-1, dtype=torch.float32)
    sink = sinks.view(1, heads, 1).expand(prompts, heads, 1).to(scores.dtype)
    return torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1, dtype=torch.float32)[..., :-1]


def _scores(query: Tensor, key: Tensor, query_index: Tensor, scaling: float | None, softcap: float | None) -> Tensor:
    """The scores of one query a prompt [prompt, head, position], in float32 or float64, before bias and mask."""
    prompts, heads, _, d_head = query.shape
    kv_heads, positions = key.shape[1], key.shape[2]
    each, index = torch.arange(prompts, device=query.device), query_index.to(query.device)
    q = query[each, :, index].view(prompts, kv_heads, heads // kv_heads, d_head)
    with torch.autocast(query.device.type, enabled=False):  # which would multiply in 16 bits again
        scores = torch.einsum("bgrd,bgkd->bgrk", _float(q), _float(key)).reshape(prompts, heads, positions)
    scores = scores * (d_head**-0.5 if scaling is None else scaling)
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def _float(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _family_attention(
    module: Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: object
) -> Tensor:
    """The output of the eager attention in the module's own modeling file, with the mask in the form it expects."""
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
