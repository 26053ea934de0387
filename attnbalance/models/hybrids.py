"""Hybrids of two bridged models: parts of the weights of one with those of the other, exchanged without copies."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from transformers import PreTrainedModel

from attnbalance.errors import ModelError
from attnbalance.models.bridge import BridgedModel, bridge_of
from attnbalance.models.build_bridge import build_bridge, refusing
from attnbalance.models.copies import copy_model
from attnbalance.models.forward import base_of
from attnbalance.models.hooked import HookedModel
from attnbalance.models.merge_adapters import merged_base
from attnbalance.models.weights import PARTS, Masks, check_shapes, differ_outside_weights, weight_parts

STACKED = {
    "qk": ("W_Q", "W_K", "b_Q", "b_K"),
    "ov": ("W_V", "W_O", "b_V", "b_O"),
    "mlp": ("W_in", "W_gate", "W_out"),
    "rest": ("W_E", "W_U", "b_U"),
}
"""The fields of `bridge_weights.Weights` that belong to each part."""


@dataclass(frozen=True)
class ParameterPair:
    """The same parameter of two bridges of one family, with the part that each of its entries belongs to."""

    parameters: tuple[Parameter, Parameter]
    """The parameter in the first and in the second bridge."""
    values: tuple[Tensor, Tensor]
    """Its entries in the two models, which stay as they are while the parameters hold a hybrid's."""
    part: str | None
    """The part of all entries; None if they belong to several parts (fused weights)."""
    masks: Mapping[str, Tensor]
    """For fused weights, which entries belong to which part."""

    def of_hybrid(self, parts: Collection[str]) -> Tensor:
        """The values of a hybrid that takes these parts from the second model."""
        first, second = self.values
        if self.part is not None:
            return second if self.part in parts else first
        for part in parts:
            if part in self.masks:
                first = torch.where(self.masks[part], second, first)
        return first

    def differs(self, part: str) -> bool:
        """Whether the two models differ in entries of a part."""
        if self.part is not None:
            return self.part == part and not torch.equal(*self.values)
        return part in self.masks and bool(((self.values[0] != self.values[1]) & self.masks[part]).any())


@dataclass(frozen=True)
class Hybrids:
    """Two bridged models of one family, ready to exchange parts of their weights; see `hybrids_of`."""

    before: BridgedModel
    """The first model."""
    after: BridgedModel
    """The second model."""
    differing: tuple[str, ...]
    """The parts in which the two differ."""
    pairs: tuple[ParameterPair, ...]
    """All parameters of the two bridges."""

    @contextmanager
    def taking(self, parts: Collection[str]) -> Iterator[BridgedModel]:
        """The hybrid that takes some of `PARTS` from the second model and the others from the first.

        "rest" also decides whose modules run, and with them buffers and configuration. Weights are put into these
        modules by reference, and taken out again at the end.
        """
        which = int("rest" in parts)
        model = (self.before, self.after)[which]
        for pair in self.pairs:
            pair.parameters[which].data = pair.of_hybrid(parts)
        names = [name for part, fields in STACKED.items() for name in fields if part in parts]
        ours, theirs = self.before.weights, self.after.weights
        try:
            yield replace(model, weights=replace(ours, **{name: getattr(theirs, name) for name in names}))
        finally:
            for pair in self.pairs:
                pair.parameters[which].data = pair.values[which]


@torch.no_grad()
def hybrids_of(before: HookedModel, after: HookedModel) -> Hybrids:
    """All hybrids of two models, each bridged once (see `bridge_of`), so that a hybrid costs no copy of a model.

    With no part or all of them a hybrid is one of the two models, configuration and buffers included. Raises
    `ModelError` for models of different shapes, for those that cannot be taken apart, and for two values of a setting
    that bridges put into weights.
    """
    check_shapes(before, after)
    factors = [getattr(base_of(each.model).config, "residual_multiplier", 1.0) for each in (before, after)]
    if factors[0] != factors[1]:
        raise ModelError(
            f"{before.name} and {after.name} must have one residual_multiplier, got {factors[0]} and {factors[1]}: it "
            "scales what weights write, so its change cannot be told from theirs"
        )
    labels = _part_labels(before, weight_parts(before))
    first, second = bridge_of(before), bridge_of(after)
    parameters = list(zip(_parameters(first.bridge), _parameters(second.bridge), strict=True))
    if any(own.shape != other.shape for own, other in parameters) or len(parameters) != len(labels):
        raise ModelError(f"{before.name} and {after.name} are laid out differently: their weights cannot be exchanged")
    pairs = tuple(_pair(own, other, label) for (own, other), label in zip(parameters, labels, strict=True))
    outside = differ_outside_weights(first.bridge.original_model, second.bridge.original_model)
    differing = tuple(
        part for part in PARTS if (part == "rest" and outside) or any(pair.differs(part) for pair in pairs)
    )
    return Hybrids(first, second, differing, pairs)


def _pair(first: Parameter, second: Parameter, label: Tensor) -> ParameterPair:
    """A parameter of two bridges, with the part or parts that its entries belong to."""
    indices = [int(i) for i in label.unique()]
    masks = {} if len(indices) == 1 else {PARTS[i]: (label == i).to(first.device) for i in indices}
    part = PARTS[indices[0]] if len(indices) == 1 else None
    return ParameterPair((first, second), (first.data, second.data), part, masks)


def _part_labels(model: HookedModel, masks: Masks) -> list[Tensor]:
    """For each parameter of a model's bridge, in order, the index into `PARTS` of each of its entries.

    A bridge splits fused weights into parameters of its own. So a copy is bridged whose weights are these indices, and
    each index arrives where the entry of a model would.
    """
    plain = merged_base(model)
    memo: dict[int, Any] = {}
    for name, parameter in plain.named_parameters():
        index = torch.zeros((), dtype=torch.float32)
        for i, part in enumerate(PARTS):
            if name in masks[part]:
                mask = masks[part][name]
                number = torch.tensor(i, dtype=torch.float32)
                index = number if bool(mask.all()) else torch.where(mask, number, index)
        memo[id(parameter)] = Parameter(index.expand(parameter.shape), requires_grad=False)
    twin: PreTrainedModel = copy_model(plain, memo)
    with refusing(model):
        bridge = build_bridge(model, twin)
    labels = [p.detach().round().to(torch.int8) for p in _parameters(bridge)]
    return [label.flatten()[:1] if bool((label == label.flatten()[0]).all()) else label for label in labels]


def _parameters(bridge: Any) -> list[Parameter]:
    """All parameters inside a bridge, those that it has made from fused ones included, in a fixed order."""
    parameters: dict[int, Parameter] = {}
    for module in (bridge, bridge.original_model):
        for inner in Module.modules(module):
            parameters |= {id(p): p for p in inner._parameters.values() if p is not None}
    return list(parameters.values())
