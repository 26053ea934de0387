"""Value-weighted attention: the length of what each head writes for each token (Kobayashi et al. 2020)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from attnbalance.arguments import expects
from attnbalance.data.batches import PromptBatch
from attnbalance.data.prompts import Prompt
from attnbalance.models.bridge import BridgedModel, check_same
from attnbalance.models.evaluating import without_autocast
from attnbalance.readings.attention import AttentionRows, gather_rows


@without_autocast()
@torch.no_grad()
@expects(model=BridgedModel, prompts=[Prompt])
def read_value_weighted_attention(
    model: BridgedModel, prompts: Sequence[Prompt], *, batch_size: int = 32, progress: bool = False
) -> AttentionRows:
    """The length of what each head adds to the residual stream of a prompt's last token for each token, as rows.

    ||A[q, k] (x_k W_V + b_V) W_O|| (Kobayashi et al. 2020, "Attention is Not Only a Weight", Eq. 4): a token with a
    large probability and a small value, as the first one often is, counts little. x_k is what the layer's attention
    gets for token k, after its norm. The value bias b_V is part of each token's vector, as in the paper; the output
    bias b_O belongs to no token and is left out. Heads that share values (grouped queries) each have their own W_O. A
    norm after attention (Gemma 2) is not applied. Entries are lengths of vectors, not probabilities: they are at least
    0, have no upper bound, and are in the model's own units.

    Holds prompts x layers x heads x longest prompt x 4 bytes. Raises `ModelError` for a family in which these vectors
    do not add up to what attention writes, and what `read_attention` raises.
    """
    rows = value_weighted_rows(model)
    read = gather_rows(model.hooked, prompts, rows, batch_size=batch_size, progress=progress)
    return replace(read, weighted=True)


def value_weighted_rows(model: BridgedModel) -> Callable[[PromptBatch], AttentionRows]:
    """A function that gives the rows of one batch, with every prompt's first token at position 0."""
    lengths = {i: torch.linalg.qr(model.weights.W_O[i].mT, mode="r").R for i in model.layers}
    names = {i: _hooks(model, i) for i in model.layers}

    @torch.no_grad()
    def rows(batch: PromptBatch) -> AttentionRows:
        keep = dict[str, Callable[[Tensor], Tensor]]()
        for values, pattern, written in names.values():
            keep |= {values: lambda x: x, pattern: lambda x: x[:, :, -1], written: lambda x: x[:, -1]}
        _, kept = model.run(batch.input_ids, batch.attention_mask, keep)
        layers = [_of_layer(model, i, lengths[i], *(kept[name] for name in names[i])) for i in model.layers]
        spans = {role: batch.unpadded(span) for role, span in batch.spans.items()}
        values = batch.unpadded(torch.stack(layers, dim=1))
        return AttentionRows(values, spans, batch.tokens, model.layers, batch.prompts, weighted=True)

    return rows


def _hooks(model: BridgedModel, layer: int) -> tuple[str, str, str]:
    """The names of a layer's values, its pattern, and what its attention writes before any norm."""
    after = f"blocks.{layer}.ln1_post.hook_in"
    written = after if hasattr(model.bridge.blocks[layer], "ln1_post") else f"blocks.{layer}.hook_attn_out"
    return f"blocks.{layer}.attn.hook_v", f"blocks.{layer}.attn.hook_pattern", written


def _of_layer(
    model: BridgedModel,
    layer: int,
    lengths: Float[Tensor, "head d_value d_value"],
    values: Tensor,
    pattern: Float[Tensor, "prompt head position"],
    written: Float[Tensor, "prompt d_model"],
) -> Float[Tensor, "prompt head position"]:
    """The rows of one layer; raises `ModelError` if the vectors do not add up to what its attention `written`.

    `lengths` R is of W_O^T = Q R, so that ||v W_O|| = ||R v||: in d_value numbers a token and head, not d_model.
    """
    by_head, weights = model.weights.by_head(values), model.weights
    heads = torch.einsum("phj,pjhk->phk", pattern, by_head)
    total = torch.einsum("phk,hkd->pd", heads, weights.W_O[layer]) + weights.b_O[layer]
    check_same(model.name, f"head outputs of layer {layer}", total, written)
    return pattern * torch.einsum("hrk,pjhk->phjr", lengths, by_head).norm(dim=-1)
