"""Which weights finetuning trains: a choice such as qk@4-7, kept to the bit, for full training and for LoRA."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from attnbalance.errors import DataError, ModelError
from attnbalance.models.parts import ROLES, LayerRoles, weight_roles

if TYPE_CHECKING:
    from peft import PeftModel

NAMES = {
    "all": ROLES,
    "q": ("q",),
    "k": ("k",),
    "v": ("v",),
    "o": ("o",),
    "qk": ("q", "k"),
    "ov": ("o", "v"),
    "attention": ("q", "k", "v", "o", "row"),
    "mlp": ("mlp",),
}
"""The parts that can be named, with their roles among `models.parts.ROLES`. `all` without layers is the whole model."""

PLACE = re.compile(r"(?:(?P<layer>\d+)\.)?(?P<first>\d+)(?:-(?P<last>\d+))?")
WRAPPERS = re.compile(r"^(?:_orig_mod\.|module\.)+|_orig_mod\.|_checkpoint_wrapped_module\.")
"""What DDP, compile and activation checkpointing put into the names of parameters."""


class Place(NamedTuple):
    """Some layers, and the query heads in them that are meant; None for all that the layer has of the part."""

    layers: range
    heads: range | None


class Part(NamedTuple):
    """One part of a choice: a name among `NAMES`, and where; every layer if no place is given."""

    name: str
    places: tuple[Place, ...]


@dataclass(frozen=True)
class Chosen:
    """The entries to train of every parameter that has some, by its name; None where all of it is trained.

    `numbers` counts them and `total` what the model has, tied weights once.
    """

    text: str
    masks: Mapping[str, Bool[Tensor, ...] | None]
    numbers: int
    total: int

    def describe(self) -> str:
        """One line: what is trained, and how many numbers that is (of the weights themselves, not of adapters)."""
        count = f"{len(self.masks)} parameter{'s' * (len(self.masks) != 1)}"
        share = f"{self.numbers:,} of {self.total:,} numbers ({100 * self.numbers / self.total:.3g}%)"
        return f"Trained: {self.text}, {share} in {count}"


class Guard:
    """Keeps what is not trained of partly trained parameters to the bit, whatever the optimizer does to them.

    After each backward pass `mask_gradients`, before gradients are clipped; after each step of the optimizer `restore`.
    Parameters are found by name in the model that is passed, wrapped or not (DDP, FSDP2, compile). False where no
    parameter is partly trained; both calls then do nothing.
    """

    def __init__(self, masks: Mapping[str, Bool[Tensor, ...]]) -> None:
        """`masks` holds the entries to train of the partly trained parameters."""
        self._masks = {WRAPPERS.sub("", name): mask for name, mask in masks.items()}
        self._kept: dict[str, tuple[Tensor, Tensor]] = {}

    def __bool__(self) -> bool:
        return bool(self._masks)

    @torch.no_grad()
    def mask_gradients(self, model: nn.Module) -> None:
        """Set the gradient of what is not trained to zero; the first call also notes its values, before any step."""
        for name, parameter in self._guarded(model):
            if parameter.grad is not None:  # without one, no optimizer touches the parameter
                if name not in self._kept:
                    self._kept[name] = ~_laid_out(self._masks[name], parameter), _local(parameter).clone()
                _local(parameter.grad).masked_fill_(self._kept[name][0], 0)

    @torch.no_grad()
    def restore(self, model: nn.Module) -> None:
        """Give what is not trained the values that it had at the first `mask_gradients`."""
        for name, parameter in self._guarded(model):
            if name in self._kept:
                frozen, before = self._kept[name]
                now = _local(parameter)
                now.copy_(torch.where(frozen, before, now))

    def trained(self, model: nn.Module) -> int:
        """How many numbers of a model are trained, those of adapters included, tied weights once."""
        every = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        return every - sum(mask.numel() - _count(mask) for mask in self._masks.values())

    def _guarded(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        if not self._masks:
            return
        own = {WRAPPERS.sub("", name): parameter for name, parameter in model.named_parameters()}
        for name in self._masks:
            if name not in own:
                raise ModelError(
                    f"{name} is trained in part, but a {type(model).__name__} came that has no such parameter; pass "
                    "the model of the choice, wrapped in nothing that flattens parameters (use FSDP version 2)"
                )
            yield name, own[name]


def parse_parts(text: str) -> tuple[Part, ...]:
    """The parts that a text names, joined by "+": a name among `NAMES`, and after "@" where it is chosen.

    Where: layers "4", ranges of layers "4-7" (both ends belong to it), heads "3.1" (layer 3, head 1), ranges of heads
    "3.1-4", several joined by commas: "qk@4-7", "q@3.1,3.4", "qk+mlp@0-3" (qk everywhere, mlp in four layers). Heads
    are query heads; the keys and values of a head are those of its group, which other heads may share. What is left of
    a layer's attention (norms of queries and keys, the bias of o, sinks) belongs to no head. Raises `DataError`.
    """
    found = []
    for part in text.split("+"):
        name, at, where = (piece.strip() for piece in part.partition("@"))
        if name not in NAMES:
            raise DataError(f"no part {name!r} of the weights (in {text!r}); there are {', '.join(NAMES)}")
        places = tuple(_place(piece.strip(), text) for piece in where.split(",")) if at else ()
        if name in ("all", "mlp") and any(place.heads is not None for place in places):
            raise DataError(f"{name} has no heads (in {text!r}); name layers only, such as {name}@3 or {name}@3-5")
        found.append(Part(name, places))
    return tuple(found)


def choose(model: PreTrainedModel, parts: str) -> Chosen:
    """The entries of a model's parameters that a text names (see `parse_parts`), whether projections are fused or not.

    `all` does for any model; other parts need one that TransformerLens knows. Raises `DataError` for a text that cannot
    be read, and for layers, heads and parts that the model does not have; `ModelError` where its projections cannot be
    told apart.
    """
    wanted = parse_parts(parts)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    counts, masks = dict(sizes), dict[str, Tensor | None](dict.fromkeys(sizes))
    if not any(part.name == "all" and not part.places for part in wanted):
        layers = weight_roles(model)
        _check_range(wanted, layers, parts)
        found = [layer.masks(_roles_at(i, wanted)).items() for i, layer in enumerate(layers)]
        partly = {name: mask for each in found for name, mask in each}
        counts = {name: _count(partly[name]) for name in sizes if name in partly}
        masks = {name: None if count == sizes[name] else partly[name] for name, count in counts.items()}
    if not masks:
        raise DataError(f"{type(model).__name__} has no weights that {parts!r} names; choose another part")
    return Chosen(parts, masks, sum(counts.values()), sum(sizes.values()))


def train_only(model: PreTrainedModel, chosen: Chosen) -> Guard:
    """Let a model train what is chosen and nothing else, together with the guard that is returned."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen.masks)
    return Guard({name: mask for name, mask in chosen.masks.items() if mask is not None})


def add_lora(model: PreTrainedModel, chosen: Chosen, rank: int, alpha: float | int) -> tuple[PeftModel, Guard]:
    """The model with fresh LoRA adapters (Hu et al. 2022) that change what is chosen of its linear layers, no more.

    They are ordinary adapters, scaled by `alpha` / `rank`: W + B A. Where only some outputs of a layer are chosen the
    other rows of B stay zero, where only some inputs (heads of o) the other columns of A: the guard keeps them so.
    Biases and norms are not trained. `all` stands for every linear layer but the output's. Raises `DataError` where
    there is no linear layer among what is chosen, `ModelError` where entries are no rows x columns of a layer.
    """
    from peft import LoraConfig, get_peft_model

    names = [name.removesuffix(".weight") for name in chosen.masks if name.endswith(".weight")]
    linear = {place: layer for place in names if isinstance(layer := model.get_submodule(place), nn.Linear | Conv1D)}
    if not linear:
        raise DataError(
            f"LoRA adapts the weights of linear layers, and {chosen.text!r} chooses none in {type(model).__name__}; "
            "choose another part, or train without LoRA"
        )
    factors = {
        place: _rows_and_columns(mask.T if isinstance(layer, Conv1D) else mask, place)
        for place, layer in linear.items()
        if (mask := chosen.masks[f"{place}.weight"]) is not None
    }
    targets = "all-linear" if chosen.numbers == chosen.total else list(linear)
    settings = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=alpha, target_modules=targets)  # pyright: ignore[reportArgumentType]
    adapted = get_peft_model(model, settings)
    masks = {}
    for place, (rows, columns) in factors.items():
        lora = f"base_model.model.{place}.lora_{{}}.default.weight"
        if not bool(rows.all()):
            masks[lora.format("B")] = rows[:, None].expand(-1, rank)
        if not bool(columns.all()):
            masks[lora.format("A")] = columns.expand(rank, -1)
            inputs = adapted.get_parameter(lora.format("A")).data
            inputs.masked_fill_(~columns.to(inputs.device), 0)
    return adapted, Guard(masks)  # pyright: ignore[reportReturnType]


def _place(piece: str, text: str) -> Place:
    """One place: layers, or heads of a layer."""
    match = PLACE.fullmatch(piece)
    if match:
        layer, first, last = match.groups()
        chosen = range(int(first), int(last or first) + 1)
        if len(chosen):
            return Place(chosen, None) if layer is None else Place(range(int(layer), int(layer) + 1), chosen)
    raise DataError(
        f"{piece!r} in {text!r} is no layer (4), range of layers (4-7), head (3.1: layer 3, head 1) or range of heads "
        "(3.1-4)"
    )


def _check_range(wanted: Sequence[Part], layers: Sequence[LayerRoles], text: str) -> None:
    """Raise `DataError` for a layer or head that the model does not have."""
    for place in (place for part in wanted for place in part.places):
        if place.layers[-1] >= len(layers):
            raise DataError(f"layer {place.layers[-1]} (in {text!r}): the model has layers 0 to {len(layers) - 1}")
        heads = layers[place.layers[0]].n_heads
        if place.heads is not None and place.heads[-1] >= heads:
            where = f"layer {place.layers[0]} has heads 0 to {heads - 1}"
            raise DataError(f"head {place.heads[-1]} (in {text!r}): {where}")


def _roles_at(layer: int, wanted: Sequence[Part]) -> dict[str, set[int] | None]:
    """The roles chosen in one layer, each with its query heads, None for all."""
    found: dict[str, set[int] | None] = {}
    for part in wanted:
        here = [place.heads for place in part.places if layer in place.layers] if part.places else [None]
        for heads in here:
            for role in NAMES[part.name]:
                before = found.get(role, set())
                found[role] = None if heads is None or before is None else before | set(heads)
    return found


def _count(mask: Tensor) -> int:
    """How many entries of a mask are true, without going through entries that are repeated in memory."""
    held = mask[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in mask.stride())]
    return int(held.sum()) * (mask.numel() // held.numel())


def _rows_and_columns(mask: Tensor, place: str) -> tuple[Tensor, Tensor]:
    """The outputs and the inputs of a linear layer [d_out, d_in] whose crossings are the entries of a mask."""
    rows, columns = mask.any(1), mask.any(0)
    if not torch.equal(mask, rows[:, None] & columns):
        raise ModelError(
            f"{place}: the entries that are chosen are not some outputs times some inputs of this layer, and LoRA can "
            "train no others; choose whole parts, or train without LoRA"
        )
    return rows, columns


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
