"""A user's own facts: one row a fact, in .jsonl, .csv, .tsv or .parquet."""

from __future__ import annotations

import difflib
import json
import math
from pathlib import Path

from attnbalance.datasets.tables import Row, read_rows
from attnbalance.errors import DataError
from attnbalance.facts import Fact, FactSet

REQUIRED = ("subject", "relation", "answers")
OPTIONAL = ("popularity", "question", "subject_start")


def load_own(path: str | Path) -> FactSet:
    """Facts from a table with one row a fact and the columns of `REQUIRED` and, optionally, `OPTIONAL`.

    `answers` is a list, or a string that is one answer or a JSON list of them. Raises `DataError`, naming the row and
    the column, for a missing or unknown column, an empty subject, relation or answer, and a popularity that is not a
    number of at least 0. Rows alike in subject, relation and question are merged, and counted in `dropped`.
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
    every = FactSet(tuple(facts), str(path))
    merged = every.merged()
    same = len(every) - len(merged)
    return FactSet(merged.facts, str(path), {"merged into an earlier row of the same question": same} if same else {})


def _fact(row: Row, where: str) -> Fact:
    question, start = row.get("question"), row.get("subject_start")
    try:
        return Fact(
            subject=str(row["subject"]).strip(),
            relation=str(row["relation"]).strip(),
            answers=_answers(row["answers"]),
            popularity=popularity_of(row.get("popularity")),
            question=None if question in (None, "") else str(question),
            subject_start=None if start in (None, "") else int(start),  # pyright: ignore[reportArgumentType]
        )
    except (DataError, ValueError, TypeError) as error:
        raise DataError(f"{where}: {error}") from error


def _answers(value: object) -> tuple[str, ...]:
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise DataError(f"answers {value!r} is not a JSON list ({error})") from error
    answers = value if isinstance(value, list) else [value]
    kept = [answer for answer in answers if isinstance(answer, (str, int, float)) and str(answer).strip()]
    if len(kept) != len(answers) or not kept:
        raise DataError(f"answers must be one or more texts, none of them empty; got {value!r}")
    return tuple(dict.fromkeys(str(answer).strip() for answer in kept))


def popularity_of(value: object) -> float | None:
    """A popularity as a number, None where the cell is empty; raises `DataError` for anything else."""
    if value in (None, ""):
        return None
    try:
        number = float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise DataError(f"popularity must be a number of at least 0, got {value!r}")
    return number
