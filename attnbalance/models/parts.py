"""Which weights do what: attention (W_Q, W_K), values (W_V, W_O), MLPs and the rest, in any family, fused or not."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import Module, Parameter
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights

from attnbalance.errors import DataError, ModelError
from attnbalance.models.bridge import build, merged, refusing
from attnbalance.models.forward import base_of
from attnbalance.models.hooked import HookedModel

PARTS = ("attention", "values", "mlp", "rest")
"""attention: W_Q, W_K, their biases and norms, sinks: all that makes a row of a residual stream. values: W_V, W_O. mlp:
the MLPs. rest: embeddings, unembedding, and the norms of the residual stream."""

ROLES = ("q", "k", "v", "o", "row", "mlp", "rest")
"""q, k, v, o: the projections of attention with their biases, and the norms of queries, keys and values. row: whatever
else an attention module has (sinks). mlp: the MLP. rest: what else a layer has (the norms of the residual stream)."""

_IN_PART = {"attention": ("q", "k", "row"), "values": ("v", "o"), "mlp": ("mlp",), "rest": ("rest",)}


@dataclass(frozen=True)
class LayerRoles:
    """What every entry of one layer's parameters does, by the parameter's name.

    `roles` holds places in `ROLES`; `heads` the query head (q, o) or key-value head (k, v) that an entry belongs to, -1
    where it belongs to none (norms, the bias of o). Both have length 1 along axes on which nothing depends.
    """

    shapes: Mapping[str, tuple[int, ...]]
    roles: Mapping[str, Int[Tensor, ...]]
    heads: Mapping[str, Int[Tensor, ...]]
    n_heads: int
    n_kv_heads: int

    def masks(self, wanted: Mapping[str, Collection[int] | None]) -> dict[str, Bool[Tensor, ...]]:
        """The parameters with entries of some roles, each with a mask of these; repeated entries take no memory.

        For each role its query heads, None for all that has the role. The keys and values of a query head are those of
        its group.
        """
        found = {}
        for name, shape in self.shapes.items():
            roles, heads = self.roles[name], self.heads[name]
            mask = torch.zeros_like(roles, dtype=torch.bool)
            for role, chosen in wanted.items():
                has_role = roles == ROLES.index(role)
                if chosen is not None:
                    shared = self.n_heads // self.n_kv_heads if role in ("k", "v") else 1
                    numbers = torch.tensor([head // shared for head in chosen], dtype=heads.dtype)
                    has_role = has_role & torch.isin(heads, numbers)
                mask = mask | has_role
            if bool(mask.any()):
                found[name] = mask.expand(shape)
        return found


def weight_roles(model: PreTrainedModel) -> tuple[LayerRoles, ...]:
    """What the weights of every layer do, layer by layer; embeddings, unembedding and the last norm are in none.

    Fused projections (GPT-2's c_attn, GPT-NeoX's query_key_value, Phi-3's qkv_proj) are told apart without a table of
    layouts: in a copy without weights the entries of attention are numbered, and TransformerLens' W_Q, W_K, W_V and W_O
    of it show where each one goes. Numbers stand in one layer of each shape only, so that this takes the memory of one
    layer's attention. Raises `ModelError` where some layer's projections cannot be found in this way.
    """
    twin = _numbered(model)
    named = {id(parameter): name for name, parameter in twin.named_parameters()}
    places = {id(p): (place, module) for place, module in _attentions(twin) for p in module.parameters()}
    kinds = {place: _kind(module) for place, module in _attentions(twin)}  # the bridge changes the modules
    name = model.config.name_or_path or type(model).__name__
    layers = tuple(range(model.config.get_text_config().num_hidden_layers))
    shell = HookedModel(twin, PreTrainedTokenizerBase(), name, "eager", layers, None)  # a bridge reads no text
    known: dict[_Kind, dict[str, tuple[Tensor, Tensor]]] = {}
    found = []
    with refusing(shell), no_init_weights():  # the bridge makes layers of its own and fills them
        for i, block in enumerate(build(shell, twin).blocks):
            attention = getattr(block, "attn", Module())
            where = {places[id(p)][0] for p in attention.parameters() if id(p) in places}
            if len(where) != 1:
                raise ModelError(
                    f"{name} ({type(model).__name__}): layer {i} has {len(where)} attention modules, not 1"
                )
            place = where.pop()
            if kinds[place] not in known:
                known[kinds[place]] = _labels(attention, kinds[place], f"{name} ({type(model).__name__}), layer {i}")
            found.append(_layer(block, place, known[kinds[place]], named))
    return tuple(found)


def weight_parts(model: HookedModel) -> dict[str, Mapping[str, Bool[Tensor, ...]]]:
    """For each of `PARTS`, the parameters of the merged model that belong to it, each with a mask of its entries.

    Raises `ModelError` where some layer's projections cannot be told apart (see `weight_roles`).
    """
    plain = _merged_base(model)
    layers = weight_roles(plain)
    masks: dict[str, Mapping[str, Tensor]] = {}
    for part, roles in _IN_PART.items():
        masks[part] = {name: mask for layer in layers for name, mask in layer.masks(dict.fromkeys(roles)).items()}
    inside = {name for layer in layers for name in layer.shapes}
    one = torch.ones((), dtype=torch.bool)
    outside = {name: one.expand(p.shape) for name, p in plain.named_parameters() if name not in inside}
    return masks | {"rest": {**masks["rest"], **outside}}


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
    return dict(_merged_base(model).named_parameters())


def _merged_base(model: HookedModel) -> PreTrainedModel:
    """The transformers model with adapters merged: itself where there are none, a copy otherwise."""
    base = base_of(model.model)
    return base if base is model.model else base_of(merged(model))


_Kind = tuple[type[Module], tuple[tuple[str, tuple[int, ...]], ...]]


def _kind(attention: Module) -> _Kind:
    """The class of an attention module with the names and shapes of its parameters: what its layout depends on."""
    return type(attention), tuple((name, tuple(p.shape)) for name, p in attention.named_parameters())


def _attentions(model: Module) -> list[tuple[str, Module]]:
    """The attention modules of a model, without those inside another one."""
    found: list[tuple[str, Module]] = []
    for place, module in model.named_modules():
        if "attention" in type(module).__name__.lower() and not (found and place.startswith(f"{found[-1][0]}.")):
            found.append((place, module))
    return found


def _numbered(model: PreTrainedModel) -> PreTrainedModel:
    """A copy without weights: entries numbered in the first attention module of each kind, else one zero, repeated.

    No meta tensors: TransformerLens refuses to split fused MLPs of these. In float64, which holds the numbers exactly.
    """
    memo: dict[int, Any] = {}
    for module in {_kind(module): module for _, module in reversed(_attentions(model))}.values():
        start = 0
        for parameter in module.parameters():
            numbers = torch.arange(start, start + parameter.numel(), dtype=torch.float64).reshape(parameter.shape)
            memo[id(parameter)] = Parameter(numbers, requires_grad=False)
            start += parameter.numel()
    for parameter in model.parameters():
        if id(parameter) not in memo:
            zero = torch.zeros((), dtype=torch.bfloat16).expand(parameter.shape)
            memo[id(parameter)] = Parameter(zero, requires_grad=False)
    return copy.deepcopy(model, memo)


def _labels(attention: Module, kind: _Kind, where: str) -> dict[str, tuple[Tensor, Tensor]]:
    """For each parameter of a numbered attention module, in a bridge, the roles and the heads of its entries."""
    roles = torch.full((sum(math.prod(shape) for _, shape in kind[1]),), ROLES.index("row"), dtype=torch.int16)
    heads = torch.full_like(roles, -1)
    for role in ("q", "k", "v", "o"):
        numbers = _numbers(attention, role)
        if not len(numbers) or bool((roles[numbers] != ROLES.index("row")).any()):
            raise ModelError(f"{where}: queries, keys, values and outputs cannot be told apart (found no {role} apart)")
        roles[numbers] = ROLES.index(role)
        for letter, axes in (("W", 3), ("b", 2)):  # head d_model d_head, head d_head
            by_head = getattr(attention, f"{letter}_{role.upper()}", None)
            if isinstance(by_head, Tensor) and by_head.dim() == axes:
                heads[by_head.detach().long().flatten(1)] = torch.arange(len(by_head), dtype=heads.dtype)[:, None]
    found, start = {}, 0
    for name, shape in kind[1]:
        part = slice(start, start + math.prod(shape))
        found[name] = _short(roles[part].reshape(shape)), _short(heads[part].reshape(shape))
        start = part.stop
    return found


def _numbers(attention: Module, role: str) -> Tensor:
    """The numbers that stand in one projection of a bridge's attention, and in its norm."""
    modules = (getattr(attention, name, None) for name in (role, f"{role}_norm"))
    found = [p.detach().flatten() for module in modules if isinstance(module, Module) for p in module.parameters()]
    return torch.cat(found).long() if found else torch.zeros(0, dtype=torch.long)


def _short(labels: Tensor) -> Tensor:
    """Labels with length 1 along the axes on which they do not depend."""
    for axis in range(labels.dim()):
        first = labels.narrow(axis, 0, 1)
        labels = first if bool((labels == first).all()) else labels
    return labels.clone()


def _layer(block: Any, place: str, labels: Mapping[str, tuple[Tensor, Tensor]], named: Mapping[int, str]) -> LayerRoles:
    """The roles in one layer, from those in its attention and from the parts of its block in a bridge."""
    attention = {f"{place}.{inner}": found for inner, found in labels.items()}
    own = {named[id(p)]: tuple(p.shape) for p in block.parameters() if id(p) in named}
    elsewhere = {  # an MLP that is no module of its own (OPT's) stands for the whole layer
        id(p)
        for name, child in block.named_children()
        if name not in ("mlp", "_original_component")
        for p in child.parameters()
    }
    mlp = {named.get(id(p)) for p in getattr(block, "mlp", Module()).parameters() if id(p) not in elsewhere}
    roles, heads = {}, {}
    for name, shape in own.items():
        one = torch.ones([1] * len(shape), dtype=torch.int16)
        plain = one * ROLES.index("mlp" if name in mlp else "rest"), -one
        roles[name], heads[name] = attention.get(name, plain)
    return LayerRoles(own, roles, heads, len(block.attn.W_Q), len(block.attn.W_K))
