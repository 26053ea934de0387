"""Checkpoints of unfinished training: marked when complete, and copied for users without what only resuming needs."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from attnbalance.errors import OutputError
from attnbalance.files.outputs import read_json, remove, set_aside, writing
from attnbalance.files.seals import SEAL, damage, seal

STATE = "trainer_state.json"
SPENT = ("optimizer*", "*.pt", "*.pth")
"""What only resuming needs, and is removed from all checkpoints but the newest."""

NOT_FOR_USERS = (
    SEAL,
    STATE,
    *SPENT,
    "README.md",
    "*.bin",
    "*.distcp",
    "pytorch_model_fsdp*",
)
"""What only resuming needs; none of it goes into a finished folder, so that this holds no pickles."""


def drop_incomplete(work: Path) -> Path:
    """Remove checkpoints that a kill left incomplete from a work folder; returns the folder."""
    for path in work.glob("checkpoint-*"):
        if not (path / SEAL).exists():
            remove(path)
    return work


def set_damaged_aside(work: Path) -> Path:
    """Set all checkpoints of a work folder aside if a complete one is damaged or gone; returns the folder.

    Training then begins anew: resumed, it could end with other weights than an unbroken run.
    """
    done = checkpoints(work)
    wrong = _damage(done)
    if wrong:
        set_aside(list(done.values()), wrong)
    return work


def _damage(done: Mapping[int, Path]) -> str | None:
    """What is wrong with the complete checkpoints, in words; None if nothing is."""
    if not done:
        return None
    newest = max(done)
    wrong = next(filter(None, (damage(path, () if step == newest else SPENT) for step, path in done.items())), None)
    if wrong:
        return wrong
    for step, path in done.items():
        at = read_json(path / STATE).get("global_step", step)
        if at != step:
            return f"{path} is the checkpoint of step {at}"
    log = read_json(done[newest] / STATE).get("log_history", [])
    gone = sorted({entry["step"] for entry in log if "eval_loss" in entry or "eval_objective" in entry} - done.keys())
    return f"{done[newest].with_name(f'checkpoint-{gone[0]}')} is gone" if gone else None


def checkpoints(work: Path) -> dict[int, Path]:
    """The complete checkpoints of unfinished work, by step, in order."""
    named = [(re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in work.glob("checkpoint-*")]
    return dict(sorted((int(match[1]), path) for match, path in named if match and (path / SEAL).exists()))


def written(work: Path, steps: Iterable[int] = ()) -> dict[int, Path]:
    """The complete checkpoints of finished work; raises `OutputError` for one that is gone or holds no weights."""
    done = checkpoints(work)
    gone = sorted(set(steps) - done.keys())
    if gone or not done:
        what = f"the checkpoint of step {gone[0]}" if gone else "every checkpoint"
        raise OutputError(f"{what} in {work} was removed while training ran; run the same command again")
    if empty := [path for path in done.values() if not list(path.glob("*.safetensors"))]:
        raise OutputError(
            f"{empty[0]} holds no weights in safetensors: training in several processes must gather them (FSDP: "
            "FULL_STATE_DICT; DeepSpeed: stage3_gather_16bit_weights_on_model_save); nothing was removed"
        )
    return done


def mark_complete(work: Path, step: int) -> None:
    """Mark the newest checkpoint complete, and then remove from older ones what only resuming needs."""
    with writing(work / f"checkpoint-{step}"):
        seal(work / f"checkpoint-{step}")
        for older, path in checkpoints(work).items():
            if older != step:
                for spent in (p for pattern in SPENT for p in path.glob(pattern)):
                    remove(spent)


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
