"""One forward pass that gives the attention rows, through our attention function or through eager attention."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedConfig, PreTrainedModel

from attnbalance.errors import ModelError
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
    asked = {} if kernel == "eager" else {"query_index": query_index}
    output = model(**inputs, **asked, output_attentions=True)
    return rows_of_output(output, kernel, query_index, mask.to(device)), attention_maps(output)[1]


def rows_of_output(
    output: object, kernel: str, query_index: Int[Tensor, " prompt"], mask: Bool[Tensor, "prompt position"]
) -> Float[Tensor, "prompt layer head position"]:
    """The rows in the output of a forward pass that was asked for them, 0 on padding; float32, with gradients."""
    found, device = attention_maps(output)[0], mask.device
    if kernel == "eager":
        each = torch.arange(len(query_index), device=device)
        found = [one[each.to(one.device), :, query_index.to(one.device)].float() for one in found]
    rows = torch.stack([row.to(device) for row in found], dim=1)
    return rows.masked_fill(~mask[:, None, None, :], 0.0)


def states_of_output(output: object, query_index: Int[Tensor, " prompt"]) -> Float[Tensor, "prompt layer d_model"]:
    """The residual stream at each prompt's query after each layer, in an output that was asked for hidden states."""
    states: tuple[Tensor, ...] = output.hidden_states[1:]  # pyright: ignore[reportAttributeAccessIssue]
    each, home = torch.arange(len(query_index), device=query_index.device), query_index.device
    return torch.stack([one[each.to(one.device), query_index.to(one.device)].to(home) for one in states], dim=1)


def attention_maps(output: object) -> tuple[tuple[Tensor, ...], Tensor]:
    """What a model gave as attention, layer by layer (whole maps or rows), and its logits; raises `NoRowsError`."""
    attentions = getattr(output, "attentions", None)
    if not attentions or any(one is None for one in attentions):
        raise NoRowsError("no attention came back from the model")
    return attentions, output.logits  # pyright: ignore[reportAttributeAccessIssue]


class NoRowsError(ModelError):
    """The attention function was not asked for the row, or its row did not come back."""


def base_of(model: Module) -> PreTrainedModel:
    """The transformers model inside a peft model, or the model itself; raises `ModelError` for any other kind."""
    inner = getattr(model, "get_base_model", None)
    base: object = inner() if callable(inner) else model
    if not isinstance(base, PreTrainedModel):
        raise ModelError(f"a {type(base).__name__} is no transformers model; load one with AutoModelForCausalLM")
    return base


def vocabulary_size(model: Module) -> int:
    """The number of token ids that the model has an embedding for."""
    return len(base_of(model).get_input_embeddings().weight)  # pyright: ignore[reportArgumentType]


def position_limit(config: PreTrainedConfig) -> int | None:
    """The longest input in tokens that a configuration allows, None for no limit."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def check_vocabulary(model: Module, input_ids: Tensor, name: str) -> None:
    """Raise `ModelError` for a token id that the model has no embedding for."""
    largest, size = int(input_ids.max()), vocabulary_size(model)
    if largest >= size:
        raise ModelError(
            f"token id {largest} lies outside the {size} tokens of {name}: the tokenizer is another model's; "
            "name this model's own with --tokenizer"
        )


def attention_layers(base: PreTrainedModel, count: int) -> tuple[int, ...]:
    """The numbers of the `count` layers that give an attention row, in the order of the model's output.

    Raises `ModelError` for a model of several kinds of layer whose attention layers do not say their numbers.
    """
    every = base.config.get_text_config().num_hidden_layers
    if count == every:
        return tuple(range(every))
    attention = [module for module in base.modules() if "attention" in type(module).__name__.lower()]
    numbers = {number for module in attention if isinstance(number := getattr(module, "layer_idx", None), int)}
    if len(numbers) != count or min(numbers) < 0:
        raise ModelError(
            f"{type(base).__name__} gives {count} attention rows for {every} layers, and it cannot be told which "
            "layers they belong to; this family cannot be read"
        )
    return tuple(sorted(numbers))


@contextmanager
def evaluating(model: Module) -> Iterator[None]:
    """The model in evaluation mode (no dropout), and back in its own mode afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:  # one by one: parts that were frozen in evaluation mode stay in it
            module.training = True
