"""The checkpoints of a run, found in folders and sorted by their step."""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from pathlib import Path

from attnbalance.comparison.specs import ModelSpec
from attnbalance.errors import ModelError
from attnbalance.files.outputs import MARKER, read_json
from attnbalance.finetuning.runs import KIND, load_run

STATE = "trainer_state.json"
"""What transformers' Trainer saves beside a checkpoint; it holds the step."""
CONFIGS = ("config.json", "adapter_config.json")
"""A checkpoint holds one of them: full weights or an adapter."""


def find_checkpoints(where: Sequence[str], base: str | None = None) -> dict[int, ModelSpec]:
    """The checkpoints in some places by step, in order, each labelled "step N".

    where: folders or patterns ("run/checkpoint-*"). A folder is a checkpoint, a run of `finetune` or `instruct`, or
        holds folders named checkpoint-N, as transformers' Trainer writes them.
    base: the model that adapters are put on; by default the one that they name.

    A step is `global_step` of a checkpoint's trainer_state.json, otherwise the number that its name ends with. Raises
    `ModelError` for a place without checkpoints, a checkpoint without weights or without a step, one whose name and
    trainer_state.json disagree, two of the same step, fewer than two of them, and a base for full checkpoints.
    """
    found = dict[int, Path]()
    for step, path in (pair for text in where for pair in _within(text)):
        if step in found and not found[step].samefile(path):
            raise ModelError(f"step {step} must have one checkpoint, got {found[step]} and {path}; leave one out")
        found[step] = path
    if len(found) < 2:
        raise ModelError(f"expected at least two checkpoints, got {len(found)} in {', '.join(where)}")
    return {step: _spec(step, found[step], base) for step in sorted(found)}


def _within(text: str) -> list[tuple[int, Path]]:
    """Steps and folders of the checkpoints of one folder or pattern."""
    path = Path(text).expanduser()
    paths = [path] if path.exists() else [Path(name) for name in sorted(glob.glob(str(path)))]
    if not paths:
        raise ModelError(f"no checkpoints at {text}: there is no such folder, and no folder fits it as a pattern")
    steps = list[tuple[int, Path]]()
    for folder in paths:
        if read_json(folder / MARKER).get("kind") == KIND:
            steps += load_run(folder).checkpoints.items()
        else:
            inner = sorted(part for part in folder.glob("checkpoint-*") if part.is_dir())
            steps += [(_step(part), part) for part in inner or [folder]]
    return steps


def _step(path: Path) -> int:
    """The step of a checkpoint's folder."""
    if not any((path / name).is_file() for name in CONFIGS):
        raise ModelError(
            f"{path} is no checkpoint: it holds neither {' nor '.join(CONFIGS)}. It may be half-written; leave it out"
        )
    number = re.search(r"\d+$", path.resolve().name)
    named = int(number[0]) if number else None
    recorded = read_json(path / STATE).get("global_step", named)
    if not isinstance(recorded, int):
        raise ModelError(f"{path} has no step: its name must end with one (checkpoint-100), or {STATE} in it name one")
    if path.name.startswith("checkpoint-") and named is not None and named != recorded:
        raise ModelError(f"{path} is named for another step than its {STATE} says: {recorded}; rename it")
    return recorded


def _spec(step: int, path: Path, base: str | None) -> ModelSpec:
    if base is None:
        return ModelSpec(f"step {step}", str(path))
    if not (path / CONFIGS[1]).is_file() or (path / CONFIGS[0]).is_file():
        raise ModelError(f"{path} holds full weights, which need no base; leave out the base ({base})")
    return ModelSpec(f"step {step}", base, str(path))
