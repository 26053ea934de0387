"""Attention rows of prompts, and readings computed from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnbalance.arguments import expects
from attnbalance.data.batches import PromptBatch, in_order, pad
from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.prompts import Prompt
from attnbalance.data.tokens import Encoding
from attnbalance.errors import DataError
from attnbalance.models.hooked import HookedModel
from attnbalance.models.pattern_rows import pattern_reader
from attnbalance.models.shared_prefixes import rows_by_batch
from attnbalance.readings.reading import Reading, concatenate

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

REDUCTIONS = ("max", "max-of-mean", "sum")

FIRST_TOKEN, REST = "first token", "rest"
"""The parts of a row that are no role's: its first token (where attention sinks lie), and all others."""


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
        weighted: Whether the values are lengths of vectors, not probabilities (see `read_value_weighted_attention`).
    """

    values: Float[Tensor, "prompt layer head position"]
    spans: Mapping[str, Bool[Tensor, "prompt position"]]
    tokens: tuple[tuple[str, ...], ...]
    layers: tuple[int, ...]
    prompts: tuple[Prompt, ...]
    weighted: bool = False

    @expects(role=str)
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
        inside = self.values.masked_fill(~self._span(role)[:, None, None, :], 0.0)
        if reduce == "max-of-mean":
            inside = inside.mean(dim=2, keepdim=True)
        values = inside.sum(dim=-1) if reduce == "sum" else inside.amax(dim=-1)
        return self._reading(f"{role} attention ({reduce})", values)

    def share(self, part: str) -> Reading:
        """The sum of each row over one part of its prompt: a role of `spans`, "first token" or "rest".

        Each token belongs to one part, so the shares of all parts add up to the row's sum: 1, or less in models with
        attention sinks. A token with several roles counts for the subject if that is one of them, otherwise for the
        alphabetically first role. The first token counts as "first token" only if it has no role; otherwise the share
        of "first token" is 0. The share of "subject" is `to("subject", "sum")`.

        For value-weighted rows the result is a sum of lengths, not a share of 1. Raises `DataError` for a role that a
        prompt lacks.
        """
        taken = torch.zeros(len(self.values), self.values.shape[-1], dtype=torch.bool)
        owned = {} if part in (FIRST_TOKEN, REST) else {part: self._span(part)}
        first, everything = torch.zeros_like(taken), torch.ones_like(taken)
        first[:, 0] = True
        spans = {role: self.spans[role] for role in in_turn(self.spans)}
        for name, span in (spans | {FIRST_TOKEN: first, REST: everything}).items():
            owned[name], taken = span & ~taken, taken | span
        values = self.values.masked_fill(~owned[part][:, None, None, :], 0.0).sum(dim=-1)
        return self._reading(f"{part} share", values)

    def entropy(self) -> Reading:
        """The entropy of each row, -sum p log p, in nats: 0 if one token has all attention, log n if n share it alike.

        It is not divided by log n, so it grows with the length of the prompt. In models with attention sinks, rows sum
        to less than 1. Each row is then divided by its sum first, since the sink is not a token.
        """
        total = self.values.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(self.values.dtype).tiny)
        values = torch.special.entr(self.values / total).sum(dim=-1)
        return self._reading("attention entropy", values, "nats")

    def _reading(self, name: str, values: Float[Tensor, "prompt layer head"], unit: str = "") -> Reading:
        """A reading of these rows, whose name says if they are weighted; its unit is by default the rows' own."""
        name, own = (f"value-weighted {name}", "norm") if self.weighted else (name, "probability")
        return Reading.of(self.prompts, name, unit or own, values, self.layers)

    def _span(self, role: str) -> Bool[Tensor, "prompt position"]:
        span = self.spans.get(role)
        if span is None or not bool(span.any(dim=1).all()):
            there = ", ".join(self.spans) or "none"
            raise DataError(f"not every prompt has a span {role!r}; there are {there}, as the template decides")
        return span


def in_turn(roles: Iterable[str]) -> tuple[str, ...]:
    """The roles in the order in which they take their tokens (see `AttentionRows.share`): the subject first."""
    return tuple(sorted(set(roles), key=lambda role: (role != "subject", role)))


@torch.no_grad()
@expects(prompts=[Prompt])
def read_attention(
    model: HookedModel | TransformerBridge,
    prompts: Sequence[Prompt],
    *,
    layers: Sequence[int] | None = None,
    batch_size: int = 32,
    progress: bool = False,
) -> AttentionRows:
    """The attention row of every prompt's last token in every layer and head, in the order of the prompts.

    With `layers` (layer numbers, as in `AttentionRows.layers`), only these layers are read. In models that are read
    beside their own attention kernel, the forward pass then stops at the last of them. A TransformerBridge (of
    TransformerLens) is read through its own attention patterns. Its hooks stay active, and its own tokenizer is used,
    which may add a first token. A prefix that prompts share (few-shot examples, a chat's system text) is read only once
    where that saves time. This is done only in models for which a check at first use shows the same rows as for whole
    prompts (see `HookedModel.shares_prefixes`).

    Holds the rows of all prompts: prompts x layers x heads x longest prompt x 4 bytes. `read_subject_attention` holds
    one batch at a time. Raises `BadRowsError` for prompts that cannot be tokenized or are longer than the model's
    positions, `DataError` for no prompts, and for layers that the model does not have.
    """
    if isinstance(model, HookedModel):
        return gather_rows(model, prompts, layers=layers, batch_size=batch_size, progress=progress)
    provider, patterns = pattern_reader(model)
    wanted = provider.chosen_layers(layers)
    index = [provider.layers.index(layer) for layer in wanted]
    rows = lambda batch: rows_of(batch, patterns(batch)[:, index], wanted)  # noqa: E731
    return gather_rows(provider, prompts, rows, layers=wanted, batch_size=batch_size, progress=progress)


def gather_rows(
    model: HookedModel,
    prompts: Sequence[Prompt],
    rows: Callable[[PromptBatch], AttentionRows] | None = None,
    *,
    layers: Sequence[int] | None = None,
    batch_size: int,
    progress: bool,
) -> AttentionRows:
    """The rows of all prompts, in their order; arguments as in `read_from_rows`."""
    encodings = PromptSet.of(prompts, model.tokenizer).encodings
    pieces, order = [], []
    for indices, batch_rows in _by_batch(model, encodings, rows, layers, batch_size, progress):
        pieces.append(batch_rows.values)
        order.append(indices)
    return AttentionRows(
        in_order(pieces, order),
        pad(encodings, padding_side="right").spans,
        tuple(encoding.tokens for encoding in encodings),
        model.chosen_layers(layers),
        tuple(prompts),
    )


@torch.no_grad()
def read_subject_attention(
    model: HookedModel,
    prompts: Sequence[Prompt],
    *,
    reduce: str = "max",
    layers: Sequence[int] | None = None,
    batch_size: int = 32,
    progress: bool = False,
) -> Reading:
    """`read_attention(model, prompts, layers=layers).to("subject", reduce)`, holding the rows of one batch at a time.

    model: the model.
    prompts: what it is asked.
    reduce: how attention to the subject's tokens becomes one number (see `AttentionRows.to`).
    layers: those to read; by default all.
    batch_size: prompts in a forward pass.
    progress: show a progress bar.
    """
    readers = {"subject": lambda rows: rows.to("subject", reduce)}
    return read_from_rows(model, prompts, readers, layers=layers, batch_size=batch_size, progress=progress)["subject"]


@torch.no_grad()
@expects(model=HookedModel, prompts=[Prompt])
def read_attention_by_part(
    model: HookedModel, prompts: Sequence[Prompt], *, batch_size: int = 32, progress: bool = False
) -> dict[str, Reading]:
    """The share of each row on each part of its prompt (see `AttentionRows.share`), from one pass over the prompts.

    The parts are the prompts' roles ("subject", and "context" and "relation" if the template has them), "first token"
    and "rest". Holds the rows of one batch at a time. Raises `DataError` for a role that only some of the prompts have,
    and for no prompts; `BadRowsError` as `read_attention` does.
    """
    parts = (*in_turn(role for prompt in prompts for role in prompt.spans), FIRST_TOKEN, REST)
    readers = {part: partial(AttentionRows.share, part=part) for part in parts}
    return read_from_rows(model, prompts, readers, batch_size=batch_size, progress=progress)


@torch.no_grad()
def read_from_rows(
    model: HookedModel,
    prompts: Sequence[Prompt],
    readers: Mapping[str, Callable[[AttentionRows], Reading]],
    *,
    rows: Callable[[PromptBatch], AttentionRows] | None = None,
    layers: Sequence[int] | None = None,
    batch_size: int = 32,
    progress: bool = False,
) -> dict[str, Reading]:
    """What each reader makes of the prompts' rows, under its name, from one pass.

    Holds the rows of one batch at a time.

    Args:
        model: The model.
        prompts: What it is asked.
        readers: Functions from rows to a reading.
        rows: What gives a batch's rows. By default they are the model's attention probabilities, for which a prefix
            that prompts share is read once, where the model's cache allows it.
        layers: The layers that are read; by default all. They go with the model's own rows alone.
        batch_size: Prompts in a forward pass.
        progress: Whether to show a progress bar.

    Raises `DataError` for `layers` with `rows`, and what `read_attention` raises.
    """
    if rows is not None and layers is not None:
        raise DataError("`layers` choose among the model's own rows; leave them out, or leave out `rows`")
    prompts = PromptSet.of(prompts, model.tokenizer)
    batches = _by_batch(model, prompts.encodings, rows, layers, batch_size, progress)
    read = [{name: reader(batch_rows) for name, reader in readers.items()} for _, batch_rows in batches]
    return {name: concatenate([part[name] for part in read]).at(prompts.prompt_ids) for name in readers}


def _by_batch(
    model: HookedModel,
    encodings: Sequence[Encoding],
    rows: Callable[[PromptBatch], AttentionRows] | None,
    layers: Sequence[int] | None,
    batch_size: int,
    progress: bool,
) -> Iterator[tuple[list[int], AttentionRows]]:
    """The rows of each batch, with the indices of its prompts."""
    bar = "attention" if progress else None
    if rows is None:
        for indices, batch, values in rows_by_batch(model, encodings, batch_size, bar, layers):
            yield indices, rows_of(batch, values, model.chosen_layers(layers))
    else:
        for indices, batch in model.batches(encodings, batch_size, bar=bar):
            yield indices, rows(batch)


def rows_of(
    batch: PromptBatch, values: Float[Tensor, "prompt layer head position"], layers: tuple[int, ...]
) -> AttentionRows:
    """The rows of one batch, shifted so that every prompt's first token is at position 0."""
    spans = {role: batch.unpadded(span) for role, span in batch.spans.items()}
    return AttentionRows(batch.unpadded(values), spans, batch.tokens, layers, batch.prompts)
