"""A fingerprint of a model's weights, to tell whether an adapter stands on the base that it was made for."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


def fingerprint(model: Module) -> str:
    """SHA-256 over the name, shape and up to 64 evenly spaced values of every parameter of the base model, in bfloat16.

    Adapter weights (peft's lora_... parameters) are left out and peft's own parts of names removed, so that a base has
    one fingerprint with and without adapters, on any device, in float32 and in bfloat16. Two checkpoints of one
    training run differ in it, as long as some sampled value changed by more than bfloat16 rounds away.
    """
    import torch

    digest = hashlib.sha256()
    for name, parameter in sorted(_base_parameters(model)):
        flat = parameter.detach().flatten()
        sampled = flat[:: max(1, flat.numel() // 64)][:64].to("cpu", torch.bfloat16)
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(sampled.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def _base_parameters(model: Module) -> list[tuple[str, Tensor]]:
    return [
        (name.removeprefix("base_model.model.").replace(".base_layer", ""), parameter)
        for name, parameter in model.named_parameters()
        if "lora_" not in name
    ]


def files_fingerprint(path: str | Path) -> str | None:
    """SHA-256 over names, sizes and 64 evenly spaced pages of the weight files of a folder; None for a Hub id.

    Tells without loading anything whether a folder still holds the weights that something was computed from.
    """
    folder = Path(path)
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name}{size}".encode())
        with file.open("rb") as stream:
            for page in range(64):
                stream.seek(page * size // 64)
                digest.update(stream.read(4096))
    return digest.hexdigest()
