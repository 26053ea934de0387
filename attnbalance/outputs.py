"""Output files and folders, written whole or not at all, with what made them."""

from __future__ import annotations

import json
import platform
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

MARKER = "attnbalance.json"
"""The file that says what a folder holds and how it was made: kind, config, versions."""

PACKAGES = ("attnbalance", "torch", "transformers", "peft", "tokenizers", "datasets", "numpy", "scipy")


def write_text(path: Path, text: str) -> None:
    """Write a text file whole: readers see the old content or the new, never a part."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: object) -> None:
    """Write JSON whole; numbers that are not finite are refused, since they are no JSON."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> dict:
    """A JSON object from a file; an empty one where the file is absent or not a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place, file or folder, when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, old = path.with_name(f".{path.name}.tmp"), path.with_name(f".{path.name}.old")
    remove(temporary)  # what a killed run may have left
    remove(old)
    try:
        yield temporary
        if path.is_dir():
            path.rename(old)
            temporary.rename(path)
            remove(old)
        else:
            temporary.replace(path)
    finally:
        remove(temporary)


def remove(path: Path) -> None:
    """Remove a file or a folder with all that it holds; what is not there is as good."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def provenance() -> dict[str, object]:
    """Versions of what computes: Python, the machine's kind, this package and those it stands on."""
    versions = {name: metadata.version(name) for name in PACKAGES}
    return {"python": sys.version.split()[0], "machine": platform.platform(), "versions": versions}
