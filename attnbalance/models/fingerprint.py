"""Fingerprints of a model's weights and files: is this the base of an adapter, and has a folder changed?"""

from __future__ import annotations

import hashlib
import math
import os.path
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from attnbalance.errors import ModelError
from attnbalance.files.outputs import MARKER, read_json
from attnbalance.files.seals import hash_file

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


FILES = (
    "*.safetensors",
    "*.json",
    "*.jinja",
    "*.model",
    "vocab*.txt",
    "merges*.txt",
    "dict*.txt",
    "*.tiktoken",
    "*.py",
    "additional_chat_templates/*.jinja",
)
"""Files of a model's folder that decide what it computes: weights, config, tokenizer, templates, code."""
VOCABULARIES = ("*.txt", "*.vocab", "*.bpe", "*.codes", "*.spm", "*vocab*", "*tokenizer*")
"""Files that a tokenizer with code of its own may read."""


PRECISIONS = ("float64", "float32", "bfloat16", "float16")
"""The dtypes of a fingerprint's checksums, no coarser one before a finer one."""
ADAPTER_STATES = ("active_adapters", "merged_adapters", "disable_adapters", "scaling")
"""What decides, beside their weights, what the adapters of a peft layer do."""
CHUNK = 1 << 22
"""Weights that are summed at a time."""


def fingerprint(model: Module) -> dict[str, str]:
    """Checksums of the base model's parameters in their dtype and the coarser ones; under "dtype" the one they have.

    A checksum is SHA-256 over the names and shapes of the parameters and saved buffers, and two sums of the bits of
    each (64-bit values as two halves), of which the second weights a value by its position. Any edit of a single weight
    changes it; the device does not. Adapter weights are left out and the parts of names that peft adds are removed, so
    that a base has one fingerprint with and without adapters. Takes about 10 s for each 1e9 weights and dtype on a CPU
    core.
    """
    own = _dtype(model)
    finest = min(PRECISIONS.index(own) if own in PRECISIONS else 0, PRECISIONS.index("bfloat16"))
    return {"dtype": own} | {precision: _checksum(model, precision) for precision in PRECISIONS[finest:]}


def has_fingerprint(model: Module, recorded: Mapping[str, str]) -> bool | None:
    """Whether the base model has the weights that a fingerprint was taken from; each may have been loaded in any dtype.

    Weights are compared in the coarser of the two dtypes. None if that cannot be known: bfloat16 and float16 do not
    round alike.
    """
    own, other = _dtype(model), recorded.get("dtype", "")
    if {own, other} == {"bfloat16", "float16"}:
        alike = any(_checksum(model, precision) == recorded.get(precision) for precision in (own, other))
        return True if alike else None
    coarser = max(own, other, key=lambda dtype: PRECISIONS.index(dtype) if dtype in PRECISIONS else -1)
    return coarser in PRECISIONS and _checksum(model, coarser) == recorded.get(coarser)


def _dtype(model: Module) -> str:
    """The dtype of most floating-point parameters of the base."""
    sizes = Counter[str]()
    for _, parameter in base_parameters(model):
        if parameter.is_floating_point():
            sizes[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    return sizes.most_common(1)[0][0] if sizes else ""


def adapters_fingerprint(model: Module) -> str:
    """A checksum of a model's adapters: their weights, which are active, merged or switched off, and their scales."""
    added = adapter_parameters(model)
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    weights = _sums([(name, tensor) for name, tensor in tensors if id(tensor) in added])
    return hashlib.sha256(f"{weights} {adapter_states(model)}".encode()).hexdigest()


def adapter_states(model: Module) -> str:
    """Which adapters a model has, which are active, merged or switched off, and their scales."""
    states = [
        [name, *(getattr(module, state, None) for state in ADAPTER_STATES)]
        for name, module in model.named_modules()
        if hasattr(module, "adapter_layer_names")
    ]
    return str(states)


def _checksum(model: Module, precision: str) -> str:
    return _sums(sorted([*base_parameters(model), *_saved_buffers(model)], key=itemgetter(0)), precision)


def _sums(tensors: Iterable[tuple[str, Tensor]], precision: str | None = None) -> str:
    """SHA-256 over names, shapes and sums of bits, rounded to a precision or as they are."""
    import torch

    digest = hashlib.sha256()
    for name, parameter in tensors:
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        for start, values in enumerate(parameter.detach().flatten().split(CHUNK)):
            rounded = values.to(getattr(torch, precision)) if precision and values.is_floating_point() else values
            # 64 bits as two halves: sums of whole values would lose pairs of signs, at 2^63
            bits = rounded.view({8: torch.int32, 4: torch.int32, 2: torch.int16}.get(rounded.itemsize, torch.uint8))
            whole = bits.to(torch.int64)
            weighted = whole * torch.arange(start * CHUNK + 1, start * CHUNK + 1 + len(whole), device=whole.device)
            digest.update(f" {int(whole.sum())} {int(weighted.sum())}".encode())
    return digest.hexdigest()


def adapter_parameters(model: Module) -> set[int]:
    """The `id` of each parameter and buffer that adapters of any kind have added to a model, also in copied modules."""
    added: set[int] = set()
    for module in model.modules():
        # peft's layers and wrappers name their own parts, and those that layers share (VeRA's projections)
        for name in (*getattr(module, "adapter_layer_names", ()), *getattr(module, "other_param_names", ())):
            part = getattr(module, name, None)
            for kind in ("parameters", "buffers"):
                added |= {id(tensor) for tensor in getattr(part, kind, tuple)()}
    return added


def base_parameters(model: Module) -> list[tuple[str, Tensor]]:
    """The base model's parameters under their names in it, with and without adapters."""
    added = adapter_parameters(model)
    return [(base_name(name), parameter) for name, parameter in model.named_parameters() if id(parameter) not in added]


def base_sums(model: Module) -> dict[str, float]:
    """The sum of each parameter of the base model, adapters left out: any step of training changes it."""
    import torch

    return {name: float(p.detach().sum(dtype=torch.float64)) for name, p in base_parameters(model)}


def quick_sums(model: Module) -> dict[str, int]:
    """A sum of the bits of each parameter, those of adapters included; the base's have their names in it.

    Any step of training changes it. Takes 0.1 to 0.3 s for each 1e9 weights on a CPU core, and no memory. Parameters
    that are no plain tensors in memory are left out.
    """
    import torch

    def bits(parameter: Tensor) -> int:
        flat = parameter.detach().flatten()
        aligned = flat.clone() if flat.storage_offset() * flat.itemsize % 8 else flat
        of_bytes = aligned.view(torch.uint8)
        whole = len(of_bytes) // 8 * 8
        return int(of_bytes[:whole].view(torch.int64).sum()) + int(of_bytes[whole:].sum())

    plain = [(name, p) for name, p in model.named_parameters() if type(p.data) is torch.Tensor and not p.is_meta]
    return {base_name(name): bits(parameter) for name, parameter in plain}


def same_sums(kept: Mapping[str, object], sums: Mapping[str, float]) -> bool:
    """Whether all sums agree; the order of additions on other devices changes the twelfth digit of float64."""
    return kept.keys() == sums.keys() and all(
        isinstance(value := kept[name], float | int) and math.isclose(value, sums[name], rel_tol=1e-9, abs_tol=1e-8)
        for name in sums
    )


def _saved_buffers(model: Module) -> list[tuple[str, Tensor]]:
    """The base model's buffers that a checkpoint holds, such as a router's correction bias."""
    added = adapter_parameters(model)
    return [
        (base_name(f"{path}.{name}" if path else name), buffer)
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set and id(buffer) not in added
    ]


def base_name(name: str) -> str:
    """A tensor's name in the base model, without what peft adds."""
    for part in (".base_layer", ".original_module", ".token_adapter"):
        name = name.replace(part, "")
    return name.removeprefix("base_model.model.")


def files_fingerprint(path: str | Path) -> str | None:
    """SHA-256 of a GGUF file, or over a folder's config, tokenizer, code and weights; for a Hub id, the latest commit.

    None for a Hub id that cannot be reached and is not in the cache. Shows, without loading anything, whether a model
    has changed since something was computed from it. If config or tokenizer name code of their own (`auto_map`), the
    Python files beside that code count, also in another folder; if the tokenizer's is its own, files that look like a
    vocabulary (`VOCABULARIES`) count too. Files are hashed whole: every edit shows, and a copy has the same
    fingerprint.
    """
    folder = Path(path)
    if folder.is_file():
        return hash_file(folder)
    if not folder.is_dir():
        return _hub_commit(str(path))
    named = [file for pattern in FILES for file in folder.glob(pattern)]
    inside, elsewhere = _code_folders(folder)
    named += [*_shards(folder), *(file for source in inside for file in source.glob("*.py"))]
    if any(kind == "AutoTokenizer" for kind, _ in _own_classes(folder)):
        named += [file for pattern in VOCABULARIES for file in folder.glob(pattern)]
    digest = hashlib.sha256()
    for file in sorted({file for file in named if file.is_file() and file.name != MARKER}):
        digest.update(f"{os.path.relpath(file, folder)}\0{hash_file(file)}\0\0".encode())
    for source in elsewhere:
        for file in sorted(source.glob("*.py")):
            digest.update(f"{file}\0{hash_file(file)}\0\0".encode())
    return digest.hexdigest()


def check_unchanged(path: str, files: str | None) -> None:
    """Raise `ModelError` unless a model that was just loaded still has the `files_fingerprint` from before."""
    if files_fingerprint(path) != files:
        raise ModelError(f"the files of model {path} changed while it was loaded; run the command again")


def _own_classes(folder: Path) -> list[tuple[str, str]]:
    """What `auto_map` names in a folder's settings: ("AutoTokenizer", "MODULE.CLASS" or "SOURCE--MODULE.CLASS").

    A tokenizer's may also be a list of two classes, without the word before.
    """
    classes = list[tuple[str, str]]()
    for settings in ("config.json", "tokenizer_config.json"):
        maps = read_json(folder / settings).get("auto_map")
        named = maps if isinstance(maps, dict) else {"AutoTokenizer": maps}
        for kind, value in named.items():
            names = value if isinstance(value, list) else [value]
            classes += [(kind, name) for name in names if isinstance(name, str)]
    return classes


def _code_folders(folder: Path) -> tuple[list[Path], list[Path]]:
    """The folders of the modules that `auto_map` names: those in the model's own folder, and those elsewhere."""
    inside, elsewhere = set[Path](), set[Path]()
    for _, name in _own_classes(folder):
        source, between, of_class = name.rpartition("--")
        module, _, rest = of_class.partition(".")
        root = Path(source) if between else folder
        if rest and "." not in rest and (source or not between) and root.is_dir():
            (elsewhere if between else inside).update({root, (root / module).parent})
    return sorted(inside), sorted(elsewhere)


def _shards(folder: Path) -> list[Path]:
    """The files of weights that a folder's indices or config.json name; they may stand in folders below it."""
    names = [read_json(folder / "config.json").get("transformers_weights")]
    named = [folder / name for name in names if isinstance(name, str)]
    indices = [file for part in {folder, *(file.parent for file in named)} for file in part.glob("*.index.json")]
    maps = [(file.parent, read_json(file).get("weight_map")) for file in indices]
    shards = [
        part / str(name)
        for parent, files in maps
        if isinstance(files, dict)
        for name in files.values()
        for part in (parent, folder)  # transformers looks in the model's folder
    ]
    return [*named, *indices, *shards]


def _hub_commit(repository: str) -> str | None:
    """The commit of a model or adapter on the Hub, or in the cache when offline."""
    files = (hub_file(repository, name) for name in ("config.json", "adapter_config.json"))
    return next((file.parent.name for file in files if file is not None), None)


def hub_file(repository: str, name: str) -> Path | None:
    """A file of a repository on the Hub, or of the cache when offline; None if it is not there."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    with suppress(HfHubHTTPError, HFValidationError, LocalEntryNotFoundError):
        return Path(hf_hub_download(repository, name))
    return None
