"""Rows of a local .json, .jsonl, .csv, .tsv or .parquet file, read within limits; errors name file and line."""

from __future__ import annotations

import csv
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from attnbalance.errors import DataError

Record = dict[str, object]
"""One row of a table: its values by column."""

LONGEST = 1_000_000
"""Most characters of a line or row: far more than facts need, and little enough to fit in memory many times."""

BATCH = 256
"""Rows of a Parquet file that are read before their length is checked."""


def read_rows(path: str | Path) -> list[Record]:
    """All rows of a table as dictionaries; text files are UTF-8, and the cells of CSV and TSV are strings.

    Of SQuAD's .json file, the rows are its articles. Raises `DataError`, naming the line if possible, for a file that
    is missing, unreadable, empty or of an unknown kind, for a column or key that occurs twice, a header that does (`cat
    a.csv b.csv`), and a line or row of more than `LONGEST` characters.
    """
    path = Path(path)
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"cannot read {path}: a file's name must end in {', '.join(READERS)}")
    if not path.is_file():
        raise DataError(f"no file at {path}" + (": that is a folder" if path.is_dir() else ""))
    try:
        rows = list(reader(path))
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}; save it as UTF-8") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error}") from error
    if not rows:
        raise DataError(f"{path} holds no rows")
    return rows


def read_cells(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The rows of a CSV file without a header, each with its line's number; empty rows are passed over.

    Raises `DataError`, naming the line if possible, for a file that cannot be read.
    """
    reader = csv.reader(_lines(path, newline=""), strict=True)
    try:
        yield from ((reader.line_num, cells) for cells in reader if cells)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}; save it as UTF-8") from error
    except (csv.Error, OSError) as error:
        raise DataError(f"cannot read {path}, line {reader.line_num}: {error}") from error


def parse_json(text: str) -> object:
    """A JSON value; raises `DataError` for text that is not JSON and for a key that occurs twice.

    Values that Python refuses raise too: lists nested beyond its recursion limit, and integers of more than 4,300
    digits.

    >>> parse_json('{"answers": ["Paris"]}')
    {'answers': ['Paris']}
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON that can be read ({error})") from error


def _object(pairs: list[tuple[str, object]]) -> Record:
    _check_columns([name for name, _ in pairs])
    return dict(pairs)


def _check_columns(names: Sequence[str]) -> None:
    """Raise `DataError` for a name that occurs twice, because it is unclear which of the two counts."""
    repeated = next((name for name, count in Counter(names).items() if count > 1), None)
    if repeated is not None:
        raise DataError(f"{repeated!r} occurs twice; each column must have its own name")


def _lines(path: Path, newline: str | None = None) -> Iterator[str]:
    """The lines of a text file, none of them longer than `LONGEST`."""
    with path.open(encoding="utf-8-sig", newline=newline) as stream:
        for number in itertools.count(1):
            line = stream.readline(LONGEST + 1)
            if not line:
                return
            if len(line) > LONGEST:
                raise DataError(f"{path}, line {number}: a line may have {LONGEST:,} characters, this one has more")
            yield line


def _jsonl(path: Path) -> Iterator[Record]:
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except DataError as error:
            raise DataError(f"{path}, line {number}: {error}; each line must be one JSON object") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: expected a JSON object, got {line.strip()[:80]}")
        yield row


def _json(path: Path) -> Iterator[Record]:
    try:
        rows = parse_json(path.read_text(encoding="utf-8-sig"))
    except DataError as error:
        raise DataError(f"{path}: {error}; a .json file holds one list (.jsonl: an object in each line)") from error
    articles = rows.get("data") if isinstance(rows, dict) else None
    if isinstance(articles, list) and all(isinstance(each, dict) and "paragraphs" in each for each in articles):
        rows = articles  # SQuAD's files
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path} must hold a JSON list of objects")
    for number, row in enumerate(rows, 1):
        if len(str(row)) > LONGEST:
            raise DataError(f"{path}, row {number}: a row may have {LONGEST:,} characters, this has more")
        yield row


def _delimited(delimiter: str) -> Callable[[Path], Iterator[Record]]:
    def read(path: Path) -> Iterator[Record]:
        reader = csv.DictReader(_lines(path, newline=""), delimiter=delimiter, strict=True)
        try:
            if reader.fieldnames == []:
                raise DataError("expected the names of the columns, got an empty line")
            _check_columns(reader.fieldnames or ())
        except (csv.Error, DataError) as error:
            raise DataError(f"{path}, line 1: {error}") from error
        try:
            for row in reader:
                if None in row or None in row.values():
                    raise DataError(
                        f"{path}, line {reader.line_num}: expected {len(reader.fieldnames or ())} columns, "
                        "as in the header"
                    )
                if len(row) > 1 and all(name == cell.strip("\ufeff ") for name, cell in row.items()):
                    raise DataError(f"{path}, line {reader.line_num}: the header once more; remove this line")
                yield dict(row)
        except csv.Error as error:
            raise DataError(f"{path}, line {reader.line_num}: {error}") from error

    return read


def _parquet(path: Path) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as table:
            _check_columns(table.schema_arrow.names)
            rows = (row for batch in table.iter_batches(BATCH) for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                if len(str(row)) > LONGEST:
                    raise DataError(f"{path}, row {number}: a row may have {LONGEST:,} characters, this has more")
                yield row
    except (pa.ArrowException, ValueError, OverflowError) as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}") from error


READERS: dict[str, Callable[[Path], Iterator[Record]]] = {
    ".json": _json,
    ".jsonl": _jsonl,
    ".csv": _delimited(","),
    ".tsv": _delimited("\t"),
    ".parquet": _parquet,
}
