"""Edits of the last query's attention row while a model runs: a span's keys boosted, rows taken from another model."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Bool
from torch import Tensor

from attnbalance.errors import DataError, ModelError
from attnbalance.models.forward import base_of
from attnbalance.models.hooked import HookedModel
from attnbalance.tokens import PromptBatch

RowEdit = Callable[[int, Tensor], Tensor]
"""Layer number and the model's own row [prompt, head, position] (float32) -> the row to use in its place."""

Edit = Callable[[PromptBatch], RowEdit]
"""What to do with the rows of each batch of prompts."""

Span = Callable[[PromptBatch], Bool[Tensor, "prompt position"]]
"""The tokens that an edit is about, in each batch."""


LARGEST = 1e30
"""The largest factor on attention: beyond, float32 runs over."""


@contextmanager
def edited(model: HookedModel, row_edit: RowEdit) -> Iterator[None]:
    """The model with the row of the last query of each whole prompt put through `row_edit`, in every layer.

    Prompts must be padded on the left, so that their last token is the last position. In generation the edit acts on
    the prompt's last token, whose keys and values stay as it left them; the tokens that follow attend by themselves.
    Everything else runs on the model's own kernel. Raises `ModelError` for a model read through eager attention.
    """
    if model.kernel != "sdpa":
        raise ModelError(
            f"{model.name} stands outside transformers' attention interface: its rows can be read, not edited"
        )
    base = base_of(model.model)
    hook = base.register_forward_pre_hook(
        lambda _, args, kwargs: (args, kwargs | {"row_edit": row_edit}), with_kwargs=True
    )
    try:
        yield
    finally:
        hook.remove()


def tokens_of(role: str = "subject") -> Span:
    """The tokens of one role, as the prompts mark it."""

    def span(batch: PromptBatch) -> Bool[Tensor, "prompt position"]:
        if role not in batch.spans or not bool(batch.spans[role].any(dim=1).all()):
            raise DataError(f"not every prompt has a span {role!r}; there are {', '.join(batch.spans)}")
        return batch.spans[role]

    return span


def random_tokens(seed: int = 0) -> Span:
    """A control: as many neighbouring tokens as the subject has, at random among those that are not the subject's.

    Where no gap is as long, tokens that are not neighbours; where too few are left, all of them. Neither the first
    token (which many heads attend to by default) nor the last (the query) is taken while there are others. The choice
    depends on the seed and the prompt alone.
    """

    def span(batch: PromptBatch) -> Bool[Tensor, "prompt position"]:
        chosen = torch.zeros_like(batch.spans["subject"])
        for i, prompt in enumerate(batch.prompts):
            places = (batch.attention_mask[i] != 0).nonzero().flatten().tolist()
            subject = set(batch.spans["subject"][i].nonzero().flatten().tolist())
            inner = [place for place in places[1:-1] if place not in subject]
            free = inner or [place for place in places if place not in subject] or places[:1]
            size = min(len(subject), len(free))
            runs = [free[j : j + size] for j in range(len(free) - size + 1) if free[j + size - 1] - free[j] == size - 1]
            draw = random.Random(f"{seed} {prompt.prompt_id}")  # noqa: S311
            chosen[i, draw.choice(runs) if runs else draw.sample(free, size)] = True
        return chosen

    return span


def boost(alpha: float, span: Span | None = None, heads: Mapping[int, Sequence[int]] | None = None) -> Edit:
    """Add log(alpha) to the scores of a span's keys (default: the subject's) at the last query.

    `heads` names the heads of each layer number that are meant; by default all of them. alpha 1 changes nothing, to the
    last bit. Since softmax(z + log w) is row * w over its sum, the row alone is enough, and a head's attention sink
    keeps its part: row * w / (sum of row * w + 1 - sum of row). Differentiable. Raises `DataError` for an alpha that is
    not above 0, and for heads that a layer does not have.
    """
    if not 0 < alpha <= LARGEST:
        raise DataError(f"alpha multiplies attention, at most by {LARGEST:.0e}, and must be above 0, got {alpha}")
    where = span or tokens_of()

    def edit(batch: PromptBatch) -> RowEdit:
        inside = where(batch)

        def boosted(layer: int, row: Tensor) -> Tensor:
            if heads is not None and layer not in heads:
                return row
            meant = inside.to(row.device)[:, None, :].expand(row.shape)
            if heads is not None:
                if not set(heads[layer]) <= set(range(row.shape[1])):
                    raise DataError(f"layer {layer} has heads 0 to {row.shape[1] - 1}, got {list(heads[layer])}")
                named = torch.zeros(row.shape[1], dtype=torch.bool, device=row.device)
                named[list(heads[layer])] = True
                meant = meant & named[None, :, None]
            weighted = torch.where(meant, row * alpha, row)
            # never a difference of two numbers that are nearly the same, as 1 + (alpha - 1) would be
            return weighted / (weighted.sum(-1, keepdim=True) + (1 - row.sum(-1, keepdim=True)))

        return boosted

    return edit


def rows_of_model(source: HookedModel, heads: Mapping[int, Sequence[int] | None] | None = None) -> Edit:
    """Put in the rows that another model of the same shape gives for the same prompts.

    `heads` names the layer numbers that are meant and their heads (None: all of the layer's); by default all. A model's
    own rows change nothing, to the last bit. Raises `DataError` for a layer that the source lacks, `ModelError` for a
    source with other layers, heads or vocabulary.
    """
    unknown = sorted(set(heads or ()) - set(source.layers))
    if unknown:
        raise DataError(f"{source.name} has no attention layer {unknown[0]}")

    def edit(batch: PromptBatch) -> RowEdit:
        with torch.no_grad():
            rows = source.rows(batch)
        place = {layer: i for i, layer in enumerate(source.layers)}

        def transplanted(layer: int, row: Tensor) -> Tensor:
            if heads is not None and layer not in heads:
                return row
            if layer not in place or rows.shape[2] != row.shape[1]:
                raise ModelError(f"{source.name} has no layer {layer} of {row.shape[1]} heads to take rows from")
            other = rows[:, place[layer]].to(row.device, row.dtype)
            chosen = None if heads is None else heads[layer]
            if chosen is None:
                return other
            result = row.clone()
            result[:, list(chosen)] = other[:, list(chosen)]
            return result

        return transplanted

    return edit
