"""HookedModel: a causal language model that gives the attention row of each prompt's last token."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from weakref import WeakSet

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn import Module
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from attnbalance.data.batches import PromptBatch, batches, check_lengths, pad
from attnbalance.data.prompts import Prompt
from attnbalance.data.tokens import Encoding
from attnbalance.errors import DataError, ModelError
from attnbalance.models.adapter_kinds import unreadable
from attnbalance.models.evaluating import evaluating
from attnbalance.models.forward import (
    base_of,
    check_vocabulary,
    device_of,
    forward_rows,
    position_limit,
    rows_alone,
    vocabulary_size,
)
from attnbalance.models.prefix_cache import same_after_prefix, same_with_cache
from attnbalance.models.rows import IMPLEMENTATION, register
from attnbalance.models.self_check import self_check
from attnbalance.progress import progress_bar


@dataclass(frozen=True)
class HookedModel:
    """A causal language model with its tokenizer, ready to have its attention rows read."""

    model: Module
    """The transformers or peft model, with its attention implementation set to ours."""
    tokenizer: PreTrainedTokenizerBase
    """The tokenizer of its prompts."""
    name: str
    """What messages and reports call it."""
    kernel: str
    """"sdpa" if the row is computed in addition to the model's usual attention; "eager" if the family is outside
    transformers' attention interface, so that whole attention maps are made, layer by layer, to take the row from."""
    layers: tuple[int, ...]
    """The numbers of the layers that have attention."""
    max_positions: int | None
    """The longest input in tokens; None for no limit."""
    alike_from: int | None = None
    """Prompts of at least this many tokens share a batch only with prompts of their own length, because padding changes
    the family's rows there or the self-check did not reach that length. None: no such limit."""
    editable: bool = True
    """Whether rows can be edited as well as read: not with the kernel "eager", nor if several rows have one layer
    number."""
    bare: bool = False
    """Whether it was loaded without adapters. If it has some now, even switched off, it is refused."""

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        return device_of(base_of(self.model))

    @property
    def dtype(self) -> str:
        """The name of its weights' dtype, such as "bfloat16"."""
        return str(base_of(self.model).dtype).removeprefix("torch.")

    @property
    def pad_id(self) -> int:
        """The id of padding tokens; any will do, since padding is masked."""
        known = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        return next((i for i in known if isinstance(i, int) and i < vocabulary_size(self.model)), 0)

    @property
    def read_only(self) -> str | None:
        """Why its rows can be read but not edited, as a predicate; None if they can be edited."""
        if self.kernel != "sdpa":
            return "is outside transformers' attention interface"
        return None if self.editable else "runs several attentions under one layer number"

    @cached_property
    def line_breaks(self) -> frozenset[int]:
        """The ids of tokens that hold a line break."""
        tokens = self.tokenizer.batch_decode([[i] for i in range(len(self.tokenizer))])
        return frozenset(i for i, token in enumerate(tokens) if "\n" in token)

    @cached_property
    def shares_prefixes(self) -> bool:
        """Whether prompts of fewer than `alike_from` tokens can be read after the cache of their prefix.

        Proven at first use (see `same_after_prefix`).
        """
        return same_after_prefix(self.model, self.kernel)

    @cached_property
    def answers_from_cache(self) -> bool:
        """Whether answers may be generated with the model's cache.

        Proven at first use (see `same_with_cache`).
        """
        return same_with_cache(self.model)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The model as it is read (see `models.evaluating`).

        Raises `ModelError` for a model that was loaded without adapters and has some now.
        """
        if self.bare and getattr(base_of(self.model), "peft_config", None):
            raise ModelError(
                f"adapters were put into {self.name} after it was loaded, so it reads the adapted model now; load the "
                "adapted model, and load the base again from its path"
            )
        with evaluating(self.model):
            yield

    def check_implementation(self) -> None:
        """Raise `ModelError` where another attention implementation was set since the model was hooked."""
        implementation = base_of(self.model).config._attn_implementation
        wanted = IMPLEMENTATION if self.kernel == "sdpa" else "eager"
        if implementation != wanted:
            raise ModelError(
                f"{self.name} runs attention implementation {implementation!r}, set after it was loaded: its rows can "
                f"be neither read nor edited; call set_attn_implementation({wanted!r}), or load it again"
            )

    def with_limits_of(self, other: HookedModel) -> HookedModel:
        """This model with the stricter of both models' limits on batches, so that both can read them."""
        alike_from, max_positions = (
            min((limit for limit in limits if limit is not None), default=None)
            for limits in ((self.alike_from, other.alike_from), (self.max_positions, other.max_positions))
        )
        return replace(self, alike_from=alike_from, max_positions=max_positions)

    def batches(
        self,
        encodings: Sequence[Encoding],
        batch_size: int,
        *,
        budgets: Sequence[int] = (),
        alike: bool = False,
        bar: str | None = None,
        padding_side: str = "left",
        most_padding: int | None = None,
    ) -> Iterator[tuple[list[int], PromptBatch]]:
        """The prompts in padded batches that the model can read, each with its prompts' indices, longest first.

        A prompt's length includes the tokens that will be generated after it, but not for `MOST_TOKENS`. Raises
        `DataError` for no prompts and for a batch size below 1, `BadRowsError` for prompts longer than the model's
        positions.

        encodings: the prompts' tokens under the model's own tokenizer.
        batch_size: the largest number of prompts in a batch; of long prompts it holds fewer (`MOST_TOKENS`).
        budgets: the number of tokens that will be generated after each prompt; by default none.
        alike: only prompts of one length share a batch, so that none is padded.
        bar: the title of a progress bar; None: no bar.
        padding_side: "left" or "right".
        most_padding: the largest number of padding tokens in a batch; None: no limit.
        """
        if not encodings:
            raise DataError("expected at least one prompt, got none")
        check_lengths(encodings, self.max_positions, extra=budgets)
        alike_from = 1 if alike else self.alike_from and max(1, self.alike_from - max(budgets, default=0))
        with progress_bar(bar or "", total=len(encodings), unit="prompt", shown=bar is not None) as progress:
            for group in batches([len(encoding.ids) for encoding in encodings], batch_size, alike_from, most_padding):
                for indices in self._fitting(group, encodings, budgets):
                    yield indices, pad([encodings[i] for i in indices], self.pad_id, padding_side)
                    progress.update(len(indices))

    def _fitting(self, group: list[int], encodings: Sequence[Encoding], budgets: Sequence[int]) -> list[list[int]]:
        """The group, or its prompts one by one if the longest prompt with the longest answer has too many positions."""
        longest = max(len(encodings[i].ids) for i in group) + max((budgets[i] for i in group if budgets), default=0)
        return [group] if longest <= (self.max_positions or longest) else [[i] for i in group]

    def chosen_layers(self, layers: Sequence[int] | None) -> tuple[int, ...]:
        """Those of the attention layers that are chosen, in the model's order; None: all.

        Raises `DataError` for none, for what are no integers, and for a layer that the model does not have.
        """
        if layers is None:
            return self.layers
        if not isinstance(layers, Sequence) or not all(isinstance(i, int) and not isinstance(i, bool) for i in layers):
            raise DataError(f"layers must be a sequence of Python integers, such as [0, 1], got {layers!r}")
        if not layers:
            raise DataError("expected at least one layer, got none")
        if unknown := sorted(set(layers) - set(self.layers)):
            raise DataError(
                f"{self.name} has no attention layer {unknown[0]}; it has {', '.join(map(str, self.layers))}"
            )
        return tuple(layer for layer in self.layers if layer in layers)

    def rows(
        self, batch: PromptBatch, cache: DynamicCache | None = None, layers: Sequence[int] | None = None
    ) -> Float[Tensor, "prompt layer head position"]:
        """The attention row of each prompt's query in every head, in float32, on the batch's positions.

        `layers` are those to read, by default all (see `chosen_layers`).

        Padding has probability 0. Differentiable outside `torch.no_grad`. Within it, models whose rows can be edited
        skip what no row depends on: the output and MLP of the last layer that is read, all that comes after it, and the
        logits. A `cache` holds the keys and values of the batch's first columns; then only the other columns are read,
        and theirs are added to it. It may be empty. The cache of a prefix that all prompts share needs a batch padded
        on the right.

        Raises `ModelError` for NaN or infinity in a row, or in logits if they are computed (naming the first prompt);
        for a token that the model does not know; for a padded batch of `alike_from` tokens or more; and if another
        attention implementation was set.
        """
        self.check_implementation()
        wanted = self.chosen_layers(layers)
        check_vocabulary(self.model, batch.input_ids, self.name)
        width = batch.input_ids.shape[1]
        if self.alike_from is not None and width >= self.alike_from and not bool((batch.attention_mask != 0).all()):
            raise ModelError(
                f"{self.name} can be read from {self.alike_from} tokens on only in batches of prompts of one length, "
                f"got a padded batch of {width} tokens (`HookedModel.batches` makes them)"
            )
        with self.evaluating():
            if self.read_only is None and not torch.is_grad_enabled():
                values = (rows := rows_alone(self.model, batch, wanted, cache),)
            else:
                values = (rows, _) = forward_rows(self.model, batch, self.kernel, cache)
                rows = rows[:, [self.layers.index(layer) for layer in wanted]]
        self.check_finite(batch.prompts, *values)
        return rows

    def check_finite(self, prompts: Sequence[Prompt], *values: Shaped[Tensor, "prompt ..."]) -> None:
        """Raise `ModelError`, naming the first prompt, for values (rows, logits) that are NaN or infinite."""
        finite = torch.stack([each.isfinite().flatten(1).all(1).cpu() for each in values]).all(0)
        if not bool(finite.all()):
            first = prompts[int((~finite).nonzero()[0])].text
            raise ModelError(
                f'{self.name} gives NaN or infinite numbers (first at prompt {first[:80]!r}); try `dtype="float32"`'
            )


def check_apart(a: HookedModel, b: HookedModel) -> None:
    """Raise `ModelError` for two handles on one model object: both would read its current weights."""
    if a is not b and base_of(a.model) is base_of(b.model):
        raise ModelError(
            f"{a.name} and {b.name} are one model object in memory, so there is nothing to compare: training and "
            "get_peft_model change it in place; load the first one again, from its path"
        )


READ: WeakSet[PreTrainedModel] = WeakSet()
"""The transformers models that are read: an adapter put into one would change what is read."""


def check_adapters(model: object, name: str) -> None:
    """Raise `ModelError` for an adapter that is more than a change of weights (see `unreadable`)."""
    for config in getattr(model, "peft_config", {}).values():
        if reason := unreadable(config):
            raise ModelError(f"an adapter of {name} {reason}")


def hook(model: Module, tokenizer: PreTrainedTokenizerBase, name: str) -> HookedModel:
    """Put our attention function into a model and check it; falls back to eager attention, with a warning.

    Raises `ModelError` for a model that is not a causal language model, for an adapter that is more than a change of
    weights, and for rows that differ from eager attention.
    """
    check_adapters(model, name)
    base = base_of(model)
    if base.config.is_encoder_decoder:
        raise ModelError(f"{name} is a {type(base).__name__}; only decoder-only causal language models can be read")
    if base.get_output_embeddings() is None:
        raise ModelError(
            f"{name} is a {type(base).__name__} without a language-model head; load its ...ForCausalLM class"
        )
    register()
    learned = self_check(model, name)
    READ.add(base)
    if learned.kernel == "eager":
        warnings.warn(
            f"{type(base).__name__} is outside transformers' attention interface: reading it through eager attention, "
            "which is slower and holds whole attention maps",
            stacklevel=3,
        )
    limit, bare = position_limit(base.config), not getattr(base, "peft_config", None)
    return HookedModel(model, tokenizer, name, max_positions=limit, bare=bare, **learned._asdict())
