"""Rows of a local .jsonl, .csv, .tsv or .parquet file, with errors that name the file and the line."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from attnbalance.errors import DataError

Row = dict[str, object]


def read_rows(path: str | Path) -> list[Row]:
    """All rows of a table as dictionaries; text files are UTF-8, and the cells of CSV and TSV are strings.

    Raises `DataError` for a missing, unreadable, empty or unfamiliar file, naming the line where there is one.
    """
    path = Path(path)
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"cannot read facts from {path}: a file's name must end in {', '.join(READERS)} (for PopQA, "
            "write popqa or popqa:PATH)"
        )
    if not path.is_file():
        raise DataError(f"no facts file at {path}" + (": that is a folder" if path.is_dir() else ""))
    try:
        rows = list(reader(path))
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}; save it as UTF-8") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error}") from error
    if not rows:
        raise DataError(f"{path} holds no rows")
    return rows


def _jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{path}, line {number}: not JSON ({error}); each line must be one JSON object"
                ) from error
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number}: expected a JSON object, got {line.strip()[:80]}")
            yield row


def _delimited(delimiter: str) -> Callable[[Path], Iterator[Row]]:
    def read(path: Path) -> Iterator[Row]:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.DictReader(lines, delimiter=delimiter)
            try:
                for row in reader:
                    if None in row or None in row.values():
                        raise DataError(
                            f"{path}, line {reader.line_num}: expected {len(reader.fieldnames or ())} columns, "
                            "as in the header"
                        )
                    yield dict(row)
            except csv.Error as error:
                raise DataError(f"{path}, line {reader.line_num}: {error}") from error

    return read


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        yield from pq.read_table(path).to_pylist()
    except pa.ArrowInvalid as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}") from error


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _jsonl,
    ".csv": _delimited(","),
    ".tsv": _delimited("\t"),
    ".parquet": _parquet,
}
