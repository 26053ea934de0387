"""Which weights finetuning trains: a choice such as qk@4-7, exact to the entry."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnbalance.arguments import expects
from attnbalance.errors import DataError, ModelError
from attnbalance.models.weight_roles import ROLES, LayerRoles, weight_roles

NAMES = {
    "all": ROLES,
    "q": ("q",),
    "k": ("k",),
    "v": ("v",),
    "o": ("o",),
    "qk": ("q", "k"),
    "ov": ("o", "v"),
    "attention": ("q", "k", "v", "o", "row", "gate"),
    "mlp": ("mlp",),
}
"""The parts that can be named, with their roles among `weight_roles.ROLES`. `all` without layers is the whole model;
`attention` is qk + ov, with sinks and gates where a family has them."""

REGION = re.compile(r"(?:(?P<layer>\d{1,9})\.)?(?P<first>\d{1,9})(?:-(?P<last>\d{1,9}))?", re.ASCII)
WRAPPERS = re.compile(r"^(?:_orig_mod\.|module\.)+|_orig_mod\.|_checkpoint_wrapped_module\.")
"""What DDP, compile and activation checkpointing add to the names of parameters."""


class Region(NamedTuple):
    """Some layers, and query heads in them."""

    layers: range
    """The layers."""
    heads: range | None
    """The query heads; None: everything that the layers have of the part."""


TRAINED_IN_PART = "attnbalance_trained_in_part"
"""The attribute of a module that names its own parameters of which only some entries are to be trained."""


class Part(NamedTuple):
    """One part of a choice."""

    name: str
    """A name among `NAMES`."""
    regions: tuple[Region, ...]
    """Where it is chosen; empty: in every layer."""


@dataclass(frozen=True)
class Chosen:
    """The entries of a model's parameters to train."""

    text: str
    """The choice as it is written."""
    masks: Mapping[str, Bool[Tensor, ...] | None]
    """The entries to train of every parameter that has some, by its name; None: all."""
    numbers: int
    """The number of these entries, tied weights once."""
    total: int
    """The number of entries of the whole model, tied weights once."""

    def describe(self) -> str:
        """How many of the model's own weights these are, in how many tensors, and the choice."""
        count = f"{len(self.masks)} tensor{'s' * (len(self.masks) != 1)}"
        share = f"{100 * self.numbers / self.total:.3g}%"
        return f"{self.numbers:,} of {self.total:,} weights ({share}) in {count} ({self.text})"


class FrozenWeights:
    """Keeps the untrained entries of partly trained parameters bit-identical under any optimizer.

    Call `begin` before each training, `mask_gradients` after each backward pass, before gradients are clipped, and
    `restore` after each step of the optimizer. Parameters are looked up by name in the model that is passed, wrapped or
    not (DDP, FSDP2, compile). If no parameter is partly trained, the object is false and the calls do nothing.
    """

    @expects(masks={str: Tensor})
    def __init__(self, masks: Mapping[str, Bool[Tensor, ...]]) -> None:
        """`masks` holds the entries to train of the partly trained parameters."""
        self._masks = {WRAPPERS.sub("", name): mask for name, mask in masks.items()}
        self._kept: dict[str, tuple[Tensor, Tensor]] = {}

    def __bool__(self) -> bool:
        return bool(self._masks)

    @property
    def names(self) -> frozenset[str]:
        """The names of the partly trained parameters, without those of wrappers."""
        return frozenset(self._masks)

    def begin(self) -> None:
        """Forget the values of an earlier training: the entries may have been trained by another one since."""
        self._kept.clear()

    @torch.no_grad()
    def mask_gradients(self, model: nn.Module) -> None:
        """Set the gradient of untrained entries to zero; the first call also saves their values, before any step."""
        for name, parameter in self._partly_trained(model):
            if parameter.grad is not None:  # without one, no optimizer touches the parameter
                if name not in self._kept:
                    self._kept[name] = ~_laid_out(self._masks[name], parameter), _local(parameter).clone()
                _local(parameter.grad).masked_fill_(self._kept[name][0], 0)

    @torch.no_grad()
    def restore(self, model: nn.Module) -> None:
        """Give untrained entries the values that they had at the first `mask_gradients`."""
        for name, parameter in self._partly_trained(model):
            if name in self._kept:
                frozen, before = self._kept[name]
                now = _local(parameter)
                now.copy_(torch.where(frozen, before, now))

    def trained(self, model: nn.Module) -> int:
        """The number of trained entries of a model, those of adapters included, tied weights once."""
        total = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        return total - sum(mask.numel() - _count(mask) for mask in self._masks.values())

    def _partly_trained(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        if not self._masks:
            return
        own = {WRAPPERS.sub("", name): parameter for name, parameter in model.named_parameters()}
        for name in self._masks:
            if name not in own:
                raise ModelError(
                    f"{type(model).__name__} has no parameter {name}, which is trained in part; pass the model "
                    "given to select_weights, in no wrapper that flattens parameters (use FSDP version 2)"
                )
            yield name, own[name]


def parse_parts(text: str) -> tuple[Part, ...]:
    """The parts that a text names, joined by "+": a name among `NAMES`, and after "@" where it is chosen.

    Where: layers "4", ranges of layers "4-7" (both ends included), heads "3.1" (layer 3, head 1), ranges of heads
    "3.1-4", several joined by commas: "qk@4-7", "q@3.1,3.4", "qk+mlp@0-3" (qk everywhere, mlp in four layers). Heads
    are query heads; the keys and values of a head are those of its group, which other heads may share. The rest of a
    layer's attention (norms of queries and keys, the bias of o, sinks) belongs to no head. Where such a norm spans all
    heads (OLMo 2, OLMoE, MiniMax-M2), training q or k of one head changes the rows of the others too. Raises
    `DataError` for any other text.

    >>> parse_parts("qk@4-7")
    (Part(name='qk', regions=(Region(layers=range(4, 8), heads=None),)),)
    """
    parts = []
    for part in text.split("+"):
        name, at, where = (piece.strip() for piece in part.partition("@"))
        if name not in NAMES:
            raise DataError(f"no part {name!r} of the weights (in {text!r}); there are {', '.join(NAMES)}")
        regions = tuple(_region(piece.strip(), text) for piece in where.split(",")) if at else ()
        if name in ("all", "mlp") and any(region.heads is not None for region in regions):
            raise DataError(f"{name} has no heads (in {text!r}); name layers only, such as {name}@3 or {name}@3-5")
        parts.append(Part(name, regions))
    return tuple(parts)


def check_layers(wanted: Sequence[Part], layers: int, text: str) -> None:
    """Raise `DataError` for a layer, named in `text`, that a model with this number of layers does not have."""
    for region in (region for part in wanted for region in part.regions):
        if region.layers[-1] >= layers:
            raise DataError(f"layer {region.layers[-1]} (in {text!r}): the model has layers 0 to {layers - 1}")


@expects(model=nn.Module, parts=str)
def select_weights(model: PreTrainedModel, parts: str) -> Chosen:
    """The entries of a model's parameters that a text names (see `parse_parts`), whether projections are fused or not.

    `all` works for any model; other parts need one that TransformerLens supports. Raises `DataError` for a text that
    cannot be parsed, and for layers, heads and parts that the model does not have; `ModelError` if its projections
    cannot be distinguished.
    """
    wanted = parse_parts(parts)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    counts, masks = dict(sizes), dict[str, Tensor | None](dict.fromkeys(sizes))
    if not any(part.name == "all" and not part.regions for part in wanted):
        layers = weight_roles(model)
        check_layers(wanted, len(layers), parts)
        _check_heads(wanted, layers, parts)
        by_layer = [layer.masks(_roles_at(i, wanted)) for i, layer in enumerate(layers)]
        partly = {name: mask for masks_of_layer in by_layer for name, mask in masks_of_layer.items()}
        counts = {name: _count(partly[name]) for name in sizes if name in partly}
        masks = {name: None if count == sizes[name] else partly[name] for name, count in counts.items()}
    if not masks:
        raise DataError(f"{type(model).__name__} has no weights {parts!r}; choose another part")
    return Chosen(parts, masks, sum(counts.values()), sum(sizes.values()))


@expects(model=nn.Module, chosen=Chosen)
def train_only(model: PreTrainedModel, chosen: Chosen) -> FrozenWeights:
    """Let a model train the chosen entries only; pass the result to the trainer, which keeps the others frozen."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen.masks)
    return frozen_in(model, {name: mask for name, mask in chosen.masks.items() if mask is not None})


def frozen_in(model: nn.Module, masks: Mapping[str, Bool[Tensor, ...]]) -> FrozenWeights:
    """The frozen weights of a model with these masks; its modules are marked, so that trainers can ask for them.

    A copy of the model (`copy.deepcopy`) is marked too.
    """
    for path, module in model.named_modules():
        marked = [name for name in module._parameters if (f"{path}.{name}" if path else name) in masks]
        setattr(module, TRAINED_IN_PART, tuple(marked))
    return FrozenWeights(masks)


def trained_in_part(model: nn.Module) -> list[str]:
    """The names of trained parameters that `train_only` or `add_lora` chose only in part."""
    return [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in getattr(module, TRAINED_IN_PART, ())
        if (parameter := module._parameters.get(name)) is not None and parameter.requires_grad
    ]


def loras_of_parts(model: nn.Module) -> list[str]:
    """The names of trained matrices of LoRA with some rows (B) or columns (A) of zeros, as `add_lora` leaves them."""
    return [name for name, each in model.named_parameters() if each.requires_grad and _is_lora_of_a_part(name, each)]


def _is_lora_of_a_part(name: str, parameter: nn.Parameter) -> bool:
    """Whether a matrix of LoRA has rows (B) or columns (A) of zeros beside others."""
    axis = 1 if ".lora_B." in name else 0 if ".lora_A." in name else None
    if axis is None or parameter.ndim != 2 or parameter.is_meta:
        return False
    used = (parameter.detach() != 0).any(axis)
    return bool(used.any()) and not bool(used.all())


def _region(piece: str, text: str) -> Region:
    """Layers, or heads of a layer."""
    if match := REGION.fullmatch(piece):
        layer, first, last = match.groups()
        chosen = range(int(first), int(last or first) + 1)
        if len(chosen):
            return Region(chosen, None) if layer is None else Region(range(int(layer), int(layer) + 1), chosen)
    raise DataError(
        f"expected a layer (4), a range of layers (4-7), a head (3.1: layer 3, head 1) or a range of heads (3.1-4), "
        f"got {piece!r} in {text!r}"
    )


def _check_heads(wanted: Sequence[Part], layers: Sequence[LayerRoles], text: str) -> None:
    """Raise `DataError` for a head that the model does not have."""
    for region in (region for part in wanted for region in part.regions):
        heads = layers[region.layers[0]].n_heads
        if region.heads is not None and region.heads[-1] >= heads:
            where = f"layer {region.layers[0]} has heads 0 to {heads - 1}"
            raise DataError(f"head {region.heads[-1]} (in {text!r}): {where}")


def _roles_at(layer: int, wanted: Sequence[Part]) -> dict[str, set[int] | None]:
    """The roles chosen in one layer, each with its query heads, None for all."""
    chosen: dict[str, set[int] | None] = {}
    for part in wanted:
        here = [region.heads for region in part.regions if layer in region.layers] if part.regions else [None]
        for heads in here:
            for role in NAMES[part.name]:
                before = chosen.get(role, set())
                chosen[role] = None if heads is None or before is None else before | set(heads)
    return chosen


def _count(mask: Tensor) -> int:
    """The number of true entries of a mask; entries repeated in memory are counted once and multiplied."""
    held = mask[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in mask.stride())]
    return int(held.sum()) * (mask.numel() // held.numel())


def _laid_out(mask: Tensor, like: Tensor) -> Tensor:
    """A mask on the device of a parameter: of an FSDP2 parameter, this process's shard of it."""
    mesh = getattr(like, "device_mesh", None)
    if mesh is None:
        return mask.to(like.device)
    from torch.distributed.tensor import distribute_tensor

    whole = mask.to(_local(like).device).contiguous()
    return _local(distribute_tensor(whole, mesh, like.placements, src_data_rank=None))  # pyright: ignore[reportAttributeAccessIssue]


def _local(tensor: Tensor) -> Tensor:
    """The tensor itself, or this process's shard of it."""
    return getattr(tensor, "to_local", lambda: tensor)()
