"""Checkpoints of unfinished training: marked when complete, and copied for users without what only resuming needs."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from attnbalance.outputs import write_text

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


def drop_incomplete(work: Path) -> Path:
    """Clear a work folder of checkpoints that a kill left incomplete; returns the folder."""
    for path in work.glob("checkpoint-*"):
        if not (path / COMPLETE).exists():
            shutil.rmtree(path)
    return work


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


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
