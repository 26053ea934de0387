"""The facts, conflicts, instructions and the pretrained language model that figures use."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnbalance.data.facts import FactSet
from attnbalance.data.instructions import InstructionSet
from attnbalance.data.sources.choices import choice_files, load_choices
from attnbalance.data.sources.conflicts import load_conflicts
from attnbalance.data.sources.instructions import load_instructions
from attnbalance.data.sources.load_facts import SOURCES, SWAPPED, load_facts
from attnbalance.errors import DataError, ModelError
from attnbalance.files.seals import hash_file
from attnbalance.finetuning.settings import FinetuneSettings

NEEDED = {
    "model": "a pretrained language model is needed (a folder, GGUF file or Hub id)",
    "instructions": "a file of instructions is needed (with Alpaca's columns: alpaca_data.json of "
    "github.com/tatsu-lab/stanford_alpaca)",
    "squad": "a file of SQuAD is needed (such as train-v1.1.json of rajpurkar.github.io/SQuAD-explorer)",
    "conflicts": "a file of knowledge conflicts is needed (such as world_facts.json of "
    "github.com/locuslab/context-parametric-inversion)",
    "choices": "multiple-choice questions are needed (a .csv file, or a folder of them, of MMLU's data: "
    "github.com/hendrycks/test)",
}
"""What figures may need, in words."""


@dataclass(frozen=True)
class Sources:
    """Where facts and a model come from.

    facts: a source of facts (see `load_facts`).
    model: a folder, GGUF file or Hub id.
    instructions: a file of instructions (see `load_instructions`).
    conflicts: a file of conflicts (see `load_conflicts`).
    choices: a file or folder of multiple-choice questions (see `load_choices`).
    squad: a file of SQuAD's questions (see `load_instructions`).
    mixed_precision: in which precision the model is finetuned (see `FinetuneSettings`).

    Figures that need what is None are not run. Raises `DataError` for an unknown precision.
    """

    facts: str = "popqa"
    model: str | None = None
    instructions: str | None = None
    conflicts: str | None = None
    choices: str | None = None
    squad: str | None = None
    mixed_precision: str | None = None

    def __post_init__(self) -> None:
        """Refuse a precision that no training knows."""
        FinetuneSettings(mixed_precision=self.mixed_precision)

    def missing(self, needs: Collection[str]) -> str:
        """What of some fields is not given, in words; empty if nothing is missing."""
        absent = [f"{NEEDED[name]}: pass `{name}`" for name in needs if getattr(self, name) is None]
        return ", and ".join(absent)

    def of_file(self, name: str) -> dict[str, Any]:
        """The settings by which a cell loads instructions, SQuAD or conflicts, with the hash of their file."""
        path = Path(getattr(self, name))
        return {name: str(path)} | ({f"{name}_file": hash_file(path)} if path.is_file() else {})

    def of_facts(self) -> dict[str, Any]:
        """The settings by which a cell loads the facts, with the hash of a local file, or of each in a local folder."""
        return {"facts": self.facts} | _hash_of_facts(self.facts)

    def of_choices(self) -> dict[str, Any]:
        """The settings by which a cell loads the multiple-choice questions, with the hashes of their files."""
        path = str(self.choices)
        return {"choices": path} | ({"choices_files": _hashes(path)} if Path(path).exists() else {})

    def of_model(self) -> dict[str, Any]:
        """The settings by which a cell loads the model, with a hash of its files, and finetunes it."""
        from attnbalance.models.fingerprint import files_fingerprint

        if self.model is None:
            raise ModelError("no model was given")
        named = {} if self.mixed_precision is None else {"mixed_precision": self.mixed_precision}
        return {"model": self.model, "model_files": files_fingerprint(self.model)} | named


def facts_of(settings: Mapping[str, Any], relations: Collection[str] | None = None) -> FactSet:
    """The facts of a cell; raises `DataError` if their file changed since the cells were listed."""
    recorded = {name: settings[name] for name in ("facts_file", "facts_files") if name in settings}
    if recorded and _hash_of_facts(settings["facts"]) != recorded:
        path = _facts_path(settings["facts"])
        raise DataError(f"{path} was changed or moved since the cells were listed; run the same command again")
    return load_facts(settings["facts"], relations)


def instructions_of(settings: Mapping[str, Any]) -> InstructionSet:
    """The instructions of a cell, or SQuAD; raises `DataError` if their file changed since the cells were listed."""
    return load_instructions(_unchanged(settings, "squad" if "squad" in settings else "instructions"))


def conflicts_of(settings: Mapping[str, Any]) -> FactSet:
    """The conflicts of a cell; raises `DataError` if their file changed since the cells were listed."""
    return load_conflicts(_unchanged(settings, "conflicts"))


def choices_of(settings: Mapping[str, Any]) -> InstructionSet:
    """The multiple-choice questions of a cell; raises `DataError` if a file changed since the cells were listed."""
    path = settings["choices"]
    if "choices_files" in settings and not (Path(path).exists() and _hashes(path) == settings["choices_files"]):
        raise DataError(
            f"questions in {path} were changed or moved since the cells were listed; run the same command again"
        )
    return load_choices(path)


def _hashes(path: str) -> dict[str, str]:
    """The hash of each file of questions, by its place in the folder."""
    return {str(file.relative_to(path)): hash_file(file) for file in choice_files(path)}


def _unchanged(settings: Mapping[str, Any], name: str) -> Path:
    path = Path(settings[name])
    if f"{name}_file" not in settings:
        raise DataError(f"{path}, the file of {name}, does not exist")
    if not (path.is_file() and hash_file(path) == settings[f"{name}_file"]):
        raise DataError(f"{path} was changed or moved since the cells were listed; run the same command again")
    return path


def model_of(settings: Mapping[str, Any]) -> str:
    """The model of a cell; raises `ModelError` if its files changed since the cells were listed."""
    from attnbalance.models.fingerprint import files_fingerprint

    if files_fingerprint(settings["model"]) != settings["model_files"]:
        raise ModelError(f"{settings['model']} changed since the cells were listed; run the same command again")
    return settings["model"]


def _hash_of_facts(facts: str) -> dict[str, Any]:
    """The hash of the file, or of each file in the folder, that a source of facts names; nothing for the Hub's."""
    path = _facts_path(facts)
    if path is None:
        return {}
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        return {"facts_files": {str(file.relative_to(path)): hash_file(file) for file in files}}
    return {"facts_file": hash_file(path)} if path.is_file() else {}


def _facts_path(facts: str) -> Path | None:
    """The path that a source of facts ends with, behind the names of sources; None for the Hub's."""
    name, colon, rest = facts.partition(":")
    if name in (SWAPPED, *SOURCES):
        return _facts_path(rest) if colon else None
    return Path(facts)
