"""Parts of a model's weights: QK (W_Q, W_K), OV (W_V, W_O), MLPs and the rest; which differ, and their transplants."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn import Module, Parameter
from transformers import PreTrainedModel

from attnbalance.arguments import expects
from attnbalance.errors import DataError, ModelError
from attnbalance.models.config_changes import changed_settings
from attnbalance.models.forward import base_of
from attnbalance.models.hooked import HookedModel, check_apart
from attnbalance.models.merge_adapters import merged, merged_base
from attnbalance.models.weight_roles import weight_roles

PARTS = ("qk", "ov", "mlp", "rest")
"""qk: W_Q, W_K, their biases and norms, sinks: all that turns the residual stream into attention rows. ov: W_V, W_O,
and gates and norms between them. mlp: the MLPs. rest: embeddings, unembedding, the norms of the residual stream, Mamba
beside attention, and what is not a weight: buffers (rotary frequencies, a router's bias) and the configuration (window,
softcaps, epsilon of norms)."""

HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim")
"""Settings that say how weights of one shape are divided among heads."""

_ROLES_OF = {"qk": ("q", "k", "row"), "ov": ("v", "gate", "o"), "mlp": ("mlp",), "rest": ("rest",)}

Masks = Mapping[str, Mapping[str, Bool[Tensor, "..."]]]
"""For each part, its parameters by name, each with a mask of the entries that belong to it."""


def weight_parts(model: HookedModel) -> Masks:
    """For each of `PARTS`, the parameters of the merged model that belong to it, each with a mask of its entries.

    Raises `ModelError` if some layer's projections cannot be told apart (see `weight_roles`).
    """
    plain = merged_base(model)
    layers = weight_roles(plain)
    masks: dict[str, Mapping[str, Tensor]] = {}
    for part, roles in _ROLES_OF.items():
        masks[part] = {name: mask for layer in layers for name, mask in layer.masks(dict.fromkeys(roles)).items()}
    inside = {name for layer in layers for name in layer.shapes}
    true = torch.ones((), dtype=torch.bool)
    outside = {name: true.expand(p.shape) for name, p in plain.named_parameters() if name not in inside}
    return masks | {"rest": {**masks["rest"], **outside}}


@expects(into=HookedModel, source=HookedModel, parts=[str])
def transplant_weights(into: HookedModel, source: HookedModel, parts: Collection[str]) -> HookedModel:
    """A merged copy of one model with some of its `PARTS` taken from another; neither of the two is changed.

    With all parts taken from the other model, the copy is that model, configuration and buffers included. With its own
    weights, a model keeps its outputs. Both hold to the last bit. Raises `DataError` for an unknown part, `ModelError`
    for models of different shapes.
    """
    return next(transplants(into, source, weight_parts(into), [tuple(parts)]))


def transplants(
    into: HookedModel, source: HookedModel, masks: Masks, combinations: Collection[Collection[str]]
) -> Iterator[HookedModel]:
    """`transplant_weights` for several combinations of parts, one after the other, with the masks of `weight_parts`.

    In float32 if the two models' dtypes differ, so that either may take the other's weights.
    """
    check_shapes(into, source)
    own, others = _parameters(into), _parameters(source)
    mixed = any(parameter.dtype != others[name].dtype for name, parameter in own.items())
    for parts in combinations:
        unknown = sorted(set(parts) - set(PARTS))
        if unknown:
            raise DataError(f"parts must be among {', '.join(PARTS)}, got {unknown[0]!r}")
        # the model that gives the rest also gives what is not a weight, so the hybrid starts as a copy of that model
        base, donor = (source, own) if "rest" in parts else (into, others)
        moved = [part for part in PARTS if (part in parts) != ("rest" in parts)]
        twin = merged(base).float() if mixed else merged(base)
        _copy_entries(twin, donor, [masks[part] for part in moved])
        label = f"{into.name} with {' and '.join(parts) or 'nothing'} of {source.name}"
        yield replace(base, model=twin, tokenizer=into.tokenizer, name=label)


@torch.no_grad()
def _copy_entries(
    twin: Module, donor: Mapping[str, Parameter], masks: Collection[Mapping[str, Bool[Tensor, ...]]]
) -> None:
    """Put the donor's entries into a model, in place, wherever one of the masks is true."""
    for name, parameter in base_of(twin).named_parameters():
        for mask_of in masks:
            if name in mask_of:
                mask = mask_of[name].to(parameter.device)
                parameter.copy_(torch.where(mask, donor[name].to(parameter), parameter))


def changed_parts(a: HookedModel, b: HookedModel, masks: Masks) -> tuple[str, ...]:
    """The parts in which two models of one shape differ at all; raises `ModelError` for different shapes."""
    check_shapes(a, b)
    bases = merged_base(a), merged_base(b)
    first, second = (dict(base.named_parameters()) for base in bases)

    def differs(part: str) -> bool:  # numbers of different dtypes are compared in the wider one
        return any(
            bool(((first[name] != second[name].to(first[name].device)) & mask.to(first[name].device)).any())
            for name, mask in masks[part].items()
        )

    outside = ("rest",) if differ_outside_weights(*bases) else ()
    return tuple(part for part in PARTS if part in outside or differs(part))


def differ_outside_weights(a: PreTrainedModel, b: PreTrainedModel) -> bool:
    """Whether two models differ in their buffers or in settings that outputs may depend on (see `changed_settings`)."""
    if changed_settings(a, b):
        return True
    own, other = _lasting_buffers(a), _lasting_buffers(b)
    return own.keys() != other.keys() or any(
        value.shape != other[name].shape or bool((value != other[name].to(value.device)).any())
        for name, value in own.items()
    )


def _lasting_buffers(model: Module) -> dict[str, Tensor]:
    """The buffers by name, without rotary frequencies that a pass sets by its prompt's length (dynamic NTK, LongRoPE).

    They follow from the settings and from the frequencies of short prompts, which are a buffer of their own.
    """
    by_length = {
        f"{module_name}.{name}"
        for module_name, module in model.named_modules()
        if _turns_by_length(module)
        for name, _ in module.named_buffers(recurse=False)
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq")
    }
    return {name: buffer for name, buffer in model.named_buffers() if name not in by_length}


def _turns_by_length(module: Module) -> bool:
    kinds = getattr(module, "rope_type", None)
    return bool({"dynamic", "longrope"} & set(kinds.values() if isinstance(kinds, dict) else [str(kinds)]))


def check_shapes(a: HookedModel, b: HookedModel) -> None:
    """Raise `ModelError` unless two models are of one class, with the same heads and the same parameters.

    Adapters are merged; parameters must have the same names and shapes, and be in memory. Two handles on one model
    object are refused.
    """
    check_apart(a, b)
    for model in (a, b):
        if any(parameter.is_meta for parameter in model.model.parameters()):
            raise ModelError(f"{model.name} is not wholly in memory (offloaded); load it on one device")
    difference = _difference_of_shapes(merged_base(a), merged_base(b))
    if difference:
        raise ModelError(
            f"{a.name} and {b.name} are models of different shapes ({difference}); weights and rows can be exchanged "
            "between checkpoints of one model only"
        )


def _difference_of_shapes(a: PreTrainedModel, b: PreTrainedModel) -> str | None:
    """The first difference in parameters, class or heads, in words; None if there is none."""
    first, second = ({name: tuple(p.shape) for name, p in base.named_parameters()} for base in (a, b))
    if first != second:
        name = next(iter(sorted(set(first.items()) ^ set(second.items()))))[0]
        return f"first: {name} is {first.get(name)} and {second.get(name)}"
    if type(a) is not type(b):
        return f"a {type(a).__name__} and a {type(b).__name__}"
    own, other = ({name: getattr(base.config.get_text_config(), name, None) for name in HEADS} for base in (a, b))
    return next((f"{name} is {own[name]} and {other[name]}" for name in HEADS if own[name] != other[name]), None)


def _parameters(model: HookedModel) -> dict[str, Parameter]:
    """The parameters of a model with adapters merged: its own if it has none, otherwise a copy's."""
    return dict(merged_base(model).named_parameters())
