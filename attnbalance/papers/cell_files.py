"""The files of finished cells: written whole or not at all, and refused if they were changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnbalance.errors import DataError, ModelError, OutputError
from attnbalance.files.outputs import check_saved, provenance, read_json, write_json
from attnbalance.papers.figure import Cell
from attnbalance.papers.sources import Sources


def write_cell(
    out: Path, cell: Cell, values: Mapping[str, Any], seconds: float, mixed_precision: str | None = None
) -> None:
    """Write what a cell gave, how long it took, and in which mixed precision a language model was trained, if one was.

    Raises `ModelError` if a number is not finite.
    """
    try:
        json.dumps(values, allow_nan=False)
    except ValueError as error:
        raise ModelError(f"{cell.name} gave numbers that are not finite ({error})") from error
    about = {"settings": dict(cell.settings), "values": values, "values_sha256": _digest(values), "seconds": seconds}
    about["mixed_precision"] = mixed_precision
    write_json(_file(out, cell), about | provenance())


def saved_cell(out: Path, cell: Cell) -> dict[str, Any]:
    """The content of a cell's file; empty if there is no file, or its settings differ."""
    content = read_cell(_file(out, cell))
    return content if content.get("settings") == dict(cell.settings) else {}


def read_cell(path: Path) -> dict[str, Any]:
    """The content of a cell's file; empty if there is none. Raises `OutputError` for a file that was changed."""
    content = read_json(path)
    if content:
        check_saved(path, content, path, settings=dict, values=dict, values_sha256=str, seconds=float, versions=dict)
        if content["values_sha256"] != _digest(content["values"]):
            raise OutputError(
                f"{path} was changed: 'values' must have SHA-256 {content['values_sha256']}, got "
                f"{_digest(content['values'])}; restore the file, or remove {path} and run the command again"
            )
    return content


def _digest(values: Mapping[str, Any]) -> str:
    """SHA-256 of a cell's values as JSON."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def _file(out: Path, cell: Cell) -> Path:
    return out / "cells" / f"{cell.name}.json"


def refuse_others(cells: Mapping[str, Cell], out: Path) -> None:
    """Raise `OutputError` if cells were run with other settings or by another version of this package."""
    version = provenance()["versions"]["attnbalance"]  # pyright: ignore[reportIndexIssue]
    stale = []
    for cell in cells.values():
        saved = read_cell(_file(out, cell))
        if saved and (saved["settings"] != dict(cell.settings) or saved["versions"].get("attnbalance") != version):
            stale.append(f"{cell.name}.json")
    if stale:
        raise OutputError(
            f"{len(stale)} files in {out / 'cells'} have other settings or another version (first: {stale[0]}); choose "
            "a new folder or remove this one"
        )


def sources_of(out: Path, given: Mapping[str, str | None]) -> Sources:
    """The sources that are named, else those of the folder's cells; one folder has one of each.

    Raises `OutputError` for another than the cells were run with.
    """
    saved: dict[str, Any] = {}
    if empty := [name for name, value in given.items() if value == ""]:
        raise DataError(f"`{empty[0]}` must name something, got an empty text; leave it out for its default")
    for path in sorted((out / "cells").glob("*.json")):
        settings = read_cell(path).get("settings", {})  # a cell that cannot be read is run again
        own = {name: value for name, value in settings.items() if name in given and value}
        for name in own:
            if given[name] is not None and Path(str(given[name])).resolve() != Path(own[name]).resolve():
                raise OutputError(
                    f"the cells of {out} were run with `{name}` {own[name]}, got {given[name]}; leave it out, or "
                    "name a new folder"
                )
        if given.get("mixed_precision") and "model" in settings and "mixed_precision" not in settings:
            raise OutputError(
                f"the cells of {out} were run without `mixed_precision`; leave it out, or name a new folder"
            )
        saved |= own
    return Sources(**{name: value for name, value in given.items() if value} | saved)  # spelled as in the cells
