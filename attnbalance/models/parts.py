"""Which weights do what: attention (W_Q, W_K), values (W_V, W_O), MLPs and the rest, in any family, fused or not."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn import Module, Parameter

from attnbalance.errors import DataError, ModelError
from attnbalance.models.bridge import build, merged, refusing
from attnbalance.models.forward import base_of
from attnbalance.models.hooked import HookedModel

PARTS = ("attention", "values", "mlp", "rest")
"""attention: W_Q, W_K, their biases and norms, sinks: all that makes a row of a residual stream. values: W_V, W_O. mlp:
the MLPs. rest: embeddings, unembedding, and the norms of the residual stream."""


def weight_parts(model: HookedModel) -> dict[str, Mapping[str, Bool[Tensor, ...]]]:
    """For each of `PARTS`, the parameters of the merged model that belong to it, each with a mask of its entries.

    Fused projections (GPT-2's c_attn, GPT-NeoX's query_key_value, Phi-3's qkv_proj) are told apart without a table of
    layouts: their entries are numbered, and TransformerLens' W_Q, W_K and W_V of such a model show where each one goes.
    Raises `ModelError` where some layer's projections cannot be found in this way.
    """
    twin = base_of(merged(model)).requires_grad_(False)
    own = dict(twin.named_parameters())
    numbered, total = _number(twin)
    with refusing(model):
        bridge = build(model, twin)
    of_values, in_mlp = torch.zeros(total, dtype=torch.bool), set[int]()
    for i, block in enumerate(bridge.blocks):
        queries, values = _numbers(block.attn, ("q", "k")), _numbers(block.attn, ("v", "o"))
        if not len(queries) or not len(values):
            raise ModelError(f"{model.name}: the queries, keys and values of layer {i} cannot be told apart")
        of_values[values] = True
        in_mlp |= {id(parameter) for parameter in getattr(block, "mlp", Module()).parameters()}
    masks: dict[str, Mapping[str, Tensor]] = {part: {} for part in PARTS}
    for name, parameter in own.items():
        if name in numbered:
            size = parameter.numel()
            values = of_values[numbered[name] : numbered[name] + size].reshape(parameter.shape)
            found = {"attention": ~values, "values": values}
        else:
            found = {"mlp" if id(parameter) in in_mlp else "rest": torch.ones(parameter.shape, dtype=torch.bool)}
        for part, mask in found.items():
            if bool(mask.any()):
                masks[part] = {**masks[part], name: mask}
    return masks


def transplant_weights(into: HookedModel, source: HookedModel, parts: Collection[str]) -> HookedModel:
    """A merged copy of one model with some of its `PARTS` taken from another; neither of the two is changed.

    Its own weights, transplanted, leave a model's outputs as they are to the last bit. Raises `DataError` for a part
    that does not exist, `ModelError` for models of different shapes.
    """
    return next(transplants(into, source, weight_parts(into), [tuple(parts)]))


def transplants(
    into: HookedModel,
    source: HookedModel,
    masks: Mapping[str, Mapping[str, Bool[Tensor, ...]]],
    combinations: Collection[Collection[str]],
) -> Iterator[HookedModel]:
    """`transplant_weights` for several combinations of parts, one after the other, with the masks of `weight_parts`.

    In float32 where the two models' dtypes differ, so that either may be the one that takes the other's weights.
    """
    check_shapes(into, source)
    mine, other = _parameters(into), _parameters(source)
    mixed = any(parameter.dtype != other[name].dtype for name, parameter in mine.items())
    for parts in combinations:
        unknown = sorted(set(parts) - set(PARTS))
        if unknown:
            raise DataError(f"no part {unknown[0]!r} of the weights; there are {', '.join(PARTS)}")
        twin = merged(into).float() if mixed else merged(into)
        with torch.no_grad():
            for name, parameter in base_of(twin).named_parameters():
                for part in parts:
                    if name in masks[part]:
                        mask = masks[part][name].to(parameter.device)
                        parameter.copy_(torch.where(mask, other[name].to(parameter), parameter))
        label = f"{into.name} with {' and '.join(parts) or 'nothing'} of {source.name}"
        yield replace(into, model=twin, name=label)


def changed_parts(
    a: HookedModel, b: HookedModel, masks: Mapping[str, Mapping[str, Bool[Tensor, ...]]]
) -> tuple[str, ...]:
    """The parts in which two models of one shape differ at all; raises `ModelError` for different shapes."""
    check_shapes(a, b)
    first, second = _parameters(a), _parameters(b)

    def differs(part: str) -> bool:  # numbers of different dtypes are compared in the wider one
        return any(
            bool(((first[name] != second[name].to(first[name].device)) & mask.to(first[name].device)).any())
            for name, mask in masks[part].items()
        )

    return tuple(part for part in PARTS if differs(part))


def check_shapes(a: HookedModel, b: HookedModel) -> None:
    """Raise `ModelError` unless two models have the same parameters, adapters merged, in the same shapes."""
    first, second = ({name: tuple(p.shape) for name, p in _parameters(one).items()} for one in (a, b))
    if first != second:
        name = next(iter(sorted(set(first.items()) ^ set(second.items()))))[0]
        raise ModelError(
            f"{a.name} and {b.name} are models of different shapes (first: {name} is {first.get(name)} and "
            f"{second.get(name)}); weights and rows can be exchanged between checkpoints of one model only"
        )


def _parameters(model: HookedModel) -> dict[str, Parameter]:
    """The parameters of a model with adapters merged: its own where there are none, a copy's otherwise."""
    adapted = base_of(model.model) is not model.model
    return dict((base_of(merged(model)) if adapted else model.model).named_parameters())


def _number(twin: Module) -> tuple[dict[str, int], int]:
    """Fill the parameters of attention modules with numbers, all different; the first of each, and how many there are.

    In float64, which holds them exactly.
    """
    numbered, total = {}, 0
    for place, module in twin.named_modules():
        if "attention" not in type(module).__name__.lower():
            continue
        for inner, parameter in module.named_parameters():
            name = f"{place}.{inner}"
            if name not in numbered:
                size = parameter.numel()
                parameter.data = torch.arange(total, total + size, dtype=torch.float64).reshape(parameter.shape)
                numbered[name] = total
                total += size
    return numbered, total


def _numbers(attention: Module, names: Collection[str]) -> Tensor:
    """The numbers that stand in some of the projections of a bridge's attention."""
    found = [
        parameter.detach().flatten().double()
        for name in names
        if isinstance(getattr(attention, name, None), Module)
        for parameter in getattr(attention, name).parameters()
    ]
    return torch.cat(found).long() if found else torch.zeros(0, dtype=torch.long)
