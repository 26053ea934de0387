"""Attention rows of prompts, and readings computed from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnbalance.arguments import expects
from attnbalance.data.batches import PromptBatch, in_order, pad
from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.prompts import Prompt
from attnbalance.errors import DataError
from attnbalance.models.hooked import HookedModel
from attnbalance.models.pattern_rows import pattern_reader
from attnbalance.readings.reading import Reading, concatenate

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

REDUCTIONS = ("max", "max-of-mean", "sum")


@dataclass(frozen=True)
class AttentionRows:
    """Attention probabilities of each prompt's last token over its own tokens.

    Attributes:
        values: The probabilities, float32, on the CPU. Token j of a prompt is at position j; positions after its last
            token hold 0. A row sums to 1 (less in models with attention sinks). Families read through eager attention
            compute them in the model's own precision.
        spans: The tokens of each role.
        tokens: Each prompt's tokens as text.
        layers: The model's layer numbers.
        prompts: The prompts.
    """

    values: Float[Tensor, "prompt layer head position"]
    spans: Mapping[str, Bool[Tensor, "prompt position"]]
    tokens: tuple[tuple[str, ...], ...]
    layers: tuple[int, ...]
    prompts: tuple[Prompt, ...]

    def to(self, role: str, reduce: str = "max") -> Reading:
        """The rows reduced over the tokens of one role.

        "sum" is the share of attention, "max" the strongest token of each head. Ghosal et al. (2024, B.3) take a
        maximum over the subject's tokens and an average over a layer's heads, without naming the order. We take each
        head's maximum first, which a curve then averages. "max-of-mean" is the other order, the maximum of the mean
        over heads. It gives one number for each layer instead of one for each head, at most the mean of "max".

        Raises `DataError` for another reduction and for a role that a prompt lacks.
        """
        if reduce not in REDUCTIONS:
            raise DataError(f"reduce must be one of {', '.join(REDUCTIONS)}, got {reduce!r}")
        span = self.spans.get(role)
        if span is None or not bool(span.any(dim=1).all()):
            raise DataError(f"not every prompt has a span {role!r}; there are {', '.join(self.spans) or 'none'}")
        inside = self.values.masked_fill(~span[:, None, None, :], 0.0)
        if reduce == "max-of-mean":
            inside = inside.mean(dim=2, keepdim=True)
        values = inside.sum(dim=-1) if reduce == "sum" else inside.amax(dim=-1)
        return Reading.of(self.prompts, f"{role} attention ({reduce})", "probability", values, self.layers)


@torch.no_grad()
@expects(prompts=[Prompt])
def read_attention(
    model: HookedModel | TransformerBridge, prompts: Sequence[Prompt], *, batch_size: int = 32, progress: bool = False
) -> AttentionRows:
    """The attention row of every prompt's last token in every layer and head, in the order of the prompts.

    A TransformerBridge (of TransformerLens) is read through its own attention patterns, with the hooks that are on it.
    Holds the rows of all prompts: prompts x layers x heads x longest prompt x 4 bytes. `read_subject_attention` holds
    one batch at a time. Raises `BadRowsError` for prompts that cannot be tokenized or are longer than the model's
    positions, `DataError` for no prompts.
    """
    model, rows = (model, model.rows) if isinstance(model, HookedModel) else pattern_reader(model)
    encodings = PromptSet.of(prompts, model.tokenizer).encodings
    pieces, order = [], []
    for indices, batch in model.batches(encodings, batch_size, bar="attention" if progress else None):
        pieces.append(batch.unpadded(rows(batch)))
        order.append(indices)
    return AttentionRows(
        in_order(pieces, order),
        pad(encodings, padding_side="right").spans,
        tuple(encoding.tokens for encoding in encodings),
        model.layers,
        tuple(prompts),
    )


@torch.no_grad()
def read_subject_attention(
    model: HookedModel, prompts: Sequence[Prompt], *, reduce: str = "max", batch_size: int = 32, progress: bool = False
) -> Reading:
    """`read_attention(model, prompts).to("subject", reduce)`, holding the rows of one batch at a time.

    model: the model.
    prompts: what it is asked.
    reduce: how attention to the subject's tokens becomes one number (see `AttentionRows.to`).
    batch_size: prompts in a forward pass.
    progress: show a progress bar.
    """
    prompts = PromptSet.of(prompts, model.tokenizer)
    batches = model.batches(prompts.encodings, batch_size, bar="attention" if progress else None)
    joined = concatenate([rows_of(model, batch).to("subject", reduce) for _, batch in batches])
    return joined.at(prompts.prompt_ids)


def rows_of(model: HookedModel, batch: PromptBatch) -> AttentionRows:
    """The rows of one batch, shifted so that every prompt's first token is at position 0."""
    spans = {role: batch.unpadded(span) for role, span in batch.spans.items()}
    return AttentionRows(batch.unpadded(model.rows(batch)), spans, batch.tokens, model.layers, batch.prompts)
