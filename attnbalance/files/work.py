"""Work on an output folder: done by one process at a time, kept when the process is killed, never another's."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

from attnbalance.errors import OutputError
from attnbalance.files.outputs import (
    MARKER,
    TEMPORARY,
    check_saved,
    provenance,
    read_json,
    remove,
    replacing,
    set_aside,
    write_json,
    writing,
)

LOCK, HOLDER = ".attnbalance.lock", ".attnbalance.lock.json"
"""The file that is locked while a process works in a folder, and the file that names the process."""

CONTENTS = {
    "facts_sha256": "the facts differ (other contents, limit, relations or seed)",
    "files": "the models' files differ",
    "instructions_sha256": "the instructions differ (another file, or only those with an input)",
    "model_files": "the model's files differ",
}
"""What to say if one of these hashes differs."""

ABSENT = object()
"""Stands for a setting that one of two folders lacks."""

GONE = "another process has just ended its work on {folder}, and removed it; run the same command again"
"""Of two processes that began together, the first one has removed the folder."""

UNFINISHED = "unfinished "
"""The beginning of the kind of a folder of unfinished work."""


class LockedError(OutputError):
    """Another process is at work in a folder, or was so a moment ago."""


def is_finished(out: Path, kind: str, config: Mapping[str, object]) -> bool:
    """Whether `out` holds finished work of this kind and config; False if it is absent or empty.

    Raises `OutputError` if it holds something else, naming the settings that differ.
    """
    if out.exists() and not out.is_dir():
        raise OutputError(f"output {out} is a file; name a folder")
    held = _held(out)
    if not held:
        return False
    marker = read_json(out / MARKER)
    if marker.get("kind") != kind:
        holds = f"the result of `{marker['kind']}`" if "kind" in marker else f"other things ({_first_names(held)})"
        raise OutputError(f"output {out} holds {holds}; name a new or empty folder")
    check_saved(out / MARKER, marker, out, config=dict)
    differing = _differing(marker["config"], _as_json(config))
    if differing:
        raise OutputError(
            f"output {out} holds the result of `{kind}` with other settings: {differing}. Name a new folder, or remove "
            "that one"
        )
    return True


@contextmanager
def working(out: Path, kind: str, config: Mapping[str, object]) -> Iterator[Path]:
    """The hidden folder next to `out` that holds unfinished work, locked by this process while the block runs.

    It is removed when the block ends, unless an error left something in it that a rerun can continue from. Raises
    `OutputError` if another process is at work, if there is unfinished work with another config, if the folder is not
    ours or cannot be written, and for an `out` that cannot be moved into place at the end: the current folder, or a
    mount point.
    """
    if out == Path.cwd() or out.is_mount():
        what = "a mount point" if out.is_mount() else "the current folder"
        raise OutputError(f"output {out} is {what}; name a folder in it")
    work, marker = work_of(out), {"kind": f"{UNFINISHED}{kind}", "config": _as_json(config)}
    _open(work)
    with locked(work):
        try:
            _begin(work, marker)
            if is_finished(out, kind, config):
                raise OutputError(f"another process has just finished {out}; run the same command again for its answer")
            yield work
        except BaseException:
            if not _done(work):
                with writing(work):
                    remove(work)
            elif work.is_dir() and not (work / MARKER).exists():  # removed while the block ran
                write_json(work / MARKER, marker)
            raise
        with writing(work):
            remove(work)


@contextmanager
def finishing(out: Path, kind: str, config: Mapping[str, object], work: Path) -> Iterator[Path]:
    """A new folder inside `work` that becomes `out` when the block ends without an error.

    Raises `OutputError` if someone has put other things into `out` since the work began; they are left there.
    """
    with replacing(out, work) as folder:
        folder.mkdir()
        yield folder
        try:
            is_finished(out, kind, config)
        except OutputError as error:
            raise OutputError(
                f"{error}. It came there while this command ran: move it away and run the same command again"
            ) from None


@contextmanager
def in_place(out: Path, kind: str, config: Mapping[str, object]) -> Iterator[None]:
    """Marks `out` with this kind and config, for work done in `out` itself, and checks the mark at the end.

    Several processes may work in it at a time (see `locked`). Raises `OutputError` if `out` holds something else,
    cannot be written, or was removed before the block's end; a rerun continues from what was made since then.
    """
    marker = {"kind": kind, "config": dict(config)} | provenance()
    if not is_finished(out, kind, config):
        write_json(out / MARKER, marker)
    try:
        yield
    finally:
        if read_json(out / MARKER).get("kind") != kind:
            if out.is_dir():
                write_json(out / MARKER, marker)
            raise OutputError(f"{out} was removed or changed while it was written; run the same command again")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lets one process at a time work in `folder`; raises `LockedError` in another one, naming the process at work.

    The system frees the lock of a process that ends in any way. If the folder was removed in the block and made anew by
    another process, its lock is left alone.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(folder / LOCK, timeout=0.5)  # `is_locked` holds it for a moment
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout:
            holder = read_json(folder / HOLDER)
            who = f"process {holder.get('process')} on {holder.get('host')}" if holder else "another process"
            raise LockedError(f"{who} is at work on {folder}; wait until it ends, or choose another `out`") from None
        except FileNotFoundError:
            raise LockedError(GONE.format(folder=folder)) from None
    try:
        try:
            own = (folder / LOCK).stat()  # no other file gets its inode before the lock is released
        except FileNotFoundError:
            raise LockedError(GONE.format(folder=folder)) from None
        try:
            write_json(folder / HOLDER, {"process": os.getpid(), "host": socket.gethostname()})
            yield
        finally:
            with writing(folder), suppress(FileNotFoundError):
                if os.path.samestat(own, (folder / LOCK).stat()):
                    remove(folder / HOLDER)
                    remove(folder / LOCK)
    finally:
        lock.release()


def is_locked(folder: Path) -> bool:
    """Whether a process works in a folder (see `locked`)."""
    from filelock import FileLock, Timeout

    if not (folder / LOCK).is_file():
        return False
    try:
        with FileLock(folder / LOCK, timeout=0):
            return False
    except (Timeout, OSError):  # the lock file may be another user's
        return True


def close_work(out: Path) -> None:
    """Remove the work folder of a finished `out` that was left by a process killed at the very end."""
    work = work_of(out)
    if _is_ours(work):
        with suppress(OutputError), locked(work), writing(work):
            remove(work)


def work_of(out: Path) -> Path:
    """The hidden folder next to `out` that holds its unfinished work."""
    return out.with_name(f".{out.name}.partial")


def _is_ours(work: Path) -> bool:
    """Whether a folder holds unfinished work of this package: it is empty, or marked so."""
    if work.is_symlink() or not work.is_dir():
        return False
    return not _held(work) or str(read_json(work / MARKER).get("kind")).startswith(UNFINISHED)


def _open(work: Path) -> None:
    """Make the work folder; raises `OutputError` if something else has its name, and leaves that as it is."""
    if os.path.lexists(work) and not _is_ours(work):
        if work.is_symlink() or not (work / MARKER).is_file() or read_json(work / MARKER):
            raise OutputError(f"{work} is in the way: it is not unfinished work. Move it, or choose another `out`")
        set_aside([work], f"{work / MARKER} cannot be read")
    with writing(work):
        work.mkdir(parents=True, exist_ok=True)


def _begin(work: Path, marker: Mapping[str, Any]) -> None:
    """Mark an empty work folder; raises `OutputError` for one that holds work with other settings."""
    earlier = read_json(work / MARKER)
    for leftover in work.glob(f"{TEMPORARY}*"):  # of a killed process
        remove(leftover)
    if earlier == marker:
        return
    if _done(work):
        check_saved(work / MARKER, earlier, work, config=dict)
        other = _differing(earlier["config"], marker["config"]) or f"it is an {earlier.get('kind')}"
        raise OutputError(
            f"{work} holds unfinished work with other settings: {other}. Continue with those, remove that folder, or "
            "choose another `out`"
        )
    write_json(work / MARKER, marker)


def _done(work: Path) -> bool:
    """Whether a work folder holds anything that a rerun can continue from."""
    return any(name != MARKER for name in _held(work))


def _held(folder: Path) -> list[str]:
    """The names in a folder (none if it is absent), without what a killed process leaves of a lock or a first file."""
    if not folder.is_dir():
        return []
    return [path.name for path in folder.iterdir() if path.name not in (LOCK, HOLDER) and not _is_leftover(path)]


def _is_leftover(path: Path) -> bool:
    """Whether this is what a process killed in `replacing` leaves of one file."""
    if not re.fullmatch(re.escape(TEMPORARY) + r"\w{8}", path.name) or path.is_symlink():
        return False
    try:
        return all(i.name == "new" and (i.is_file() or not os.path.lexists(i)) for i in path.iterdir())
    except (FileNotFoundError, NotADirectoryError):  # another process has just removed it, or it is a file
        return not os.path.lexists(path)


def _as_json(config: Mapping[str, object]) -> dict[str, object]:
    return json.loads(json.dumps(dict(config)))


def _differing(there: Mapping[str, object], here: Mapping[str, object]) -> str:
    """The first settings that differ, in words; empty if none does."""
    differing = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    contents = [CONTENTS[name] for name in differing if name in CONTENTS]
    differing = [name for name in differing if name not in CONTENTS]
    return "; ".join(
        contents + [_first_difference(name, there.get(name, ABSENT), here.get(name, ABSENT)) for name in differing[:5]]
    )


def _first_difference(name: str, there: object, here: object) -> str:
    """The first value that differs between two settings, whatever they are nested in: "models[1].model is ..."."""
    if isinstance(there, dict) and isinstance(here, dict):
        keys = {f"{name}.{key}": key for key in {**there, **here}}
        parts = [(part, there.get(key, ABSENT), here.get(key, ABSENT)) for part, key in keys.items()]
    elif isinstance(there, list) and isinstance(here, list):
        pairs = enumerate(zip_longest(there, here, fillvalue=ABSENT))
        parts = [(f"{name}[{index}]", before, now) for index, (before, now) in pairs]
    else:
        before, now = _brief("absent" if there is ABSENT else repr(there), "absent" if here is ABSENT else repr(here))
        return f"{name} is {before} there, {now} here"
    return next(_first_difference(*part) for part in parts if part[1] != part[2])


def _brief(*texts: str) -> list[str]:
    """Long texts shortened to 60 characters around the first one that differs."""
    alike = next((i for i, characters in enumerate(zip(*texts, strict=False)) if len(set(characters)) > 1), 0)
    start = max(0, alike - 20) if max(map(len, texts)) > 60 else 0
    return [f"{'...' * (start > 0)}{text[start : start + 60]}{'...' * (len(text) > start + 60)}" for text in texts]


def _first_names(names: list[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
