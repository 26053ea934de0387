"""A user's own facts: a .jsonl, .csv, .tsv or .parquet file with one fact in each row."""

from __future__ import annotations

import difflib
import math
import re
from pathlib import Path

from attnbalance.data.facts import Fact, FactSet
from attnbalance.data.sources.table_files import Record, parse_json, read_rows
from attnbalance.errors import DataError

REQUIRED = ("subject", "relation", "answers")
OPTIONAL = ("popularity", "question", "subject_start")


def load_own(path: str | Path) -> FactSet:
    """Facts from a table with one fact in each row, and the columns of `REQUIRED` and, optionally, `OPTIONAL`.

    `answers` is a list, or a string that is one answer or a JSON list of them. Subjects, relations and answers are text
    or whole numbers, which are read as text. Raises `DataError`, naming the row and the column, for a missing or
    unknown column, for a subject, relation or answer that is empty or not text, and for a popularity that is not a
    number of at least 0. Rows with the same subject, relation and question are merged, and counted in `dropped`.
    """
    rows = read_rows(path)
    known = (*REQUIRED, *OPTIONAL)
    facts = []
    for number, row in enumerate(rows, 1):
        where = f"{path}, row {number}"
        unknown = [column for column in row if column not in known]
        if unknown:
            close = difflib.get_close_matches(unknown[0], known, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            if {"subj", "prop", "obj"} <= set(row):
                hint = f"; this looks like PopQA: write popqa:{path}"
            names = ", ".join(map(repr, unknown))
            raise DataError(f"{where}: unknown column {names}{hint}; a facts file has only {', '.join(known)}")
        missing = [column for column in REQUIRED if row.get(column) in (None, "", [])]
        if missing:
            raise DataError(f"{where}: no {missing[0]!r}; a facts file needs {', '.join(REQUIRED)} in every row")
        facts.append(_fact(row, where))
    merged = FactSet(tuple(facts), str(path)).merged()
    repeated = len(facts) - len(merged)
    dropped = {"merged into an earlier row of the same question": repeated} if repeated else {}
    return FactSet(merged.facts, str(path), dropped)


def _fact(row: Record, where: str) -> Fact:
    question, start = row.get("question"), row.get("subject_start")
    try:
        return Fact(
            subject=text_of(row["subject"], "subject").strip(),
            relation=text_of(row["relation"], "relation").strip(),
            answers=_answers(row["answers"]),
            popularity=popularity_of(row.get("popularity")),
            question=None if question in (None, "") else text_of(question, "question"),
            subject_start=None if start in (None, "") else _start(start),
        )
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


def text_of(value: object, column: str) -> str:
    """A cell as text: text as it is, a whole number (such as a year) as its digits; other values raise `DataError`."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise DataError(f"{column} must be text, got {value!r}")
    return str(value)


def _answers(value: object) -> tuple[str, ...]:
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = parse_json(value)
        except DataError as error:
            raise DataError(f"answers {value!r} is not a JSON list ({error})") from error
    texts = [text_of(answer, "an answer").strip() for answer in (value if isinstance(value, list) else [value])]
    if not texts or not all(texts):
        raise DataError(f"answers must be one or more texts, none of them empty; got {value!r}")
    return tuple(dict.fromkeys(texts))


def _start(value: object) -> int:
    """A cell of subject_start as a number; a CSV file holds its digits."""
    if isinstance(value, bool) or not re.fullmatch(r"\d{1,9}", str(value), re.ASCII):
        raise DataError(f"subject_start must be a whole number of at least 0, got {value!r}")
    return int(str(value))


def popularity_of(value: object) -> float | None:
    """A popularity as a number, None for an empty cell; other values raise `DataError`."""
    if value in (None, ""):
        return None
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise DataError(f"popularity must be a number of at least 0, got {value!r}")
    return number
