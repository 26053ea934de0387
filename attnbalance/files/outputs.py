"""Output files and folders: written whole or not at all, with a record of how; the user's files are never removed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from attnbalance.arguments import Kind, fits, words_of
from attnbalance.errors import OutputError

MARKER = "attnbalance.json"
"""The file that says what a folder holds and how it was made: kind, config, versions."""

HASH = "sha256"
"""The name under which a saved JSON object holds the hash of all else in it."""

TEMPORARY = ".attnbalance-"
"""The beginning of the names of temporary folders; the rest is random, so that no two processes share one."""

DEEPEST = 200
"""Folders above an output folder, at most."""

PACKAGES = ("attnbalance", "torch", "transformers", "peft", "tokenizers", "datasets", "numpy", "scipy")


def write_text(path: Path, text: str) -> None:
    """Write a text file whole: readers see the old content or the new, never part of it."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: object) -> None:
    """Write JSON whole; raises `OutputError` for NaN and infinity, which JSON does not have."""
    write_text(path, _as_json(path, value, indent=1))


def write_json_lines(path: Path, values: Iterable[object]) -> None:
    """Write each value as one line of JSON, the file whole; raises `OutputError` for NaN and infinity."""
    write_text(path, "".join(_as_json(path, value) for value in values))


def read_json(path: Path) -> dict:
    """A JSON object from a file; an empty one if the file is absent or not a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def check_saved(path: Path, saved: Mapping[str, Any], remove: Path, /, **kinds: Kind) -> None:
    """Raise `OutputError` for a file of ours that lacks a name of `kinds`, or has a value of another kind there.

    path: the file.
    saved: the JSON object in it, or one in that.
    remove: the file or folder whose removal makes a rerun write it anew.
    kinds: what must be there (see `arguments.expects`).
    """
    for name, kind in kinds.items():
        if name not in saved or not fits(saved[name], kind):
            got = f"{saved[name]!r:.100}" if name in saved else "none"
            raise OutputError(
                f"{path} was changed: {name!r} must be {words_of(kind)}, got {got}; restore the file, or remove "
                f"{remove} and run the command again"
            )


@contextmanager
def replacing(path: Path, within: Path | None = None) -> Iterator[Path]:
    """A temporary path that replaces `path`, file or folder, when the block ends without an error.

    It lies in a new folder inside `within`, a folder on the same disk: by default the one that `path` is in. A link
    stays one: what it points to is replaced. Raises `OutputError` if something cannot be written.
    """
    with writing(path):
        path = as_folder(path) if path.is_symlink() else path
        within = within or path.parent
        within.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=within))
        temporary = folder / "new"
        try:
            yield temporary
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir() and any(path.iterdir()):
                path.rename(folder / "old")
            temporary.replace(path)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what libraries raise when a file in or at `path` cannot be written into an `OutputError`."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise OutputError(f"cannot write {path}: {error}{_remedy(error)}") from error


def remove(path: Path) -> None:
    """Remove a file, a link (never what it points to) or a folder with all that it holds; a missing path is ignored.

    A folder's marker goes after its other files: what a kill leaves is still known as ours.
    """
    if path.is_dir() and not path.is_symlink():
        for part in path.iterdir():
            if part.name != MARKER:
                remove(part)
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def set_aside(paths: Sequence[Path], why: str) -> None:
    """Rename damaged files or folders to "damaged-..." in their own folder, with one warning."""
    moved = []
    for path in paths:
        names = (f"damaged-{path.name}{number}" for number in ("", *(f"-{i}" for i in range(2, 10_000))))
        target = next(path.with_name(name) for name in names if not os.path.lexists(path.with_name(name)))
        with writing(target):
            path.rename(target)
        moved.append(target)
    names = ", ".join(target.name for target in moved)
    warnings.warn(f"{why}; set aside as {names} in {paths[0].parent}, and made again", stacklevel=3)


def write_saved(path: Path, value: Mapping[str, object]) -> None:
    """Write JSON whole, for `read_saved` and `without_hash`: with a hash of the value, by which a change is noticed."""
    write_json(path, {**value, HASH: _digest(value)})


def read_saved(path: Path) -> dict:
    """A JSON object that an earlier run saved (see `write_saved`), without its hash.

    A file that cannot be read is set aside, and the object is empty. Raises `OutputError` for a file that was changed.
    """
    saved = read_json(path)
    if not saved and os.path.lexists(path):
        set_aside([path], f"{path} cannot be read")
    return without_hash(path, saved, path)


def without_hash(path: Path, saved: Mapping[str, Any], remove: Path) -> dict:
    """A JSON object of `write_saved` without its hash; raises `OutputError` if the object was changed since.

    path: the file.
    saved: the object in it.
    remove: the file or folder whose removal makes a rerun write it anew.
    """
    content = {name: value for name, value in saved.items() if name != HASH}
    hashed, actual = saved.get(HASH), _digest(content)
    if hashed not in (None, actual):  # none in files of older versions
        raise OutputError(
            f"{path} was changed: its content must have SHA-256 {hashed}, got {actual}; restore the file, or remove "
            f"{remove} and run the command again"
        )
    return content


def _digest(value: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def as_folder(out: str | Path) -> Path:
    """The absolute path of an output folder, with "~" and links followed.

    Raises `OutputError` for an empty text, endless links and an unknown user's "~".
    """
    if not str(out).strip():
        raise OutputError(f"`out` must name a folder, got {str(out)!r}")
    try:
        folder = Path(out).expanduser().resolve()
    except (OSError, RuntimeError, ValueError, TypeError) as error:  # a loop of links, or a user who is not known
        raise OutputError(f"cannot follow output {out}: {error}; name another folder") from error
    if len(folder.parts) > DEEPEST:  # Python makes parents by recursion
        raise OutputError(f"output must be at most {DEEPEST} folders deep, got {len(folder.parts)}")
    return folder


def provenance() -> dict[str, object]:
    """Versions of what computes: Python, the machine's kind, this package and those that it depends on."""
    versions = {name: metadata.version(name) for name in PACKAGES}
    return {"python": sys.version.split()[0], "machine": platform.platform(), "versions": versions}


def _as_json(path: Path, value: object, indent: int | None = None) -> str:
    """JSON with a line end, for the file `path`."""
    try:
        return json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False) + "\n"
    except ValueError as error:
        raise OutputError(f"cannot write {path}: expected finite numbers, got NaN or infinity ({error})") from error


def _remedy(error: Exception) -> str:
    """What to do about a full disk, a quota or a limit of file sizes; empty for another error."""
    full = {number: os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)}
    if getattr(error, "errno", None) not in full and not any(text in str(error) for text in full.values()):
        return ""
    return "; make room and run the same command again to go on"
