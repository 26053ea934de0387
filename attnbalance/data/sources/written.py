"""Facts and conflicts from files that this package wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attnbalance.data.conflicts import Conflict
from attnbalance.data.facts import Fact, FactSet
from attnbalance.data.sources.table_files import read_rows
from attnbalance.errors import DataError


def load_written(path: str | Path) -> FactSet:
    """Facts, or conflicts, from a file that this package wrote: each as it was, in its order.

    Raises `DataError` for a file that cannot be read, and, naming the row, for what `Fact` and `Conflict` refuse.
    """
    facts = []
    for number, row in enumerate(read_rows(path), 1):
        fields: dict[str, Any] = dict(row)
        try:
            facts.append(Conflict(**fields) if "context" in fields else Fact(**fields))
        except (DataError, TypeError) as error:
            raise DataError(f"{path}, row {number}: {error}") from error
    return FactSet(tuple(facts), str(path))
