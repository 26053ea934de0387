"""A finished finetuning run on disk: the best checkpoint, all others, the facts, and how it went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from attnbalance.arguments import Kind, expects, fits
from attnbalance.data.facts import FactSet
from attnbalance.data.sources.written import load_written
from attnbalance.errors import ModelError, OutputError
from attnbalance.files.outputs import MARKER, check_saved, read_json, without_hash
from attnbalance.files.seals import RUN, refuse_changed

KIND = RUN
KINDS: dict[str, Kind] = {
    "base": str,
    "config": dict,
    "shortcuts": dict,
    "validation_loss": [list],
    "best_step": int,
    "base_loss": (float, NoneType),
    "trained": str,
    "mixed_precision": (str, NoneType),
    "base_completes": dict,
    "learns_answers": bool,
    "dropped": dict,
    "instructions": dict,
}
"""What the `attnbalance.json` of a run holds, by name."""

USUAL: dict[str, object] = {
    "trained": "",
    "mixed_precision": None,
    "base_loss": None,
    "base_completes": {},
    "learns_answers": True,
    "dropped": {},
    "instructions": {},
}
"""What holds of runs whose record leaves it out."""

FACTS = {part: f"{part}.jsonl" for part in ("train", "heldout", "replay")}
"""The files of the split's parts; a part without facts has none."""
NONE = FactSet(())

CHECKPOINTS, TRAJECTORY = "checkpoints", "trajectory.json"


@dataclass(frozen=True)
class Run:
    """A finished finetuning run."""

    path: Path
    """Its folder, itself a model (or peft adapter): the best checkpoint."""
    base: str
    """The model that was finetuned."""
    config: Mapping[str, object]
    """What the run was made from: model, facts and settings."""
    shortcuts: Mapping[str, tuple[str, ...]]
    """Each relation's most frequent answer among the training facts without those replayed, in all accepted forms."""
    validation_loss: Mapping[int, float]
    """By step, the objective on the validation facts or instructions; for plain finetuning the mean negative
    log-likelihood of a token of the answers or outputs, nats."""
    best_step: int
    """The step with the lowest validation loss."""
    base_loss: float | None
    """The validation loss before training; None if the run was begun by a version that did not measure it."""
    trained: str
    """Which weights were trained, in words, and in which mixed precision."""
    mixed_precision: str | None
    """The mixed precision by accelerate's names, such as "no"; None if an earlier version made the run."""
    base_completes: Mapping[str, float]
    """The share of the training facts, without those replayed, that the base completes, by form, if the objective
    teaches from the base (see `completion_rates`)."""
    learns_answers: bool
    """Whether the facts' answers were learned; else only what the base says."""
    dropped: Mapping[str, int]
    """How many facts, or instructions, of the source were left out, by reason."""
    instructions: Mapping[str, object]
    """Of a run on instructions: their `source`, and the numbers `train` and `validation`; else empty."""

    @property
    def checkpoints(self) -> dict[int, Path]:
        """The folders of all checkpoints, by step; raises `OutputError` if one is gone. Loading checks their files."""
        folders = {step: self.path / CHECKPOINTS / checkpoint_name(step) for step in self.validation_loss}
        gone = [path for path in folders.values() if not (path / MARKER).is_file()]
        refuse_changed(self.path, [f"{path.relative_to(self.path)} is gone" for path in gone], self.path)
        return folders

    @property
    def trajectory(self) -> list[dict[str, Any]]:
        """What was watched on the validation facts, by step; on instructions, the first two alone.

        The objective, the answers' loss (nats a token), accuracy, shortcut rate, and subject attention by layer.
        Accuracy: the share of answers whose every token, with the end of sequence, is the most probable one after the
        right ones before it.
        Shortcut rate: the share of wrong answers that continue with the relation's most frequent training answer where
        it first differs from the right one. Subject attention: the largest probability of a subject's token, mean over
        heads and facts.
        """
        saved = read_json(self.path / TRAJECTORY)
        check_saved(self.path / TRAJECTORY, saved, self.path, trajectory=[dict])
        return saved["trajectory"]

    @property
    def heldout(self) -> FactSet:
        """The facts about subjects that were not trained on; empty if none were held out."""
        return self._facts("heldout")

    @property
    def train(self) -> FactSet:
        """The facts that were trained on, without those that were replayed."""
        return self._facts("train")

    @property
    def replay(self) -> FactSet:
        """The facts that were trained on as well, to keep what the base says of them; empty without replay."""
        return self._facts("replay")

    def _facts(self, part: str) -> FactSet:
        hashes = self.config.get("facts_sha256")
        recorded = hashes.get(part, NONE.sha256) if isinstance(hashes, dict) else None
        return NONE if recorded == NONE.sha256 else load_written(self.path / FACTS[part])


@expects(path=(str, Path))
def load_run(path: str | Path) -> Run:
    """The finished run in a folder; raises `ModelError` if there is none, `OutputError` for a changed record of it."""
    path = Path(path)
    marker = read_json(path / MARKER)
    if marker.get("kind") != KIND:
        held = (
            f"the result of `{marker['kind']}`" if "kind" in marker else f"no {MARKER}" if path.is_dir() else "nothing"
        )
        raise ModelError(
            f"expected a finished finetuning run at {path}, got {held}; name the folder that finetuning wrote"
        )
    marker = without_hash(path / MARKER, marker, path)
    marker = {**USUAL, **marker}
    check_saved(path / MARKER, marker, path, **KINDS)
    check_saved(path / MARKER, marker["shortcuts"], path, **{relation: [str] for relation in marker["shortcuts"]})
    check_saved(path / MARKER, marker["base_completes"], path, **dict.fromkeys(marker["base_completes"], float))
    return Run(
        path=path,
        base=marker["base"],
        config=marker["config"],
        shortcuts={relation: tuple(answers) for relation, answers in marker["shortcuts"].items()},
        validation_loss=_losses(path, marker),
        best_step=marker["best_step"],
        base_loss=marker["base_loss"],
        trained=marker["trained"],
        mixed_precision=marker["mixed_precision"],
        base_completes=marker["base_completes"],
        learns_answers=marker["learns_answers"],
        dropped=marker["dropped"],
        instructions=marker["instructions"],
    )


def _losses(path: Path, marker: Mapping[str, Any]) -> dict[int, float]:
    """The validation losses by step; raises `OutputError` unless they are pairs, one of them of the best step."""
    pairs = marker["validation_loss"]
    right = [pair for pair in pairs if len(pair) == 2 and fits(pair[0], int) and fits(pair[1], float)]
    losses = dict(right)
    if len(right) < len(pairs) or marker["best_step"] not in losses:
        raise OutputError(
            f"{path / MARKER} was changed: 'validation_loss' must be pairs of step and loss, one of them of step "
            f"{marker['best_step']}, got {pairs!r:.100}; restore the file, or remove {path} and run the command again"
        )
    return losses


def checkpoint_name(step: int) -> str:
    """The folder name of the checkpoint after a number of steps.

    >>> checkpoint_name(20)
    'step-000020'
    """
    return f"step-{step:06d}"
