"""What a run keeps of one model in its work folder: a JSON object and tensors, under the key of what they depend on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnbalance.files.outputs import read_json, replacing, set_aside, write_json
from attnbalance.files.seals import SEAL, damage, seal

if TYPE_CHECKING:
    from torch import Tensor

ABOUT, TENSORS = "about.json", "tensors.safetensors"


def keep(folder: Path, key: str, about: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
    """Write both into a new folder, whole or not at all. One that holds other files is set aside with a warning."""
    from safetensors.torch import save_file

    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if others := [name for name in names if name not in (TENSORS, ABOUT, SEAL)]:
        set_aside([folder], f"{folder} holds files of someone else ({others[0]})")
    with replacing(folder) as temporary:
        temporary.mkdir()
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary / TENSORS)
        write_json(temporary / ABOUT, {**about, "key": key})
        seal(temporary)


def kept(folder: Path, key: str) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """What was kept under this key, or None. A damaged folder is set aside with a warning."""
    from safetensors.torch import load

    if not folder.is_dir():
        return None
    if reason := damage(folder):
        set_aside([folder], reason)
        return None
    about = read_json(folder / ABOUT)
    if about.get("key") != key:
        return None
    return about, load((folder / TENSORS).read_bytes())  # not mapped: the file may change while they are used
