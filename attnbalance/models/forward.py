"""One forward pass that returns attention rows, through our attention function or through eager attention."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import Module, ModuleList
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from attnbalance.data.batches import PromptBatch
from attnbalance.errors import ModelError


def forward_rows(
    model: Module, batch: PromptBatch, kernel: str, cache: DynamicCache | None = None
) -> tuple[Float[Tensor, "prompt layer head position"], Float[Tensor, "prompt logit_position vocab"]]:
    """Rows [prompt, layer, head, position] and the logits [prompt, 1 or position, vocab] of one forward pass.

    With a `cache` (see `inputs_of`), rows are over all positions, and logits are of the tokens after it.
    """
    base = base_of(model)
    query_index, mask = _query_of(base, batch, cache)
    query = {} if kernel == "eager" else {"query_index": query_index}
    output = model(**inputs_of(base, batch, 1, cache), **query, output_attentions=True)
    return rows_of_output(output, kernel, query_index, mask), attention_maps(output)[1]


@torch.no_grad()
def rows_alone(
    model: Module, batch: PromptBatch, layers: Sequence[int], cache: DynamicCache | None = None
) -> Float[Tensor, "prompt layer head position"]:
    """The rows of `forward_rows` without the logits, from a pass that ends as soon as the last layer has its row.

    So that layer's output, its MLP and the unembedding are not computed. The model must run our attention function,
    and `layers` are the numbers of its attention modules in the order of their calls.
    """
    base, kept = base_of(model), dict[int, Tensor]()
    query_index, mask = _query_of(base, batch, cache)

    def keep(module: Module, row: Tensor) -> None:
        layer: int = module.layer_idx  # pyright: ignore[reportAssignmentType]
        kept[layer] = row
        if layer == layers[-1]:
            raise _LastRow

    with suppress(_LastRow):
        model(**inputs_of(base, batch, 1, cache), query_index=query_index, on_row=keep)
    if missing := [layer for layer in layers if layer not in kept]:
        raise ModelError(
            f"layer {missing[0]} of {type(base).__name__} gave no attention row: the model was changed after it was "
            "loaded; load it again"
        )
    return _stacked([kept[layer] for layer in layers], mask)


class _LastRow(Exception):  # noqa: N818
    """Ends a pass of which no more is needed."""


def _query_of(
    base: PreTrainedModel, batch: PromptBatch, cache: DynamicCache | None
) -> tuple[Int[Tensor, " prompt"], Bool[Tensor, "prompt position"]]:
    """Where each prompt's query is among the tokens that the pass reads, and which positions are no padding."""
    device = device_of(base)
    return batch.query_index.to(device) - _cached(cache), (batch.attention_mask != 0).to(device)


def _cached(cache: DynamicCache | None) -> int:
    return 0 if cache is None else cache.get_seq_length()


def inputs_of(
    base: PreTrainedModel, batch: PromptBatch, logits_to_keep: int, cache: DynamicCache | None = None
) -> dict[str, Any]:
    """The arguments of a forward pass over a batch, as far as the family takes them, on the model's device.

    logits_to_keep: the number of positions, counted from the end, whose logits are needed.
    cache: the keys and values of the batch's first columns, which the pass adds to.
    """
    device, read = device_of(base), _cached(cache)
    inputs = {
        "input_ids": batch.input_ids[:, read:].to(device),
        "attention_mask": (batch.attention_mask != 0).long().to(device),
    } | ({} if cache is None else {"past_key_values": cache})
    extra = {
        "position_ids": batch.position_ids[:, read:].to(device),
        "use_cache": cache is not None,
        "logits_to_keep": logits_to_keep,
        "output_router_logits": False,  # a loss of them would not fit a pass after a cache
    }
    return inputs | taken(base, extra)


def taken(base: PreTrainedModel, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of some arguments that the family's forward pass names."""
    named = inspect.signature(base.forward).parameters
    return {key: value for key, value in arguments.items() if key in named}


def forward_uncapped(
    model: Module, batch: PromptBatch, kernel: str
) -> tuple[Float[Tensor, "prompt layer head position"], Float[Tensor, "prompt vocab"]]:
    """The rows and the last position's logits of one forward pass, before any cap at the end, in float32."""
    base, before = base_of(model), list[Tensor]()
    unembedding: Module = base.get_output_embeddings()  # pyright: ignore[reportAssignmentType]
    handle = unembedding.register_forward_hook(lambda module, inputs, output: before.append(output[:, -1].float()))
    try:
        rows, logits = forward_rows(model, batch, kernel)
    finally:
        handle.remove()
    last = logits[:, -1].float()
    return rows, uncapped(base, last, before[-1].to(last.device) if before else last)


def uncapped(
    base: PreTrainedModel, logits: Float[Tensor, "prompt vocab"], before: Float[Tensor, "prompt vocab"]
) -> Float[Tensor, "prompt vocab"]:
    """The logits without the cap that some families put on them at the end (Gemma 2): what the unembedding gave."""
    cap = getattr(base.config.get_text_config(), "final_logit_softcapping", None)
    close = 1e-4 if base.dtype in (torch.float32, torch.float64) else 5e-2
    capped = bool(cap) and torch.allclose(logits, cap * torch.tanh(before / cap), atol=close, rtol=close)
    return before if capped else logits


def rows_of_output(
    output: object, kernel: str, query_index: Int[Tensor, " prompt"], mask: Bool[Tensor, "prompt position"]
) -> Float[Tensor, "prompt layer head position"]:
    """The rows in the output of a forward pass with `output_attentions`, 0 on padding; float32, with gradients."""
    layers: Sequence[Tensor] = attention_maps(output)[0]
    if kernel == "eager":
        prompts = torch.arange(len(query_index), device=mask.device)
        layers = [maps[prompts.to(maps.device), :, query_index.to(maps.device)].float() for maps in layers]
    return _stacked(layers, mask)


def _stacked(
    layers: Sequence[Float[Tensor, "prompt head position"]], mask: Bool[Tensor, "prompt position"]
) -> Float[Tensor, "prompt layer head position"]:
    rows = torch.stack([layer.to(mask.device) for layer in layers], dim=1)
    return rows.masked_fill(~mask[:, None, None, :], 0.0)


def states_of_output(output: object, query_index: Int[Tensor, " prompt"]) -> Float[Tensor, "prompt layer d_model"]:
    """The residual stream at each prompt's query after each layer, in an output with `output_hidden_states`."""
    layers: tuple[Tensor, ...] = output.hidden_states[1:]  # pyright: ignore[reportAttributeAccessIssue]
    prompts, device = torch.arange(len(query_index), device=query_index.device), query_index.device
    at_query = [states[prompts.to(states.device), query_index.to(states.device)].to(device) for states in layers]
    return torch.stack(at_query, dim=1)


def attention_maps(output: object) -> tuple[tuple[Tensor, ...], Tensor]:
    """The attention that a model returned by layer (whole maps or rows), and its logits; raises `NoRowsError`."""
    attentions = getattr(output, "attentions", None) or ()
    missing = [layer is None for layer in attentions]
    if all(missing):
        raise NoRowsError("returns no attention, so there is nothing to read (a state-space model?)")
    if any(missing):
        raise NoRowsError("returns no attention in some of its layers, and so cannot be read")
    return tuple(attentions), output.logits  # pyright: ignore[reportAttributeAccessIssue]


class NoRowsError(ModelError):
    """The model did not return attention, or not in all layers; the message continues the model's name."""


def base_of(model: Module) -> PreTrainedModel:
    """The transformers model inside a peft model, or the model itself; raises `ModelError` for any other kind."""
    inner = getattr(model, "get_base_model", None)
    base: object = inner() if callable(inner) else model
    if not isinstance(base, PreTrainedModel):
        raise ModelError(
            f"expected a transformers model (load one with AutoModelForCausalLM), got {type(base).__name__}"
        )
    return base


def device_of(base: PreTrainedModel) -> torch.device:
    """Where a model's inputs go; of a model that accelerate offloads, where it runs: its weights are elsewhere."""
    embedding = base.get_input_embeddings()
    device = getattr(getattr(embedding, "_hf_hook", None), "execution_device", None)
    return base.device if device is None else torch.device(device)


def vocabulary_size(model: Module) -> int:
    """The number of token ids that the model has an embedding for."""
    return len(base_of(model).get_input_embeddings().weight)  # pyright: ignore[reportArgumentType]


LIMITS = ("max_position_embeddings", "max_seq_len", "max_target_positions")
"""Names of the setting that says how many positions there are: most families', MPT's and Whisper's."""


CHUNKS = ("local_attn_chunk_length", "lsh_attn_chunk_length")
"""Settings of Reformer: it gives the attention of longer inputs in chunks, which no row can be taken from."""


def position_limit(config: PreTrainedConfig) -> int | None:
    """The longest input in tokens that a configuration allows, None for no limit.

    Raises `ModelError` for a number below 1 in the configuration's file. One that is not in the file is the family's
    own word for no limit (XLNet's -1).
    """
    text = config.get_text_config()
    name = next((name for name in LIMITS if hasattr(text, name)), LIMITS[0])
    limit, in_file = getattr(text, name, None), text.attribute_map.get(name, name)
    if not isinstance(limit, int) or (limit < 1 and in_file not in text.to_dict()):
        return None
    if limit < 1:
        who = config.name_or_path or type(config).__name__
        raise ModelError(f"{in_file} of {who} must be at least 1, got {limit}; put the real number into config.json")
    return min([limit, *(getattr(text, chunk) for chunk in CHUNKS if hasattr(text, chunk))])


def check_vocabulary(model: Module, input_ids: Tensor, name: str) -> None:
    """Raise `ModelError` for a token id that the model has no embedding for."""
    largest, size = int(input_ids.max()), vocabulary_size(model)
    if largest >= size:
        raise ModelError(
            f"token id {largest} is outside the {size} tokens of {name}: the tokenizer is another model's; "
            "save this model's own in its folder, or pass it as `tokenizer`"
        )


def depth_of(base: PreTrainedModel) -> int:
    """The number of layers, with and without attention."""
    return base.config.get_text_config().num_hidden_layers


def attention_layers(base: PreTrainedModel, count: int) -> tuple[int, ...]:
    """The numbers of the `count` layers that give an attention row, in the order of the model's output.

    Raises `ModelError` for a model with several kinds of layers whose attention layers do not say their numbers.
    """
    every = depth_of(base)
    if count == every:
        return tuple(range(every))
    attention = [module for module in base.modules() if _is_attention(module)]
    numbers = {number for module in attention if isinstance(number := getattr(module, "layer_idx", None), int)}
    if len(numbers) != count or min(numbers) < 0:  # layers that share one attention module: those that hold it
        numbers = {i for i, layer in enumerate(layer_list(base)) if any(map(_is_attention, layer.modules()))}
    if len(numbers) != count:
        raise ModelError(
            f"{type(base).__name__} gives {count} attention rows for {every} layers and does not say which layers they "
            "belong to; this family cannot be read"
        )
    return tuple(sorted(numbers))


def _is_attention(module: Module) -> bool:
    return "attention" in type(module).__name__.lower()


def layer_list(base: PreTrainedModel) -> Iterable[Module]:
    """The model's layers if they are in one list; else none."""
    count = depth_of(base)
    return next((part for part in base.modules() if isinstance(part, ModuleList) and len(part) == count), ())


@contextmanager
def editing(base: PreTrainedModel, row_edit: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
    """The model with the last query's rows replaced by `row_edit`(layer, row); it must run our attention function.

    Inside another such context, the edit gets the rows that the outer one has edited.
    """
    context = object()

    def add(_: Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        outer = kwargs.get("row_edit")
        contexts = getattr(outer, "contexts", ())

        def both(layer: int, row: Tensor) -> Tensor:
            return row_edit(layer, row if outer is None else outer(layer, row))

        both.contexts = (*contexts, context)  # pyright: ignore[reportFunctionMemberAccess]
        return args, kwargs if context in contexts else kwargs | {"row_edit": both}  # not twice

    with (  # AdaLoRA calls the model's `forward` past its hooks, OPT that of the module within its base model
        base.register_forward_pre_hook(add, with_kwargs=True),
        base.base_model.register_forward_pre_hook(add, with_kwargs=True),
    ):
        yield
