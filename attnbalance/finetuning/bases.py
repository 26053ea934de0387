"""The base model of an objective, identified by every checkpoint, so that a change of base is noticed."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from weakref import WeakKeyDictionary

from torch import nn

from attnbalance.errors import ModelError
from attnbalance.files.outputs import read_json, write_json
from attnbalance.models.fingerprint import same_sums
from attnbalance.models.forward import base_of

FILE = "objective_base.json"
"""The file in a checkpoint that holds the sums of its base's weights."""

BASES: WeakKeyDictionary[nn.Module, dict[str, float]] = WeakKeyDictionary()
"""The sums of a model object's weights when an objective first took it as its base."""


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


def warn_of_trained(model: nn.Module, sums: Mapping[str, float], objective: str, needs_base: bool) -> None:
    """Warn of a model that was trained before, and so is not the base that training began with.

    That is one loaded from a checkpoint, or an object that was given to an earlier trainer with an objective. If the
    objective needs no base, its weights are noted, and nothing is said.
    """
    base = base_of(model)
    folder = Path(str(getattr(base.config, "_name_or_path", "")))
    kept, first = read_json(folder / FILE), BASES.setdefault(base, dict(sums))
    if not needs_base:
        return
    if kept and not same_sums(kept, sums):
        what = f"the model from {folder} as its base, but that is a checkpoint that was finetuned from another model"
    elif not same_sums(first, sums):
        what = (
            f"this {type(base).__name__} object as its base, but that has changed since an earlier trainer took it; "
            "to run the same training again, load the model again"
        )
    else:
        return
    warnings.warn(
        f"objective {objective!r} takes {what}. To resume its training, make the trainer with its base and use "
        "resume_from_checkpoint; to finetune it anew from what it is now, ignore this",
        stacklevel=4,
    )
