"""Facts by the name of their source: NAME or NAME:PATH of a dataset in `SOURCES`, or the path of an own file."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import Path
from types import NoneType

from attnbalance.arguments import expects
from attnbalance.data.facts import FactSet
from attnbalance.data.sources.conflicts import load_conflicts
from attnbalance.data.sources.own_facts import load_own
from attnbalance.data.sources.popqa import load_popqa
from attnbalance.data.sources.swapped import make_conflicts
from attnbalance.data.sources.table_files import READERS
from attnbalance.errors import DataError


def _swapped(source: str | None) -> FactSet:
    """The facts of another source, each in conflict with a context."""
    if not source:
        raise DataError("swapped answers come from facts: swapped:SOURCE")
    return make_conflicts(load_facts(source))


SOURCES: dict[str, Callable[[str | None], FactSet]] = {
    "popqa": load_popqa,
    "conflicts": load_conflicts,
    "swapped": _swapped,
}
"""The loader of each dataset by name; it takes what stands behind the colon, or None for the Hub's copy."""


def source_names() -> str:
    """How each source of facts is written, for messages and help."""
    *suffixes, last = READERS
    named = ", ".join(f"{name}:{'SOURCE' if name == 'swapped' else 'PATH'}" for name in SOURCES)
    return f"popqa (from the Hub), {named}, or PATH of a {', '.join(suffixes)} or {last} file"


@expects(source=(str, Path), relations=([str], NoneType))
def load_facts(
    source: str | Path,
    relations: Collection[str] | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> FactSet:
    """Facts from a dataset of `SOURCES`, or from a user's own file.

    Raises `DataError` for a source that is unknown or cannot be read, and for a relation that does not occur.

    source: NAME (from the Hub), NAME:PATH (a local copy), or the path of a .jsonl, .csv, .tsv or .parquet file.
    relations: keep the facts of these relations only.
    limit: draw at most this many facts, without replacement.
    seed: of the draw.
    """
    text = str(source)
    name, colon, path = text.partition(":")
    if name not in SOURCES and re.fullmatch(r"[\w-]+", name) and not Path(text).exists():
        raise DataError(f"unknown source {name!r}; sources are {source_names()}")
    facts = SOURCES[name](path if colon else None) if name in SOURCES else load_own(text)
    if relations is not None:
        facts = facts.of_relations(relations)
    if limit is not None:
        facts = facts.sample(limit, seed)
    if not len(facts):
        raise DataError(f"no facts left in {text} after dropping {dict(facts.dropped)}")
    return facts
