"""Logits of labelled tokens alone: what a model predicts of an answer, without the unembedding of its prompt."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from attnbalance.data.batches import batches
from attnbalance.errors import BadRowsError, ModelError
from attnbalance.finetuning.examples import IGNORED, INPUTS, Example, collate
from attnbalance.models.forward import base_of, check_vocabulary
from attnbalance.models.hooked import HookedModel
from attnbalance.models.prefix_cache import copies
from attnbalance.models.shared_prefixes import with_prefixes


def only_labelled(base: PreTrainedModel, labels: Int[Tensor, "example position"]) -> dict[str, Int[Tensor, " kept"]]:
    """The argument of a forward pass over examples that leaves out logits which predict no label of any of them.

    Empty for a family whose pass does not take positions, and for a model that is spread over devices: positions would
    lie on its first one, and be used on its last one.
    """
    parameter = inspect.signature(base.forward).parameters.get("logits_to_keep")
    takes_positions = parameter is not None and "Tensor" in str(parameter.annotation)
    spread = len({str(device) for device in (getattr(base, "hf_device_map", None) or {}).values()}) > 1
    return {"logits_to_keep": _predicting(labels)} if takes_positions and not spread else {}


def labelled_logits(
    logits: Float[Tensor, "example kept vocab"], labels: Int[Tensor, "example position"]
) -> tuple[Float[Tensor, "token vocab"], Int[Tensor, " token"], Int[Tensor, " token"]]:
    """The logits that predict each labelled token, the labels, and the index of each one's example.

    `logits` are those of all positions, or of a pass with `only_labelled`. Raises `ModelError` for any other number of
    positions.
    """
    example, position = (labels[:, 1:] != IGNORED).nonzero().unbind(-1)
    kept, length = _predicting(labels), labels.shape[1]
    if logits.shape[1] not in (len(kept), length):
        raise ModelError(
            f"expected logits at all {length} positions, or at the {len(kept)} that predict labels, got "
            f"{logits.shape[1]}"
        )
    column = position if logits.shape[1] == length else torch.searchsorted(kept, position)
    return logits[example.to(logits.device), column.to(logits.device)], labels[example, position + 1], example


def _predicting(labels: Int[Tensor, "example position"]) -> Int[Tensor, " kept"]:
    """The positions whose logits predict a label of some example, in order; never the last one."""
    return (labels[:, 1:] != IGNORED).any(0).nonzero()[:, 0]


def answer_logits(
    model: HookedModel, examples: Sequence[Example], batch_size: int
) -> Iterator[list[tuple[int, Float[Tensor, "token vocab"]]]]:
    """The model's predictions of the labelled tokens of each example, with its index, a batch of examples at a time.

    Batches are those of `batches.batches`, in another order than the examples. A prefix that prompts share is read
    once, where the model's cache allows it. The model is in evaluation mode. Raises `BadRowsError` for examples longer
    than the model's positions, `ModelError` for NaN logits, and `DataError` for a batch size below 1.
    """
    limit = model.max_positions or math.inf
    long = [(i, f"{len(example.ids)} tokens") for i, example in enumerate(examples) if len(example.ids) > limit]
    if long:
        raise BadRowsError(
            f"examples are longer than the model's {model.max_positions} positions", long, len(examples), "shorten them"
        )
    with model.evaluating():
        longest = max((len(example.ids) for example in examples), default=0)
        for prefix, group in with_prefixes(model, list(map(_unlabelled, examples)), longest=longest):
            for indices in batches([len(examples[i].ids) for i in group], batch_size, model.alike_from):
                own = [group[j] for j in indices]
                yield list(zip(own, _labelled(model, [examples[i] for i in own], prefix), strict=True))


def _unlabelled(example: Example) -> tuple[int, ...]:
    """The tokens before the first label."""
    first = next((i for i, label in enumerate(example.labels) if label != IGNORED), len(example.ids))
    return tuple(example.ids[:first])


@torch.no_grad()
def _labelled(
    model: HookedModel, examples: Sequence[Example], prefix: DynamicCache | None
) -> list[Float[Tensor, "token vocab"]]:
    """The predictions of the labelled tokens of a batch, whose prompts begin with the prefix."""
    batch = {name: part.to(model.device) for name, part in collate(examples, model.pad_id).items()}
    batch, labels = {name: batch[name] for name in INPUTS}, batch["labels"]
    check_vocabulary(model.model, batch["input_ids"], model.name)
    cached = {"use_cache": False}
    if prefix is not None:
        read, cached = prefix.get_seq_length(), {"past_key_values": copies(prefix, len(examples))}
        batch |= {name: batch[name][:, read:] for name in batch if name != "attention_mask"}
        labels = labels[:, read:]
    routed = getattr(base_of(model.model).config, "output_router_logits", False)  # a loss that a prefix does not fit
    options = only_labelled(base_of(model.model), labels) | ({"output_router_logits": False} if routed else {})
    logits, _, example = labelled_logits(model.model(**batch, **cached, **options).logits, labels)
    if logits.isnan().any():
        raise ModelError(f'{model.name} gives NaN logits for answers; try `dtype="float32"`')
    return list(logits.float().split(example.bincount(minlength=len(examples)).tolist()))
