"""Adapters of peft that change chosen weights only: LoRA, exact to the entry, or any other kind on whole layers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_type_hints

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from attnbalance.arguments import expects
from attnbalance.errors import DataError, ModelError
from attnbalance.finetuning.parameters import Chosen, FrozenWeights, frozen_in

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

PLACES = (
    "target_modules",
    "target_parameters",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "modules_to_save",
    "trainable_token_indices",
    "bias",
    "task_type",
    "inference_mode",
    "base_model_name_or_path",
    "revision",
    "auto_mapping",
    "layer_replication",
    "alora_invocation_tokens",
)
"""Fields of peft's configurations that say what is adapted, trained or read, or that peft fills in."""

UNUSABLE_TYPES = ("ADALORA", "ADAPTION_PROMPT", "CARTRIDGE", "POLY", "SHADOW", "TRAINABLE_TOKENS", "XLORA")
"""Types of peft that need calls or inputs of their own in training, or change more than weights in linear layers."""

UNUSABLE_STARTS = ("corda", "eva", "loftq", "lora_ga", "olora", "pissa")
"""Beginnings of peft's `init_lora_weights` that are computed from data, or change the base's weights."""

OWN_TRAINING = ("kasa_config", "monteclora_config", "sample_at_inference", "save_only_topk_weights")
"""Fields of peft's configurations that ask for losses, or for a way of saving and reading, of their own."""


@expects(model=nn.Module, chosen=Chosen, rank=int)
def add_lora(model: PreTrainedModel, chosen: Chosen, rank: int, alpha: float | int) -> tuple[PeftModel, FrozenWeights]:
    """The model with new LoRA adapters (Hu et al. 2022) that change the chosen entries of its linear layers only.

    They are ordinary adapters, scaled by `alpha` / `rank`: W + B A. If only some outputs of a layer are chosen, the
    other rows of B stay zero. If only some inputs (heads of o) are chosen, the other columns of A stay zero. Pass the
    returned `FrozenWeights` to the trainer, which keeps them zero. Biases and norms are not trained. `all` stands for
    every linear layer but the output's. Raises `DataError` if no linear layer is chosen, or experts that share one
    tensor; `ModelError` if the chosen entries of a layer are not some rows x some columns.
    """
    from peft import LoraConfig, get_peft_model

    linear = _linear_layers(model, chosen)
    factors = {
        name: _rows_and_columns(mask.T if isinstance(layer, Conv1D) else mask, name)
        for name, layer in linear.items()
        if (mask := chosen.masks[f"{name}.weight"]) is not None
    }
    targets = _targets(chosen, linear)
    settings = LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=alpha,  # pyright: ignore[reportArgumentType]
        target_modules=targets,
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in linear.values()),
    )
    adapted = get_peft_model(model, settings)
    _sort_targets(adapted)  # pyright: ignore[reportArgumentType]
    masks = {}
    for name, (rows, columns) in factors.items():
        lora = f"base_model.model.{name}.lora_{{}}.default.weight"
        if not bool(rows.all()):
            masks[lora.format("B")] = rows[:, None].expand(-1, rank)
        if not bool(columns.all()):
            masks[lora.format("A")] = columns.expand(rank, -1)
            inputs = adapted.get_parameter(lora.format("A")).data
            inputs.masked_fill_(~columns.to(inputs.device), 0)
    return adapted, frozen_in(adapted, masks)  # pyright: ignore[reportReturnType]


def peft_config(fields: Mapping[str, Any]) -> PeftConfig:
    """The configuration of peft that has these fields, "peft_type" among them; the layers are not chosen yet.

    Raises `DataError` for types and fields that peft does not have or refuses, for values of another type than the
    field's, for a scale of 0 and a dropout outside 0 to 1, for types that put tokens before the prompt, for
    `UNUSABLE_TYPES`, `UNUSABLE_STARTS` and `OWN_TRAINING`, and for the fields among `PLACES`.
    """
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    types = {str(kind.value): config for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    kind = str(fields["peft_type"]).upper()
    if kind not in types:
        raise DataError(f"peft has no type {kind!r}; there are {', '.join(sorted(types))}")
    if own := [name for name in PLACES if name in fields]:
        raise DataError(f"leave {own[0]!r} out of `peft`: `train` says which weights adapters change")
    if kind in UNUSABLE_TYPES or "target_modules" not in types[kind].__dataclass_fields__:
        raise DataError(
            f"adapters of type {kind} cannot be trained: they need calls or inputs of their own, or change more than "
            "weights in linear layers"
        )
    if str(fields.get("init_lora_weights", "")).lower().startswith(UNUSABLE_STARTS):
        raise DataError(
            f"init_lora_weights={fields['init_lora_weights']!r} is computed from data, or changes the base's weights; "
            "use True, 'gaussian' or 'orthogonal'"
        )
    if own := [name for name in OWN_TRAINING if fields.get(name) not in (None, False)]:
        raise DataError(f"finetune cannot do what {own[0]!r} asks for: a loss, or a way of saving, of its own")
    _check_values(types[kind], {name: value for name, value in fields.items() if name != "peft_type"})
    try:
        config = types[kind](task_type="CAUSAL_LM", **{name: fields[name] for name in fields if name != "peft_type"})
    except (TypeError, ValueError) as error:
        raise DataError(f"peft refuses {json.dumps(dict(fields))}: {error}") from error
    if config.is_prompt_learning:
        raise DataError(f"adapters of type {kind} put tokens before the prompt; choose one that changes weights")
    return config


def _check_values(kind: type[PeftConfig], fields: Mapping[str, Any]) -> None:
    """Raise `DataError` for switches and numbers of another type than peft's, which would take "no" for true.

    Also for a scale of 0 or less and for a dropout outside 0 to 1, which leave adapters that learn nothing. Fields of
    other types are left to peft.
    """
    hints = get_type_hints(kind)
    for name, value in fields.items():
        hint, number = hints.get(name), isinstance(value, int | float) and not isinstance(value, bool)
        wanted = None
        if name.endswith("alpha"):
            wanted = None if (number and value > 0) or (value is None and hint not in (int, float)) else "a number > 0"
        elif name.endswith("dropout"):
            wanted = None if number and 0 <= value < 1 else "a number from 0 to below 1"
        elif hint is bool:
            wanted = None if isinstance(value, bool) else "true or false"
        elif hint in (int, float):
            wanted = None if number else "a number"
        if wanted is not None:
            raise DataError(f"peft's {name!r} must be {wanted}, got {value!r}")


def add_adapters(model: PreTrainedModel, chosen: Chosen, fields: Mapping[str, Any]) -> PeftModel:
    """The model with new adapters of any type of peft on the chosen linear layers.

    Args:
        model: The model, which peft wraps and changes.
        chosen: Its weights. `all` stands for every linear layer but the output's.
        fields: The fields of the adapters' configuration (see `peft_config`).

    Raises `DataError` as `peft_config` does, for parts of layers (heads of fused projections), which only LoRA can
    train alone, if no linear layer is chosen, and for layers that peft refuses.
    """
    from peft import get_peft_model

    config = peft_config(fields)
    config.target_modules = _targets(chosen, _linear_layers(model, chosen))  # pyright: ignore[reportAttributeAccessIssue]
    if partly := next((name for name, mask in chosen.masks.items() if mask is not None), None):
        raise DataError(
            f"{chosen.text!r} chooses a part of {partly}, and adapters of type {fields['peft_type']} change whole "
            "layers; choose whole parts, or use LoRA (`lora_rank`)"
        )
    try:
        adapted = get_peft_model(model, config)
    except (TypeError, ValueError, AttributeError, NotImplementedError, RuntimeError, ImportError, re.error) as error:
        raise DataError(f"peft refuses {json.dumps(dict(fields))} on {type(model).__name__}: {error}") from error
    _sort_targets(adapted)  # pyright: ignore[reportArgumentType]
    return adapted  # pyright: ignore[reportReturnType]


def _sort_targets(model: PeftModel) -> None:
    """List the adapted layers in order: peft holds a set, and would save it in another order in each process."""
    for config in model.peft_config.values():
        targets: object = getattr(config, "target_modules", None)
        if isinstance(targets, set | list):
            config.target_modules = sorted(targets)  # pyright: ignore[reportAttributeAccessIssue]


def under_adapters(model: PeftModel, chosen: Chosen) -> Chosen:
    """Those of the chosen entries that a model's adapters change: without embeddings, norms, biases and the output."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = {
        f"{name.removeprefix('base_model.model.')}.weight": layer.get_base_layer()
        for name, layer in model.named_modules()
        if isinstance(layer, BaseTunerLayer)
    }
    masks = {name: chosen.masks[name] for name in layers}
    sizes = (
        layers[name].get_parameter("weight").numel() if mask is None else int(mask.sum())
        for name, mask in masks.items()
    )
    return replace(chosen, masks=masks, numbers=sum(sizes))


def _linear_layers(model: PreTrainedModel, chosen: Chosen) -> Mapping[str, nn.Module]:
    """The chosen linear layers by name; raises `DataError` if there are none, or experts that share one tensor."""
    names = [name.removesuffix(".weight") for name in chosen.masks if name.endswith(".weight")]
    linear = {name: layer for name in names if isinstance(layer := model.get_submodule(name), nn.Linear | Conv1D)}
    experts = [name for name in chosen.masks if model.get_parameter(name).dim() > 2]
    if not linear or (experts and chosen.numbers < chosen.total):
        raise DataError(
            f"adapters change the weights of linear layers, and {chosen.text!r} chooses "
            f"{f'others too ({experts[0]})' if linear else 'none'} in {type(model).__name__}; "
            "choose other parts, or train without adapters"
        )
    return linear


def _targets(chosen: Chosen, linear: Mapping[str, nn.Module]) -> list[str] | str:
    """The chosen linear layers as peft names them: for all weights, every layer but the output's."""
    return "all-linear" if chosen.numbers == chosen.total else list(linear)


def _rows_and_columns(mask: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """The outputs and the inputs of a linear layer [d_out, d_in] whose product is a mask."""
    rows, columns = mask.any(1), mask.any(0)
    if not torch.equal(mask, rows[:, None] & columns):
        raise ModelError(
            f"{name}: the chosen entries are not some outputs times some inputs of this layer, and LoRA cannot "
            "train others; choose whole parts, or train without LoRA"
        )
    return rows, columns
