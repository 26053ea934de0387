"""Facts and conflicts from files that this package wrote."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

from attnbalance.data.facts import FactSet
from attnbalance.data.sources.conflicts import load_conflicts
from attnbalance.data.sources.own_facts import load_own
from attnbalance.data.sources.table_files import read_rows


def load_written(path: str | Path) -> FactSet:
    """Facts, or conflicts, from a file that this package wrote, without warnings of their cells.

    Raises `DataError` as `load_own` and `load_conflicts` do.
    """
    load = load_conflicts if "context" in read_rows(path)[0] else load_own
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return replace(load(path), name=str(path))
