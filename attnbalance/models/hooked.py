"""HookedModel: a causal language model that gives the attention row of each prompt's last token."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedTokenizerBase

from attnbalance.errors import ModelError
from attnbalance.models.forward import (
    attention_layers,
    base_of,
    check_vocabulary,
    evaluating,
    forward_rows,
    position_limit,
    vocabulary_size,
)
from attnbalance.models.proof import prove
from attnbalance.models.rows import register
from attnbalance.tokens import PromptBatch


@dataclass(frozen=True)
class HookedModel:
    """A causal language model with its tokenizer, ready to have its attention rows read.

    `kernel` is "sdpa" where the row is computed beside the model's own kernel, "eager" where the family stands outside
    transformers' attention interface and whole attention maps are made, layer by layer, to take the row from.
    `layers` are the numbers of the layers that have attention. `max_positions` is the longest input, None for no limit.
    """

    model: Module
    tokenizer: PreTrainedTokenizerBase
    name: str
    kernel: str
    layers: tuple[int, ...]
    max_positions: int | None

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        return base_of(self.model).device

    @property
    def pad_id(self) -> int:
        """The id put on padding; any does, since padding is masked."""
        known = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        return next((i for i in known if isinstance(i, int) and i < vocabulary_size(self.model)), 0)

    def rows(self, batch: PromptBatch) -> Float[Tensor, "prompt layer head position"]:
        """The attention row of each prompt's query in every layer and head, in float32, on the batch's positions.

        Padding has probability 0. Differentiable outside `torch.no_grad`. Raises `ModelError`, naming the first prompt,
        where a row or the logits hold NaN or infinity, and for a token that the model does not know.
        """
        check_vocabulary(self.model, batch.input_ids, self.name)
        with evaluating(self.model):
            rows, logits = forward_rows(self.model, batch, self.kernel)
        sound = rows.isfinite().flatten(1).all(1) & logits.isfinite().flatten(1).all(1).to(rows.device)
        if not bool(sound.all()):
            first = batch.prompts[int((~sound).nonzero()[0])].text
            raise ModelError(
                f"{self.name} gives NaN or infinite numbers (first at prompt {first[:80]!r}); try --dtype float32"
            )
        return rows


def hook(model: Module, tokenizer: PreTrainedTokenizerBase, name: str) -> HookedModel:
    """Put our attention function into a model and prove it; falls back to eager attention, with a warning.

    Raises `ModelError` for a model that is not a causal language model, for an adapter that lengthens the input, and
    for rows that differ from eager attention.
    """
    for config in getattr(model, "peft_config", {}).values():
        if config.is_prompt_learning:
            raise ModelError(
                f"{name} has an adapter of type {config.peft_type.value}, which puts tokens of its own before the "
                "prompt; only adapters that change weights (LoRA and its like) can be read"
            )
    base = base_of(model)
    if base.config.is_encoder_decoder:
        raise ModelError(f"{name} is a {type(base).__name__}; only decoder-only causal language models can be read")
    if base.get_output_embeddings() is None:
        raise ModelError(
            f"{name} is a {type(base).__name__} without a language-model head; load its ...ForCausalLM class"
        )
    register()
    kernel, count = prove(model, name)
    if kernel == "eager":
        warnings.warn(
            f"{type(base).__name__} stands outside transformers' attention interface: reading it through eager "
            "attention, which is slower and holds whole attention maps",
            stacklevel=3,
        )
    return HookedModel(model, tokenizer, name, kernel, attention_layers(base, count), position_limit(base.config))
