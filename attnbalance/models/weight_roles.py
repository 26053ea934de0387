"""Which role each weight of a layer has (q, k, v, o, MLP, ...), in any family, with fused projections or without."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import Module, Parameter
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights

from attnbalance.errors import ModelError
from attnbalance.models.build_bridge import build_bridge, refusing
from attnbalance.models.copies import copy_model
from attnbalance.models.hooked import HookedModel

ROLES = ("q", "k", "v", "o", "row", "gate", "mlp", "rest")
"""q, k, v, o: the projections of attention with their biases, and the norms of queries, keys and values. row: what else
rows depend on (sinks). gate: what is between the values and W_O (gates, norms). mlp: the MLP. rest: what else a layer
has (the norms of the residual stream, Mamba beside attention)."""

INSIDE = {
    "sinks": "row", "gate_proj": "gate", "g_proj": "gate", "attn_sub_norm": "gate", "output.LayerNorm": "rest",
}  # fmt: skip
"""The roles of what attention modules hold beside projections and their norms, by name: sinks (gpt-oss), gates (AFMoE,
Laguna), a norm before W_O (BitNet), a norm of the residual stream (BERT)."""

MLP = re.compile(r"\.(\w*mlp|\w*moe|experts|router)\.")
"""The names of MLPs and their experts that a bridge does not know (Gemma 4's beside a dense one, Granite 4's)."""

_Kind = tuple[type[Module], tuple[tuple[str, tuple[int, ...]], ...]]
"""The class of an attention module, and the names and shapes of its parameters: what its layout depends on."""

_Labels = Mapping[str, tuple[Tensor, Tensor]]
"""For each parameter of an attention module, by its name in it, the roles and the heads of its entries."""


@dataclass(frozen=True)
class LayerRoles:
    """What every entry of one layer's parameters does, by the parameter's name in the model.

    `roles` and `heads` have length 1 along axes on which nothing depends.
    """

    shapes: Mapping[str, tuple[int, ...]]
    """The shape of each parameter of the layer."""
    roles: Mapping[str, Int[Tensor, ...]]
    """The index into `ROLES` of each entry."""
    heads: Mapping[str, Int[Tensor, ...]]
    """The query head (q, o) or key-value head (k, v) of each entry; -1 for none (norms, the bias of o)."""
    n_heads: int
    """The number of query heads."""
    n_kv_heads: int
    """The number of key-value heads."""

    def masks(self, wanted: Mapping[str, Collection[int] | None]) -> dict[str, Bool[Tensor, ...]]:
        """The parameters with entries of the wanted roles, each with a mask of these; repeated entries take no memory.

        `wanted` holds the query heads of each role, None for all entries of the role. The keys and values of a query
        head are those of its group.
        """
        masks = {}
        for name, shape in self.shapes.items():
            mask = torch.zeros_like(self.roles[name], dtype=torch.bool)
            for role, heads in wanted.items():
                mask = mask | self._entries(name, role, heads)
            if bool(mask.any()):
                masks[name] = mask.expand(shape)
        return masks

    def _entries(self, name: str, role: str, heads: Collection[int] | None) -> Bool[Tensor, ...]:
        """Which entries of a parameter have a role, in some query heads or (None) in all."""
        has_role = self.roles[name] == ROLES.index(role)
        if heads is None:
            return has_role
        group = self.n_heads // self.n_kv_heads if role in ("k", "v") else 1
        numbers = torch.tensor([head // group for head in heads], dtype=self.heads[name].dtype)
        return has_role & torch.isin(self.heads[name], numbers)


def weight_roles(model: PreTrainedModel) -> tuple[LayerRoles, ...]:
    """What the weights of every layer do, layer by layer; embeddings, unembedding and the last norm are in none.

    Fused projections (GPT-2's c_attn, GPT-NeoX's query_key_value, Phi-3's qkv_proj) are separated without a table of
    layouts: in a copy without weights the entries of attention are numbered, and TransformerLens' W_Q, W_K, W_V and W_O
    of the copy show where each one goes. Only one layer of each shape is numbered, so that this takes the memory of one
    layer's attention. Raises `ModelError` if some layer's projections cannot be found in this way.
    """
    twin = _numbered(model)
    parameter_names = {id(parameter): name for name, parameter in twin.named_parameters()}
    paths = {id(p): path for path, module in _attentions(twin) for p in module.parameters()}
    kinds = {path: _kind(module) for path, module in _attentions(twin)}  # the bridge changes the modules
    name = model.config.name_or_path or type(model).__name__
    layers = tuple(range(model.config.get_text_config().num_hidden_layers))
    shell = HookedModel(twin, PreTrainedTokenizerBase(), name, "eager", layers, None)  # a bridge reads no text
    labels: dict[_Kind, _Labels] = {}
    roles = []
    with refusing(shell), no_init_weights():  # the bridge makes layers of its own and fills them
        for i, block in enumerate(build_bridge(shell, twin).blocks):
            where = f"{name} ({type(model).__name__})"
            attention = getattr(block, "attn", Module())
            inside = {paths[id(p)] for p in attention.parameters() if id(p) in paths}
            if len(inside) != 1:
                raise ModelError(f"{where}: layer {i} has {len(inside)} attention modules, not 1")
            path = inside.pop()
            if kinds[path] not in labels:
                labels[kinds[path]] = _labels(attention, kinds[path], f"{where}, layer {i}")
            roles.append(_layer(block, path, labels[kinds[path]], parameter_names))
    return tuple(roles)


def _kind(attention: Module) -> _Kind:
    return type(attention), tuple((name, tuple(p.shape)) for name, p in attention.named_parameters())


def _attentions(model: Module) -> list[tuple[str, Module]]:
    """The attention modules of a model with their paths, without those inside another one."""
    attentions: list[tuple[str, Module]] = []
    for path, module in model.named_modules():
        inside = bool(attentions) and path.startswith(f"{attentions[-1][0]}.")
        if "attention" in type(module).__name__.lower() and not inside:
            attentions.append((path, module))
    return attentions


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
    return copy_model(model, memo)


def _labels(attention: Module, kind: _Kind, where: str) -> _Labels:
    """The roles and heads of the entries of a numbered attention module, in a bridge; `where` is for messages."""
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
    labels, start = {}, 0
    for name, shape in kind[1]:
        part = slice(start, start + math.prod(shape))
        other = roles[part] == ROLES.index("row")
        if bool(other.any()):
            inner = name.removesuffix(".weight").removesuffix(".bias")
            if inner not in INSIDE:
                raise ModelError(f"{where}: {name} of its attention is no projection, norm, gate or sink that is known")
            roles[part] = torch.where(other, ROLES.index(INSIDE[inner]), roles[part])
        labels[name] = _short(roles[part].reshape(shape)), _short(heads[part].reshape(shape))
        start = part.stop
    return labels


def _numbers(attention: Module, role: str) -> Tensor:
    """The numbers in one projection of a bridge's attention, and in its norm."""
    modules = (getattr(attention, name, None) for name in (role, f"{role}_norm"))
    numbers = [p.detach().flatten() for module in modules if isinstance(module, Module) for p in module.parameters()]
    return torch.cat(numbers).long() if numbers else torch.zeros(0, dtype=torch.long)


def _short(labels: Tensor) -> Tensor:
    """Labels with length 1 along the axes on which they do not depend."""
    for axis in range(labels.dim()):
        first = labels.narrow(axis, 0, 1)
        labels = first if bool((labels == first).all()) else labels
    return labels.clone()


def _layer(block: Any, path: str, labels: _Labels, parameter_names: Mapping[int, str]) -> LayerRoles:
    """The roles in one layer, from those in its attention (at `path`) and from the parts of its block in a bridge."""
    attention = {f"{path}.{inner}": entries for inner, entries in labels.items()}
    own = {parameter_names[id(p)]: tuple(p.shape) for p in block.parameters() if id(p) in parameter_names}
    elsewhere = {  # an MLP without a module of its own (OPT's) is represented by the whole layer
        id(p)
        for name, child in block.named_children()
        if name not in ("mlp", "_original_component")
        for p in child.parameters()
    }
    mlp = {parameter_names.get(id(p)) for p in getattr(block, "mlp", Module()).parameters() if id(p) not in elsewhere}
    others = [name for name in own if name not in attention and name not in mlp]
    mlp |= {name for name in others if MLP.search(name) and "norm" not in name.lower()}  # beside a dense one, or alone
    unknown = [name for name in others if len(own[name]) > 1 and name not in mlp and "mamba" not in name]
    if unknown:
        raise ModelError(f"{unknown[0]} is in no attention, MLP or Mamba that is known: its part cannot be told")
    roles, heads = {}, {}
    for name, shape in own.items():
        ones = torch.ones([1] * len(shape), dtype=torch.int16)
        plain = ones * ROLES.index("mlp" if name in mlp else "rest"), -ones
        roles[name], heads[name] = attention.get(name, plain)
    return LayerRoles(own, roles, heads, len(block.attn.W_Q), len(block.attn.W_K))
