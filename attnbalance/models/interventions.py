"""Edits of the last query's attention row while a model runs: a span's keys boosted, rows taken from another model."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral, Real
from types import NoneType

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnbalance.arguments import Kind, expects
from attnbalance.data.batches import PromptBatch
from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.prompts import Prompt
from attnbalance.errors import DataError, ModelError
from attnbalance.models.forward import base_of, editing
from attnbalance.models.hooked import HookedModel
from attnbalance.seeds import check_seed

RowEdit = Callable[[int, Tensor], Tensor]
"""Layer number and the model's own row [prompt, head, position] (float32) -> the row to use instead."""

Edit = Callable[[PromptBatch], RowEdit]
"""A batch of prompts -> what to do with its rows."""

Heads = Mapping[int, Sequence[int] | None]
"""Heads by layer number; None: all of the layer's."""
HEADS: Kind = ({Integral: ([Integral], NoneType)}, NoneType)
"""The kind of argument that `Heads` or None is (see `expects`)."""

Span = Callable[[PromptBatch], Bool[Tensor, "prompt position"]]
"""A batch of prompts -> the tokens that an edit is about."""

LARGEST = 1e30
"""The largest factor on attention: above this, float32 overflows."""


@dataclass(frozen=True)
class HeadEdit:
    """An edit of named heads, which `generate` and `recall` check against the model.

    Attributes:
        make: The edit.
        heads: The heads that it edits; None: all of all layers.
        source: The model that rows come from; None: they come from no other model.
    """

    make: Edit
    heads: Heads | None
    source: HookedModel | None = None

    def __call__(self, batch: PromptBatch) -> RowEdit:
        """What to do with the rows of a batch."""
        return self.make(batch)

    def check(self, model: HookedModel, prompts: Sequence[Prompt]) -> None:
        """Raise an error for a model, or prompts of it, that cannot be edited so.

        `DataError` for a layer that the model does not have, and for prompts that the source tokenizes otherwise;
        `ModelError` for a model of other layers than the source, if rows of all layers are taken.
        """
        self.check_heads(model)
        if self.source is None:
            return
        if self.heads is None and model.layers != self.source.layers:
            raise ModelError(
                f"expected a model of {len(self.source.layers)} attention layers, as the rows' source has, got "
                f"{model.name} of {len(model.layers)}; name the layers to edit"
            )
        own = PromptSet.of(prompts, model.tokenizer)
        for ours, theirs in zip(own.encodings, PromptSet.of(own, self.source.tokenizer).encodings, strict=True):
            if ours.ids != theirs.ids:
                raise DataError(
                    f"{model.name} and {self.source.name} must have one tokenizer to exchange rows, got other ids for "
                    f"{ours.prompt.text[:80]!r}"
                )

    def check_heads(self, model: HookedModel) -> None:
        """Raise `DataError` for a layer that the model does not have."""
        if self.heads:
            model.chosen_layers(tuple(self.heads))


@contextmanager
def edited(model: HookedModel, row_edit: RowEdit) -> Iterator[None]:
    """The model with the row of the last query of each whole prompt put through `row_edit`, in every layer.

    Prompts must be padded on the left, so that their last token is the last position. In generation only the prompt's
    last token is edited; its cached keys and values keep the effect, and generated tokens attend normally. Everything
    else runs on the model's usual attention. If a layer calls its attention twice with one row (DiffLlama), both calls
    are edited. Raises `ModelError` for a model read through eager attention, and for one whose layers cannot be told
    apart by their numbers.
    """
    if model.read_only:
        raise ModelError(f"{model.name} {model.read_only}: its rows can be read, not edited")
    model.check_implementation()
    with editing(base_of(model.model), row_edit):
        yield


def tokens_of(role: str = "subject") -> Span:
    """The tokens of one role, as the prompts mark them."""

    def span(batch: PromptBatch) -> Bool[Tensor, "prompt position"]:
        if role not in batch.spans or not bool(batch.spans[role].any(dim=1).all()):
            raise DataError(f"not every prompt has a span {role!r}; there are {', '.join(batch.spans)}")
        return batch.spans[role]

    return span


def random_tokens(seed: int = 0) -> Span:
    """A control: a random run of adjacent tokens outside the subject, as many as the subject has.

    If no gap is long enough, the tokens are not adjacent; if too few are left, all of them are taken. The first token
    (which many heads attend to by default) and the last (the query) are taken only if there are no others. The choice
    depends on the seed and the prompt alone.
    """
    check_seed(seed)

    def span(batch: PromptBatch) -> Bool[Tensor, "prompt position"]:
        chosen = torch.zeros_like(batch.spans["subject"])
        for i, prompt in enumerate(batch.prompts):
            positions = (batch.attention_mask[i] != 0).nonzero().flatten().tolist()
            subject = set(batch.spans["subject"][i].nonzero().flatten().tolist())
            inner = [position for position in positions[1:-1] if position not in subject]
            free = inner or [position for position in positions if position not in subject] or positions[:1]
            size = min(len(subject), len(free))
            runs = [free[j : j + size] for j in range(len(free) - size + 1) if free[j + size - 1] - free[j] == size - 1]
            draw = random.Random(f"{seed} {prompt.prompt_id}")  # noqa: S311
            chosen[i, draw.choice(runs) if runs else draw.sample(free, size)] = True
        return chosen

    return span


@expects(alpha=Real, heads=HEADS)
def boost_attention(alpha: float, span: Span | None = None, heads: Heads | None = None) -> HeadEdit:
    """Add log(alpha) to the scores of a span's keys (default: the subject's) at the last query.

    `heads` names the heads to edit by layer number (None: all of the layer's); by default all of all layers. With alpha
    1, a forward pass is the same to the last bit. Answers of 16-bit models may still differ, since only unedited models
    read a shared prefix once for all prompts. The row alone is enough, since softmax(z + log w) is row * w over its
    sum. A head's attention sink keeps its part: row * w / (sum of row * w + 1 - sum of row). Differentiable. Raises
    `DataError` for an alpha out of bounds, and for heads that a layer does not have.
    """
    if not 0 < alpha <= LARGEST:
        raise DataError(f"alpha must be > 0 and at most {LARGEST:.0e}, got {alpha}")
    tokens = span or tokens_of()

    def edit(batch: PromptBatch) -> RowEdit:
        inside = tokens(batch)

        def boosted(layer: int, row: Tensor) -> Tensor:
            if heads is not None and layer not in heads:
                return row
            edited_keys = inside.to(row.device)[:, None, :].expand(row.shape)
            if heads is not None:
                edited_keys = edited_keys & _named(heads[layer], layer, row)[None, :, None]
            weighted = torch.where(edited_keys, row * alpha, row)
            # no difference of two nearly equal numbers, as 1 + (alpha - 1) would be
            return weighted / (weighted.sum(-1, keepdim=True) + (1 - row.sum(-1, keepdim=True)))

        return boosted

    return HeadEdit(edit, heads)


def _named(
    heads: Sequence[int] | None, layer: int, row: Float[Tensor, "prompt head position"]
) -> Bool[Tensor, " head"]:
    """Which heads of a layer are named; raises `DataError` for heads that it does not have."""
    count = row.shape[1]
    named = torch.full((count,), heads is None, dtype=torch.bool, device=row.device)
    for head in heads or ():
        if head not in range(count):
            raise DataError(f"layer {layer} has heads 0 to {count - 1}, got {head!r}")
        named[head] = True
    return named


@expects(source=HookedModel, heads=HEADS)
def patch_rows(source: HookedModel, heads: Heads | None = None) -> HeadEdit:
    """Use the rows that another model of the same shape gives for the same prompts (attention patching).

    `heads` names the layer numbers to edit and their heads (None: all of the layer's); by default all of all layers. A
    model's own rows change nothing, to the last bit. Raises `DataError` for a layer or head that the source lacks, and
    `ModelError` for a source with other layers or heads, or without some of the tokens. `recall` raises `DataError` for
    prompts that the source tokenizes differently. `edited` does not check this: the source then reads the model's ids.
    """

    def edit(batch: PromptBatch) -> RowEdit:
        with torch.no_grad():
            return rows_of(source, source.rows(batch), heads)

    result = HeadEdit(edit, heads, source)
    result.check_heads(source)
    return result


def rows_of(
    source: HookedModel,
    rows: Float[Tensor, "prompt layer head position"],
    heads: Heads | None = None,
) -> RowEdit:
    """`patch_rows` for one batch whose rows the source has already given."""
    index = {layer: i for i, layer in enumerate(source.layers)}

    def transplanted(layer: int, row: Tensor) -> Tensor:
        if heads is not None and layer not in heads:
            return row
        if layer not in index or rows.shape[2] != row.shape[1]:
            raise ModelError(f"{source.name} has no layer {layer} of {row.shape[1]} heads to take rows from")
        other = rows[:, index[layer]].to(row.device, row.dtype)
        return other if heads is None else torch.where(_named(heads[layer], layer, row)[None, :, None], other, row)

    return transplanted
