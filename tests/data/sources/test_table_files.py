"""Rows of tables, and errors that name the file and the line."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from attnbalance.data.sources.table_files import read_rows
from attnbalance.errors import DataError

ROWS = [{"subject": "Zürich", "answers": '["a", "b, c"]'}, {"subject": 'say "x"\ttab', "answers": "d\ne"}]


def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path) -> None:
    import csv
    import json

    for suffix, delimiter in ((".csv", ","), (".tsv", "\t")):
        with (tmp_path / f"x{suffix}").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(ROWS[0]), delimiter=delimiter)
            writer.writeheader()
            writer.writerows(ROWS)
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    (tmp_path / "x.jsonl").write_text("\ufeff" + "\n\n".join(lines) + "\n", encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "X.PARQUET")
    (tmp_path / "x.json").write_text("\ufeff" + json.dumps(ROWS, indent=1), encoding="utf-8")
    for name in ("x.csv", "x.tsv", "x.json", "x.jsonl", "X.PARQUET"):
        assert read_rows(tmp_path / name) == ROWS, name


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"x": 1}\n{"x": \n', r"a.jsonl, line 2: not JSON .*each line must be one JSON object"),
        ("a.jsonl", b'{"x": 1}\n[1]\n', r"line 2: expected a JSON object, got \[1\]"),
        ("a.json", b'{"x": 1}', r"a\.json must hold a JSON list of objects"),
        ("a.json", b'[{"x": 1}, 2]', r"a\.json must hold a JSON list of objects"),
        ("a.json", b'[{"x": 1,}]', r"a\.json: not JSON"),
        ("a.json", b"[]", "holds no rows"),
        ("a.json", b'[{"x": "' + b"a" * 1_000_000 + b'"}]', "row 1: a row may have 1,000,000 characters"),
        ("a.csv", b"x,y\n1,2\n1\n", r"a.csv, line 3: expected 2 columns"),
        ("a.csv", b"x,y\n1,2\nx,y\n3,4\n", r"a.csv, line 3: the header once more; remove this line"),
        ("a.tsv", b"x\ty\n1\t2\n\xef\xbb\xbfx\ty \n", r"a.tsv, line 3: the header once more"),
        ("a.csv", b"x,y\n1,2,3\n", r"line 2: expected 2 columns"),
        ("a.tsv", b"x\ty\n", "holds no rows"),
        ("a.jsonl", b"", "holds no rows"),
        ("a.csv", b"x,y\n\xff,\xfe\n", "not UTF-8 text.*save it as UTF-8"),
        ("a.parquet", b"PAR1 no", "not a readable Parquet file"),
        ("a.csv", b"x,y,x\n1,2,3\n", "a.csv, line 1: 'x' occurs twice"),
        ("a.csv", b"\nx,y\n1,2\n", "a.csv, line 1: expected the names of the columns, got an empty line"),
        ("a.csv", b",,\n1,2,3\n", "a.csv, line 1: '' occurs twice"),
        ("a.jsonl", b'{"x": 1}\n{"x": 1, "x": 2}\n', "line 2: 'x' occurs twice"),
        ("a.jsonl", b'{"x": ' + b"9" * 5000 + b"}", "line 1: not JSON .*4300 digits"),
        ("a.jsonl", b"[" * 100_000, "line 1: not JSON .*recursion"),
        ("a.jsonl", b'{"x": "' + b"a" * 1_000_000 + b'"}', "line 1: a line may have 1,000,000 characters"),
        ("a.csv", b"x,y\n1,2\n" + b"a" * 1_000_001, "line 3: a line may have 1,000,000 characters"),
        ("a.xlsx", b"", r"must end in .json, .jsonl, .csv, .tsv, .parquet"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_line(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_rows(tmp_path / name)


def test_a_parquet_file_with_a_column_twice_or_a_row_without_end_is_refused(tmp_path: Path) -> None:
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["x", "x"])
    for table, message in ((twice, "'x' occurs twice"), (pa.table({"x": ["a", "b" * 1_000_001]}), "row 2: a row may")):
        pq.write_table(table, tmp_path / "a.parquet")
        with pytest.raises(DataError, match=message):
            read_rows(tmp_path / "a.parquet")


def test_a_line_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    endless = tmp_path / "endless.jsonl"
    with endless.open("wb") as file:
        file.truncate(10**12)  # a terabyte of zeros that takes no room on the disk
    with pytest.raises(DataError, match="line 1: a line may have 1,000,000 characters"):
        read_rows(endless)


def test_rows_are_numbered_through_all_batches_of_a_parquet_file(tmp_path: Path) -> None:
    rows = [{"x": str(i)} for i in range(1000)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert read_rows(tmp_path / "a.parquet") == rows


def test_an_absent_file_and_a_folder_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no file at .*absent.csv$"):
        read_rows(tmp_path / "absent.csv")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(DataError, match="that is a folder"):
        read_rows(tmp_path / "folder.csv")


def test_a_quote_that_is_not_closed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "facts.csv"
    path.write_text('subject,relation,answers\nFrance,capital,"Paris\nGermany,capital,Berlin\n')
    with pytest.raises(DataError, match="unexpected end of data"):
        list(read_rows(path))
