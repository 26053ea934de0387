"""The checkpoints of a run, found in folders and sorted by their step."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path

from attnbalance.comparison.specs import ModelSpec
from attnbalance.errors import ModelError
from attnbalance.files.outputs import MARKER, read_json
from attnbalance.finetuning.runs import KIND, load_run
from attnbalance.models.load_adapter import split_adapter

STATE = "trainer_state.json"
"""What transformers' Trainer saves beside a checkpoint; it holds the step."""
ADAPTER = "adapter_config.json"
CONFIGS = ("config.json", ADAPTER)
"""A checkpoint holds one of them: full weights or an adapter."""


def find_checkpoints(where: Sequence[str], base: str | None = None) -> dict[int, ModelSpec]:
    """The checkpoints in some folders by step, in order, each labelled "step N". Step 0 is the model before training.

    where: folders or patterns ("run/checkpoint-*"). A folder is a checkpoint, a run of `finetune` or `instruct`, or
        holds folders named checkpoint-N, as transformers' Trainer writes them.
    base: the model before training. By default the one that adapters name; full checkpoints name none, and there is no
        step 0.

    A step is `global_step` of a checkpoint's trainer_state.json, otherwise the number that its name ends with, or that
    of the folder which it links to. Raises `ModelError` for a folder without checkpoints, a checkpoint without weights
    or without a step, one whose name and trainer_state.json disagree, two of the same step, a base beside a full
    checkpoint of step 0, fewer than two of them (step 0 counts), and adapters beside full checkpoints.
    """
    if base == "":
        raise ModelError("base must name a model, got an empty text")
    paths = dict[int, Path]()
    for step, path in (pair for text in where for pair in _within(text)):
        if step in paths and not paths[step].samefile(path):
            raise ModelError(f"step {step} must have one checkpoint, got {paths[step]} and {path}; leave one out")
        paths[step] = path
    specs = {step: _spec(step, paths[step], base) for step in sorted(paths)}
    adapters = [path for path in paths.values() if is_adapter(path)]
    before = base or (split_adapter(str(adapters[0]), None)[0] if adapters else None)
    if base is not None and 0 in specs and not adapters:
        raise ModelError(f"step 0 must be one model, got the base {base} and {paths[0]}; leave one out")
    if before is not None and 0 not in specs:
        specs = {0: ModelSpec("step 0", before), **specs}
    if len(specs) < 2:
        raise ModelError(f"expected at least two checkpoints, got {len(specs)} in {', '.join(where)}")
    return specs


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
    names = (Path(os.path.abspath(path)).name, path.resolve().name)  # "." has a name, and a link "latest" a target
    numbers = [number for number in (re.search(r"\d+$", name) for name in names) if number]
    named = int(numbers[0][0]) if numbers else None
    recorded = read_json(path / STATE).get("global_step", named)
    if not isinstance(recorded, int):
        raise ModelError(f"{path} has no step: its name must end with one (checkpoint-100), or {STATE} in it name one")
    if path.name.startswith("checkpoint-") and named is not None and named != recorded:
        raise ModelError(f"{path} is named for another step than its {STATE} says: {recorded}; rename it")
    return recorded


def is_adapter(path: Path) -> bool:
    """Whether a folder holds an adapter, also beside a config.json."""
    return (path / ADAPTER).is_file()  # a folder that has whole weights too is refused


def _spec(step: int, path: Path, base: str | None) -> ModelSpec:
    """A checkpoint; an adapter with the base that it is put on, if one is named."""
    if base is None or not is_adapter(path):
        return ModelSpec(f"step {step}", str(path))
    return ModelSpec(f"step {step}", base, str(path))
