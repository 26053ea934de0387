"""One name for every source of facts: `popqa`, `popqa:PATH` or the path of a user's own file."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from attnbalance.datasets.own import load_own
from attnbalance.datasets.popqa import load_popqa
from attnbalance.errors import DataError
from attnbalance.facts import FactSet


def load_facts(
    source: str | Path,
    relations: Collection[str] | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> FactSet:
    """Facts from `popqa` (Hub), `popqa:PATH`, or the path of a .jsonl, .csv, .tsv or .parquet file of one's own.

    `relations` keeps only those relations; `limit` draws at most so many facts, seeded and without replacement.
    Raises `DataError` for a source that cannot be read and for a relation that does not occur.
    """
    text = str(source)
    if text == "popqa":
        facts = load_popqa()
    elif text.startswith("popqa:"):
        facts = load_popqa(text.removeprefix("popqa:"))
    else:
        facts = load_own(text)
    if relations is not None:
        facts = facts.of_relations(relations)
    if limit is not None:
        facts = facts.sample(limit, seed)
    if not len(facts):
        raise DataError(f"no facts left in {text} after dropping {dict(facts.dropped)}")
    return facts
