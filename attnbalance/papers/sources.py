"""The facts and the pretrained language model that figures use."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnbalance.data.facts import FactSet
from attnbalance.data.sources.load_facts import SOURCES, load_facts
from attnbalance.errors import DataError, ModelError
from attnbalance.files.seals import hash_file


@dataclass(frozen=True)
class Sources:
    """Where facts and a model come from.

    facts: a source of facts (see `load_facts`).
    model: a folder, GGUF file or Hub id; None: figures of language models are not run.
    """

    facts: str = "popqa"
    model: str | None = None

    def of_facts(self) -> dict[str, Any]:
        """The settings by which a cell loads the facts, with the hash of a local file."""
        table = _table(self.facts)
        return {"facts": self.facts} | ({"facts_file": hash_file(table)} if table.is_file() else {})

    def of_model(self) -> dict[str, Any]:
        """The settings by which a cell loads the model, with a hash of its files."""
        from attnbalance.models.fingerprint import files_fingerprint

        if self.model is None:
            raise ModelError("no model was given")
        return {"model": self.model, "model_files": files_fingerprint(self.model)}


def facts_of(settings: Mapping[str, Any], relations: Collection[str] | None = None) -> FactSet:
    """The facts of a cell; raises `DataError` if their file changed since the cells were listed."""
    table = _table(settings["facts"])
    if "facts_file" in settings and not (table.is_file() and hash_file(table) == settings["facts_file"]):
        raise DataError(f"{table} was changed or moved since the cells were listed; run the same command again")
    return load_facts(settings["facts"], relations)


def model_of(settings: Mapping[str, Any]) -> str:
    """The model of a cell; raises `ModelError` if its files changed since the cells were listed."""
    from attnbalance.models.fingerprint import files_fingerprint

    if files_fingerprint(settings["model"]) != settings["model_files"]:
        raise ModelError(f"{settings['model']} changed since the cells were listed; run the same command again")
    return settings["model"]


def _table(facts: str) -> Path:
    """The file of a source of facts."""
    name, _, path = facts.partition(":")
    return Path(path if name in SOURCES else facts)
