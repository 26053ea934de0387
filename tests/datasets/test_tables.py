"""Rows of tables, and errors that name the file and the line."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from attnbalance.datasets.tables import read_rows
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
    for name in ("x.csv", "x.tsv", "x.jsonl", "X.PARQUET"):
        assert read_rows(tmp_path / name) == ROWS, name


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"x": 1}\n{"x": \n', r"a.jsonl, line 2: not JSON .*each line must be one JSON object"),
        ("a.jsonl", b'{"x": 1}\n[1]\n', r"line 2: expected a JSON object, got \[1\]"),
        ("a.csv", b"x,y\n1,2\n1\n", r"a.csv, line 3: expected 2 columns"),
        ("a.csv", b"x,y\n1,2,3\n", r"line 2: expected 2 columns"),
        ("a.tsv", b"x\ty\n", "holds no rows"),
        ("a.jsonl", b"", "holds no rows"),
        ("a.csv", b"x,y\n\xff,\xfe\n", "not UTF-8 text.*save it as UTF-8"),
        ("a.parquet", b"PAR1 no", "not a readable Parquet file"),
        ("a.xlsx", b"", r"must end in .jsonl, .csv, .tsv, .parquet"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_line(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_rows(tmp_path / name)


def test_an_absent_file_and_a_folder_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no facts file at .*absent.csv$"):
        read_rows(tmp_path / "absent.csv")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(DataError, match="that is a folder"):
        read_rows(tmp_path / "folder.csv")
