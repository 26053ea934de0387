"""Facts by the name of their source: NAME or NAME:PATH of a dataset in `SOURCES`, or the path of a user's own file."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from types import NoneType

from attnbalance.arguments import expects
from attnbalance.data.facts import FactSet
from attnbalance.data.sources.conflicts import load_conflicts
from attnbalance.data.sources.entity_questions import load_entity_questions
from attnbalance.data.sources.lre import load_lre
from attnbalance.data.sources.own_facts import load_own
from attnbalance.data.sources.popqa import load_popqa
from attnbalance.data.sources.popularity import with_popularity
from attnbalance.data.sources.swapped import make_conflicts
from attnbalance.data.sources.table_files import READERS
from attnbalance.errors import DataError

SOURCES: dict[str, Callable[[str | None], FactSet]] = {
    "popqa": load_popqa,
    "entityquestions": load_entity_questions,
    "lre": load_lre,
    "conflicts": load_conflicts,
}
"""The loader of each dataset by name; it takes the path of a local copy, or None for the Hub's, if it is there."""

SWAPPED = "swapped"
"""Stands before another source, whose facts are then in conflict with a context (see `make_conflicts`)."""


def source_names() -> str:
    """How each source of facts is written, for messages and help."""
    *suffixes, last = READERS
    named = ", ".join(f"{name}:PATH" for name in SOURCES)
    return f"popqa (from the Hub), {SWAPPED}:SOURCE, {named}, or PATH of a {', '.join(suffixes)} or {last} file"


@expects(source=(str, Path), relations=([str], NoneType), popularity=(str, Path, NoneType), limit=(int, NoneType))
def load_facts(
    source: str | Path,
    relations: Collection[str] | None = None,
    limit: int | None = None,
    seed: int = 0,
    popularity: str | Path | None = None,
) -> FactSet:
    """Facts from a dataset of `SOURCES`, or from a user's own file.

    Raises `DataError` for a source that is unknown or cannot be read, and for a relation that does not occur.

    source: popqa (from the Hub), NAME:PATH (a local copy), the path of a .json, .jsonl, .csv, .tsv or .parquet file, or
        swapped:SOURCE.
    relations: keep the facts of these relations only.
    limit: draw at most this many facts, without replacement.
    seed: of the draw, and of swapped answers.
    popularity: a table with the columns subject and popularity, which then takes the place of the source's own (see
        `with_popularity`).
    """
    text = str(source)
    name, colon, path = text.partition(":")
    if name == SWAPPED and colon:
        conflicts = make_conflicts(load_facts(path, relations, limit, seed, popularity), seed)
        if not len(conflicts):
            raise DataError(f"no conflicts left in {text} after dropping {dict(conflicts.dropped)}")
        return conflicts
    if name not in SOURCES and re.fullmatch(r"[\w-]+", name) and not Path(text).exists():
        raise DataError(f"unknown source {name!r}; sources are {source_names()}")
    if name in SOURCES and colon and not path:
        raise DataError(f"name a file or folder after {name}:, got {text!r}")
    facts = SOURCES[name](path if colon else None) if name in SOURCES else load_own(text)
    if relations is not None:
        facts = _of_relations(facts, relations)
    if popularity is not None and len(facts):
        facts = with_popularity(facts, popularity)
    if limit is not None:
        facts = facts.sample(limit, seed)
    if not len(facts):
        raise DataError(f"no facts left in {text} after dropping {dict(facts.dropped)}")
    return facts


def _of_relations(facts: FactSet, relations: Collection[str]) -> FactSet:
    """The facts of some relations; what was dropped on loading is counted over all, and says so."""
    chosen = facts.of_relations(relations)
    if len(chosen.relations) == len(facts.relations):
        return chosen
    return replace(chosen, dropped={f"{reason}, in all relations": count for reason, count in chosen.dropped.items()})
