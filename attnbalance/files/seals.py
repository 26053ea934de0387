"""Hashes of files, and seals: what a folder held when it was complete, so that damage is noticed before use."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from typing import Any

from attnbalance.errors import OutputError
from attnbalance.files.outputs import MARKER, check_saved, read_json, without_hash, write_json

SEAL = "complete"
"""The file that a folder of saved work gets last: the hash of every other file in it."""

OF_WORK = f"../{MARKER}"
"""The name under which a seal holds the hash of the settings of the work that the folder is part of."""

RUN, CHECKPOINT, SCALED, PRETRAINED = "finetune", "finetune checkpoint", "scaled adapter", "pretrain"
"""The kinds of a folder that holds a finished run, one checkpoint of it, an adapter with its change scaled, and a
pretrained model."""

ADAPTER = "adapter_config.json"
BESIDE_MODEL = ("*.jsonl", "objective_base.json", "trajectory.json")
"""Files of a run that are no part of the model: its facts, and what objectives and validation recorded."""

LARGE = 2**26
"""Bytes from which a file's hash is remembered: hashing takes longer than the clock of a file's times ticks."""


def hash_file(path: Path) -> str:
    """SHA-256 of a file's bytes, all of them (about 1 s per GB).

    A process hashes a file of at least `LARGE` bytes again only if its size, its inode, or a time of its last change is
    another (on Linux and macOS the second of these cannot be set by a program).
    """
    status = path.stat()
    if status.st_size < LARGE:
        return _digest(path)
    return _remembered(path.resolve(), status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)


@lru_cache(maxsize=1024)
def _remembered(path: Path, *size_inode_and_times: int) -> str:
    return _digest(path)


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def hash_files(folder: Path, but: Collection[str]) -> dict[str, str]:
    """The hash of each file that lies in a folder itself, by name, without some names."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name not in but)
    return {path.name: hash_file(path) for path in files}


def check_files(folder: Path, but: Sequence[str] = (), remove: Path | None = None) -> None:
    """Raise `OutputError` for files that are gone from a finished folder, or were changed, naming them.

    Names that fit a pattern of `but` are not checked. The folder's attnbalance.json holds the hashes in "files_sha256",
    and its own; folders of older versions have none. `remove` is the folder whose removal makes a rerun write all anew;
    by default this one.
    """
    remove = remove or folder
    record = {"files_sha256": {}} | without_hash(folder / MARKER, read_json(folder / MARKER), remove)
    check_saved(folder / MARKER, record, remove, files_sha256=dict)
    problems = [
        f"{name} was changed" if (folder / name).is_file() else f"{name} is gone"
        for name, hashed in record["files_sha256"].items()
        if not any(fnmatch(name, pattern) for pattern in but)
        and (not (folder / name).is_file() or hash_file(folder / name) != hashed)
    ]
    refuse_changed(folder, problems, remove)


def refuse_changed(folder: Path, problems: Sequence[str], remove: Path) -> None:
    """Raise `OutputError` if there are problems with files of a finished folder ("NAME is gone")."""
    if problems:
        raise OutputError(
            f"{folder} must hold the files as they were written, but {', '.join(problems)}; restore them, or remove "
            f"{remove}, or name a new folder, and run the command again"
        )


def check_model(folder: Path) -> None:
    """Raise `OutputError` for a model folder of ours whose weights, configuration or tokenizer were changed.

    It is a run, a checkpoint, a scaled adapter or a pretrained model; other folders pass, unless their record is empty.
    The facts of a run, its other records, a model card and the base that an adapter names may change. An adapter's
    tokenizer may be gone: that of its base is used.
    """
    record = read_json(folder / MARKER)
    if not record and (folder / MARKER).is_file():
        refuse_changed(folder, [f"{MARKER} holds no record"], folder)
    if record.get("kind") not in (RUN, CHECKPOINT, SCALED, PRETRAINED):
        return
    run = folder.parent.parent if record["kind"] == CHECKPOINT else folder
    check_files(folder, (*BESIDE_MODEL, *_unneeded(folder, record)), run if _is_run(run) else folder)


def _is_run(folder: Path) -> bool:
    return read_json(folder / MARKER).get("kind") == RUN


def _unneeded(folder: Path, record: Mapping[str, Any]) -> list[str]:
    """Recorded files of an adapter that may differ: a tokenizer that is gone, and a config with another base alone."""
    path, hashes = folder / ADAPTER, record.get("files_sha256")
    if not path.is_file() or not isinstance(hashes, dict):
        return []
    unneeded = [name for name in hashes if not (folder / name).is_file() and not name.endswith(".safetensors")]
    base = json.dumps(read_json(path).get("base_model_name_or_path"))
    as_written = path.read_text(encoding="utf-8").replace(base, json.dumps(record.get("base")))
    if hashlib.sha256(as_written.encode()).hexdigest() == hashes.get(ADAPTER):
        unneeded.append(ADAPTER)
    return unneeded


def seal(folder: Path) -> None:
    """Mark a folder complete, with all that it holds, and as part of the work whose attnbalance.json lies beside it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SEAL)
    hashes = {path.relative_to(folder).as_posix(): hash_file(path) for path in files}
    work = folder.parent / MARKER
    write_json(folder / SEAL, hashes | ({OF_WORK: hash_file(work)} if work.is_file() else {}))


def damage(folder: Path, spent: tuple[str, ...] = ()) -> str | None:
    """What is wrong with a sealed folder, in words; None if nothing is.

    Files in folders, or with names, that match a pattern of `spent` may be missing.
    """
    sealed = read_json(folder / SEAL)
    if not sealed:
        return f"{folder / SEAL} cannot be read"
    work = folder.parent / MARKER
    if OF_WORK in sealed and not (work.is_file() and hash_file(work) == sealed.pop(OF_WORK)):
        return f"{folder} is part of other work"
    for name, hashed in sealed.items():
        path = folder / name
        if not path.is_file():
            if not any(fnmatch(Path(name).parts[0], pattern) for pattern in spent):
                return f"{path} is missing"
        elif hash_file(path) != hashed:
            return f"{path} is damaged"
    return None
