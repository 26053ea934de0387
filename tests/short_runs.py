"""Short trainings of tiny models, and how two of them are compared."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from attnbalance.data.statements import World
from attnbalance.data.synthetic import synthetic_facts
from attnbalance.files.outputs import MARKER
from attnbalance.finetuning.pretrain import Recipe
from attnbalance.finetuning.settings import FinetuneSettings
from attnbalance.finetuning.splits import split_facts

FACTS = synthetic_facts(0, subjects=40, relations=2, answers=4)


WORLD = World(FACTS)


TINY = Recipe(layers=1, d_model=16, heads=2, vocabulary=400, steps=7, batch_size=8)


SPLIT = split_facts(FACTS, "top")


SHORT: dict[str, Any] = {"steps": 7, "batch_size": 8, "checkpoint_every": 2, "patience": None, "learning_rate": 1e-2}


def short(**changes: Any) -> FinetuneSettings:
    """Settings of a short training."""
    return FinetuneSettings(**SHORT | changes)


def without_record(folder: Path, copy: Path) -> Path:
    """A copy of a model of ours that is anybody's: its files may be changed."""
    return Path(shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(MARKER)))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(next(iter(folder.glob("*.safetensors"))))


def assert_equal_weights(folder: Path, other: Path) -> None:
    first, second = weights(folder), weights(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the package may catch it."""
