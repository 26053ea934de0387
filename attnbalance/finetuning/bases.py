"""The base model of an objective, identified by every checkpoint, so that a change of base is noticed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from attnbalance.errors import ModelError
from attnbalance.files.outputs import read_json, write_json
from attnbalance.models.fingerprint import base_parameters
from attnbalance.models.forward import base_of

FILE = "objective_base.json"
"""The file in a checkpoint that holds the sums of its base's weights."""


def base_sums(model: nn.Module) -> dict[str, float]:
    """The sum of each parameter of the base model, adapters left out: any step of training changes it."""
    return {name: float(p.detach().sum(dtype=torch.float64)) for name, p in base_parameters(model)}


def keep_base(folder: Path, sums: Mapping[str, float]) -> None:
    """Write the base's sums into a checkpoint."""
    write_json(folder / FILE, dict(sums))


def check_resumed(checkpoint: Path, sums: Mapping[str, float]) -> None:
    """Raise `ModelError` for a checkpoint whose objective had another base; warn if it does not say."""
    kept = read_json(checkpoint / FILE)
    if not kept:
        warnings.warn(f"{checkpoint} does not say which base model its objective had", stacklevel=3)
    elif not same_sums(kept, sums):
        raise ModelError(
            f"training would resume from {checkpoint} with another base model than it began with (or the same in "
            "another dtype): make the trainer with that base model, not with the checkpoint, whose weights "
            "resume_from_checkpoint loads"
        )


def warn_of_checkpoint(model: nn.Module, sums: Mapping[str, float], objective: str) -> None:
    """Warn if a model was loaded from a checkpoint, and so is not the base that training began with."""
    folder = Path(str(getattr(base_of(model).config, "_name_or_path", "")))
    kept = read_json(folder / FILE)
    if kept and not same_sums(kept, sums):
        warnings.warn(
            f"objective {objective!r} takes the model from {folder} as its base, but that is a checkpoint that was "
            "finetuned from another model. To resume its training, make the trainer with its base and use "
            "resume_from_checkpoint; to finetune the checkpoint anew, ignore this",
            stacklevel=4,
        )


def same_sums(kept: Mapping[str, object], sums: Mapping[str, float]) -> bool:
    """Whether all sums agree; the order of additions on other devices changes the twelfth digit of float64."""
    return kept.keys() == sums.keys() and all(
        isinstance(value := kept[name], float | int) and math.isclose(value, sums[name], rel_tol=1e-9, abs_tol=1e-8)
        for name in sums
    )
