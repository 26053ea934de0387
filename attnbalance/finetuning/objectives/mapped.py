"""Numbers of many examples in files that are mapped into memory: the system holds what fits, and reads the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile, gettempdir

import torch
from jaxtyping import Shaped
from torch import Tensor

from attnbalance.files.outputs import writing

IN_MEMORY = 2**29
"""Bytes of numbers that are collected in memory before they go into a file."""

ALIGNMENT = 16
"""Numbers begin at multiples of this many bytes: no dtype is larger."""

Numbers = Mapping[str, Shaped[Tensor, "..."]]
"""Tensors on the CPU by name."""


def collected(numbers: Iterable[tuple[int, Numbers]], folder: str | Path | None = None) -> dict[int, Numbers]:
    """Numbers by the index that comes with them; all but the last `IN_MEMORY` bytes are in files, not in memory.

    The files are in `folder`, by default the system's for temporary files, and have no name any more: they are gone
    when nothing refers to their tensors, also if the process is killed. Raises `OutputError` for a full disk, or a
    folder that cannot be written to.
    """
    kept, waiting, size = dict[int, Numbers](), dict[int, Numbers](), 0
    for index, tensors in numbers:
        waiting[index] = tensors
        size += sum(tensor.nbytes for tensor in tensors.values())
        if size > IN_MEMORY:
            kept |= _in_file(waiting, folder)
            waiting, size = {}, 0
    return kept | waiting


def _in_file(numbers: Mapping[int, Numbers], folder: str | Path | None) -> dict[int, Numbers]:
    """The same numbers in a new file that is mapped into memory."""
    place = Path(folder or gettempdir())
    starts = dict[tuple[int, str], int]()
    with writing(place):
        place.mkdir(parents=True, exist_ok=True)
    with writing(place), NamedTemporaryFile(dir=place, prefix=".base-") as file:
        for index, tensors in numbers.items():
            for name, tensor in tensors.items():
                file.write(bytes(-file.tell() % ALIGNMENT))
                starts[index, name] = file.tell()
                file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        file.flush()
        whole = torch.from_file(file.name, shared=False, size=file.tell(), dtype=torch.uint8)

    def read(index: int, name: str, like: Tensor) -> Tensor:
        start = starts[index, name]
        return whole[start : start + like.nbytes].view(like.dtype).reshape(like.shape)

    return {
        index: {name: read(index, name, tensor) for name, tensor in tensors.items()}
        for index, tensors in numbers.items()
    }
