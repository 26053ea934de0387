"""Fingerprints of a model's weights and files: is this the base of an adapter, and has a folder changed?"""

from __future__ import annotations

import base64
import hashlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from attnbalance.files import seals
from attnbalance.files.outputs import MARKER

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py", "*/*.jinja")
"""Files of a model's folder that decide what it computes: weights, config, tokenizer, templates, code."""


def fingerprint(model: Module) -> str:
    """SHA-256 over the names and shapes of the base model's parameters, and up to 16 evenly spaced values of each.

    "HASH:VALUES", the values as bfloat16 in base64, for `same_weights` to compare: values rounded by another dtype
    cannot be compared by hash. Adapter weights are left out and the parts of names that peft adds are removed, so that
    a base has one fingerprint with and without adapters, on any device.
    """
    import torch

    digest, sampled = hashlib.sha256(), []
    for name, parameter in sorted(base_parameters(model)):
        flat = parameter.detach().flatten()
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        sampled.append(flat[:: max(1, flat.numel() // 16)][:16].to("cpu", torch.bfloat16))
    values = torch.cat(sampled).view(torch.int16).numpy().tobytes()
    return f"{digest.hexdigest()}:{base64.b64encode(values).decode()}"


def same_weights(first: str, second: str) -> bool:
    """Whether two fingerprints are of the same weights, each loaded in any dtype.

    A value rounded to float16 first may round to the next bfloat16, up to 2^-7 of it away; float16 rounds its smallest
    numbers by up to 2^-25. A single value that differs by more makes the weights different.
    """
    import torch

    (names, _, values), (other_names, _, other_values) = first.partition(":"), second.partition(":")
    if names != other_names:
        return False
    samples = [
        torch.frombuffer(bytearray(base64.b64decode(encoded)), dtype=torch.bfloat16).float()
        for encoded in (values, other_values)
    ]
    return torch.allclose(*samples, rtol=2**-7, atol=2**-24)


def adapter_parameters(model: Module) -> set[int]:
    """The `id` of each parameter that adapters of any kind have added to a model, copies of whole modules included."""
    added: set[int] = set()
    for module in model.modules():
        for name in getattr(module, "adapter_layer_names", ()):  # peft's layers and wrappers have it
            part = getattr(module, name, None)
            added |= {id(parameter) for parameter in getattr(part, "parameters", tuple)()}
    return added


def base_parameters(model: Module) -> list[tuple[str, Tensor]]:
    """The base model's parameters under their names in it, with and without adapters."""
    added = adapter_parameters(model)
    return [
        (name.removeprefix("base_model.model.").replace(".base_layer", "").replace(".original_module", ""), parameter)
        for name, parameter in model.named_parameters()
        if id(parameter) not in added
    ]


def files_fingerprint(path: str | Path) -> str | None:
    """SHA-256 over a folder's config, tokenizer, code and weight files; for a Hub id, the commit that would be loaded.

    None for a Hub id that cannot be reached and is not in the cache. Shows, without loading anything, whether a model
    has changed since something was computed from it. Files of at most `seals.WHOLE` bytes are hashed whole, so that
    every edit shows and a copy has the same fingerprint. Of larger files, sampled pages (see `hash_file`) and the time
    of the last change count: a copy has the same fingerprint only if it keeps the time.
    """
    folder = Path(path)
    if not folder.is_dir():
        return _hub_commit(str(path))
    files = sorted(file for pattern in FILES for file in folder.glob(pattern) if file.is_file() and file.name != MARKER)
    digest = hashlib.sha256()
    for file in files:
        status = file.stat()
        changed = status.st_mtime_ns if status.st_size > seals.WHOLE else ""
        digest.update(f"{file.relative_to(folder)}\0{seals.hash_file(file)}\0{changed}\0".encode())
    return digest.hexdigest()


def _hub_commit(repository: str) -> str | None:
    """The commit of a model or adapter on the Hub, or in the cache when offline."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    for name in ("config.json", "adapter_config.json"):
        with suppress(HfHubHTTPError, HFValidationError, LocalEntryNotFoundError):
            return Path(hf_hub_download(repository, name)).parent.name
    return None
