"""One forward pass that gives the attention rows, through our attention function or through eager attention."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from attnbalance.errors import ModelError
from attnbalance.models.rows import IMPLEMENTATION
from attnbalance.tokens import PromptBatch


def forward_rows(
    model: Module, batch: PromptBatch, kernel: str
) -> tuple[Float[Tensor, "prompt layer head position"], Float[Tensor, "prompt logit_position vocab"]]:
    """Rows [prompt, layer, head, position] and the logits [prompt, 1 or position, vocab] of one forward pass."""
    base = base_of(model)
    device = base.device
    mask = batch.attention_mask != 0
    inputs = {"input_ids": batch.input_ids.to(device), "attention_mask": mask.long().to(device)}
    extra = {"position_ids": batch.position_ids.to(device), "use_cache": False, "logits_to_keep": 1}
    named = inspect.signature(base.forward).parameters
    inputs |= {key: value for key, value in extra.items() if key in named}
    query_index = batch.query_index.to(device)
    if kernel == "eager":
        maps = _maps(model(**inputs, output_attentions=True))
        each = torch.arange(len(query_index), device=device)
        found = [one[each.to(one.device), :, query_index.to(one.device)].float() for one in maps[0]]
    else:
        maps = _maps(model(**inputs, query_index=query_index, output_attentions=True))
        found = list(maps[0])
    rows = torch.stack([row.to(device) for row in found], dim=1)
    return rows.masked_fill(~mask.to(device)[:, None, None, :], 0.0), maps[1]


def _maps(output: object) -> tuple[tuple[Tensor, ...], Tensor]:
    attentions = getattr(output, "attentions", None)
    if not attentions or any(one is None for one in attentions):
        raise NoRowsError("no attention came back from the model")
    return attentions, output.logits  # pyright: ignore[reportAttributeAccessIssue]


class NoRowsError(ModelError):
    """The attention function was not asked for the row, or its row did not come back."""


def base_of(model: Module) -> PreTrainedModel:
    """The transformers model inside a peft model; any other model as it is."""
    inner = getattr(model, "get_base_model", None)
    return inner() if callable(inner) else model  # pyright: ignore[reportReturnType]


def attention_layers(base: PreTrainedModel) -> tuple[int, ...]:
    """The numbers of the layers that give an attention row, in the order of the model's output."""
    numbers = sorted(
        {
            module.layer_idx
            for name, module in base.named_modules()
            if isinstance(getattr(module, "layer_idx", None), int) and "attention" in type(module).__name__.lower()
        }
    )
    return tuple(numbers) or tuple(range(base.config.get_text_config().num_hidden_layers))


@contextmanager
def evaluating(model: Module) -> Iterator[None]:
    """The model in evaluation mode (no dropout), and back in its own mode afterwards."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextmanager
def attention_set(base: PreTrainedModel, implementation: str) -> Iterator[None]:
    """The model with another attention implementation, and back at ours afterwards."""
    base.set_attn_implementation(implementation)
    try:
        yield
    finally:
        base.set_attn_implementation(IMPLEMENTATION)
