"""A fingerprint of a model's weights, to tell whether an adapter stands on the base that it was made for."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from attnbalance.outputs import MARKER

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


TEXT_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
"""Config and tokenizer files of a model's folder."""


def fingerprint(model: Module) -> str:
    """SHA-256 over the names and shapes of the base model's parameters, and up to 16 evenly spaced values of each.

    "HASH:VALUES", the values as bfloat16 in base64, to be compared by `same_weights`, since what another dtype has
    rounded cannot be compared by hash. Adapter weights (peft's lora_... parameters) are left out and peft's own parts
    of names removed, so that a base has one fingerprint with and without adapters, on any device.
    """
    import torch

    digest, sampled = hashlib.sha256(), []
    for name, parameter in sorted(_base_parameters(model)):
        flat = parameter.detach().flatten()
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        sampled.append(flat[:: max(1, flat.numel() // 16)][:16].to("cpu", torch.bfloat16))
    values = torch.cat(sampled).view(torch.int16).numpy().tobytes()
    return f"{digest.hexdigest()}:{base64.b64encode(values).decode()}"


def same_weights(one: str, other: str) -> bool:
    """Whether two fingerprints are of the same weights, each loaded in any dtype.

    A value rounded to float16 first may round to the next bfloat16, up to 2^-7 of it away; float16 rounds its smallest
    numbers by up to 2^-25. One value that differs by more is enough, as between two checkpoints of one training run.
    """
    import torch

    (names, _, values), (other_names, _, other_values) = one.partition(":"), other.partition(":")
    if names != other_names:
        return False
    first, second = (
        torch.frombuffer(bytearray(base64.b64decode(each)), dtype=torch.bfloat16).float()
        for each in (values, other_values)
    )
    return torch.allclose(first, second, rtol=2**-7, atol=2**-24)


def _base_parameters(model: Module) -> list[tuple[str, Tensor]]:
    return [
        (name.removeprefix("base_model.model.").replace(".base_layer", ""), parameter)
        for name, parameter in model.named_parameters()
        if "lora_" not in name
    ]


def files_fingerprint(path: str | Path) -> str | None:
    """SHA-256 of a folder's config and tokenizer files, and of samples of its weight files; None for a Hub id.

    Tells without loading anything whether a folder has changed since something was computed from it. Of each weight
    file the name, the size and 64 evenly spaced pages of 4 KiB count, so that a large file changed in few places only
    may pass; training changes all.
    """
    folder = Path(path)
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    for file in sorted(path for pattern in TEXT_FILES for path in folder.glob(pattern)):
        if file.name != MARKER:
            digest.update(file.name.encode() + file.read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name}{size}".encode())
        with file.open("rb") as stream:
            for page in range(64):
                stream.seek(page * size // 64)
                digest.update(stream.read(4096))
    return digest.hexdigest()
