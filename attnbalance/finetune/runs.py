"""A finished finetuning run on disk: the best checkpoint, all others, the facts, and how it went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnbalance.datasets.own import load_own
from attnbalance.errors import ModelError
from attnbalance.facts import FactSet
from attnbalance.outputs import MARKER, read_json

KIND = "finetune"
CHECKPOINT_KIND = "finetune checkpoint"
TRAIN, HELDOUT, TRAJECTORY = "train.jsonl", "heldout.jsonl", "trajectory.json"


@dataclass(frozen=True)
class Run:
    """A finished finetuning run; `path` is itself a model (or peft adapter) folder: its best checkpoint.

    `validation_loss` holds, by step, the objective on the validation facts (for plain finetuning the mean negative
    log-likelihood, nats, of a token of the answers); `best_step` is the step with the lowest. `shortcuts` holds each
    relation's most frequent answer among the training facts, in all its accepted forms. `base` is the model that was
    finetuned; `trained` says which of its weights.
    """

    path: Path
    base: str
    config: Mapping[str, object]
    shortcuts: Mapping[str, tuple[str, ...]]
    validation_loss: Mapping[int, float]
    best_step: int
    trained: str

    @property
    def checkpoints(self) -> dict[int, Path]:
        """The folders of all checkpoints, by step."""
        return {step: self.path / "checkpoints" / checkpoint_name(step) for step in self.validation_loss}

    @property
    def trajectory(self) -> list[dict[str, Any]]:
        """What was watched on the validation facts, by step.

        The objective, the answers' loss (nats a token), accuracy, shortcut rate, and subject attention by layer.
        Accuracy is the share of answers whose every token is the most probable one behind the right ones before it;
        the shortcut rate the share of wrong answers whose first token is that of the relation's most frequent training
        answer; subject attention the largest probability of a subject's token, mean over heads and facts.
        """
        return read_json(self.path / TRAJECTORY).get("trajectory", [])

    @property
    def heldout(self) -> FactSet:
        """The facts about subjects that were not trained on."""
        return load_own(self.path / HELDOUT)

    @property
    def train(self) -> FactSet:
        """The facts that were trained on."""
        return load_own(self.path / TRAIN)


def load_run(path: str | Path) -> Run:
    """The finished run in a folder; raises `ModelError` where there is none."""
    path = Path(path)
    marker = read_json(path / MARKER)
    if marker.get("kind") != KIND:
        held = (
            f"the result of `{marker['kind']}`" if "kind" in marker else f"no {MARKER}" if path.is_dir() else "nothing"
        )
        raise ModelError(
            f"expected a finished finetuning run at {path}, found {held}; name the folder that finetuning wrote"
        )
    return Run(
        path=path,
        base=marker["base"],
        config=marker["config"],
        shortcuts={relation: tuple(answers) for relation, answers in marker["shortcuts"].items()},
        validation_loss={int(step): loss for step, loss in marker["validation_loss"]},
        best_step=marker["best_step"],
        trained=marker.get("trained", ""),
    )


def checkpoint_name(step: int) -> str:
    """The folder name of the checkpoint after so many steps."""
    return f"step-{step:06d}"
