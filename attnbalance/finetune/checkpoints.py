"""Work that can be killed at any moment: a hidden folder, checkpoints marked when complete, one move at the end."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from attnbalance.errors import OutputError
from attnbalance.outputs import MARKER, read_json, write_json, write_text

COMPLETE = "complete"
"""The file that a checkpoint of unfinished work gets last of all."""

NOT_FOR_USERS = (
    COMPLETE,
    "trainer_state.json",
    "optimizer*",
    "*.pt",
    "*.pth",
    "*.bin",
    "*.distcp",
    "pytorch_model_fsdp*",
)
"""What only resuming needs; none of it goes into a finished folder, which so holds no pickles."""


def is_finished(out: Path, kind: str, config: Mapping[str, object]) -> bool:
    """True where `out` holds finished work of this kind and config; False where there is nothing yet.

    Raises `OutputError` where it holds something else, naming the settings that differ.
    """
    if out.exists() and not out.is_dir():
        raise OutputError(f"output {out} is a file; name a folder")
    if not out.is_dir() or not any(out.iterdir()):
        return False
    marker = read_json(out / MARKER)
    if marker.get("kind") != kind:
        held = f"the result of `{marker['kind']}`" if "kind" in marker else f"other things ({_some(out)})"
        raise OutputError(f"output {out} holds {held}; name a new or empty folder")
    found, wanted = dict(marker.get("config", {})), _as_json(config)
    differing = [name for name in {**found, **wanted} if found.get(name) != wanted.get(name)]
    if differing:
        shown = "; ".join(f"{name} is {found.get(name)!r} there, {wanted.get(name)!r} here" for name in differing[:5])
        raise OutputError(
            f"output {out} holds a {kind} with other settings: {shown}. Name a new folder, or remove that one"
        )
    return True


def open_work(out: Path, kind: str, config: Mapping[str, object]) -> Path:
    """The hidden folder beside `out` in which unfinished work stands, cleared of incomplete checkpoints.

    Work that was begun with another config is thrown away. Raises `OutputError` where nothing can be written.
    """
    work = _work(out)
    begun = {"kind": f"unfinished {kind}", "config": _as_json(config)}
    try:
        if work.exists() and read_json(work / MARKER) != begun:
            shutil.rmtree(work)
        work.mkdir(parents=True, exist_ok=True)
        write_json(work / MARKER, begun)
        for path in work.glob("checkpoint-*"):
            if not (path / COMPLETE).exists():
                shutil.rmtree(path)
    except OSError as error:
        raise OutputError(f"cannot write to {work}: {error}") from error
    return work


def close_work(out: Path) -> None:
    """Remove the work folder of a finished `out`, also one that was killed before it could."""
    shutil.rmtree(_work(out), ignore_errors=True)


def checkpoints(work: Path) -> dict[int, Path]:
    """The complete checkpoints of unfinished work, by step, in order."""
    found = {
        int(re.sub(r"\D", "", path.name)): path for path in work.glob("checkpoint-*") if (path / COMPLETE).exists()
    }
    return dict(sorted(found.items()))


def mark_complete(work: Path, step: int) -> None:
    """Mark the newest checkpoint complete, and then free older ones of what only resuming needs."""
    write_text(work / f"checkpoint-{step}" / COMPLETE, "")
    for older, path in checkpoints(work).items():
        if older != step:
            for spent in (p for pattern in ("optimizer*", "*.pt", "*.pth") for p in path.glob(pattern)):
                shutil.rmtree(spent) if spent.is_dir() else spent.unlink()


def copy_for_users(checkpoint: Path, target: Path, link: bool = False) -> None:
    """Copy a checkpoint as an ordinary model folder, without what only resuming needs.

    `link` makes hard links where the file system can: the checkpoint's work folder is about to be removed.
    """
    ignore, copy = shutil.ignore_patterns(*NOT_FOR_USERS), _link if link else shutil.copy2
    shutil.copytree(checkpoint, target, ignore=ignore, copy_function=copy, dirs_exist_ok=True)


def _work(out: Path) -> Path:
    return out.with_name(f".{out.name}.partial")


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _as_json(config: Mapping[str, object]) -> dict[str, object]:
    return json.loads(json.dumps(dict(config)))


def _some(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
