"""The popularity of subjects from a table, such as page views; it replaces that of the facts, if any."""

from __future__ import annotations

import unicodedata
from dataclasses import replace
from pathlib import Path

from attnbalance.data.facts import FactSet
from attnbalance.data.sources.own_facts import popularity_of, text_of
from attnbalance.data.sources.table_files import read_rows
from attnbalance.errors import DataError

COLUMNS = {"subject", "popularity"}


def with_popularity(facts: FactSet, path: str | Path) -> FactSet:
    """The facts whose subject a table names, with its popularity in the place of their own.

    Facts of other subjects are dropped and counted: numbers of two origins cannot be ranked together.
    Raises `DataError`, naming the row, for a table without exactly the columns of `COLUMNS`, for what is no popularity,
    and for a subject with two values; and if the table names no subject of the facts.

    path: the table (see `read_rows`).
    """
    known: dict[str, float] = {}
    for number, row in enumerate(read_rows(path), 1):
        try:
            if set(row) != COLUMNS:
                raise DataError(f"expected the columns subject and popularity, got {', '.join(map(str, row))}")
            subject = unicodedata.normalize("NFC", text_of(row["subject"], "subject").strip())
            value = replace(facts[0], popularity=popularity_of(row["popularity"])).popularity
            if value is None:
                raise DataError(f"no popularity of {subject!r}")
            if known.setdefault(subject, value) != value:
                raise DataError(f"{subject!r} has the popularity {known[subject]:g} above and {value:g} here; keep one")
        except DataError as error:
            raise DataError(f"{path}, row {number}: {error}") from error
    kept = facts.where(lambda fact: fact.composed_subject in known)
    if not len(kept):
        raise DataError(f"{path} names none of the {len(facts)} facts' subjects (first: {facts[0].subject!r})")
    dropped = {f"no popularity in {path}": len(facts) - len(kept)} if len(kept) < len(facts) else {}
    joined = tuple(replace(fact, popularity=known[fact.composed_subject]) for fact in kept)
    return replace(kept, facts=joined, dropped={**facts.dropped, **dropped})
