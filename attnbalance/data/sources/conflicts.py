"""Knowledge conflicts from files: contexts with a question and two answers, and the quotes of memo-trap."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from attnbalance.data.conflicts import Conflict, NoConflictError
from attnbalance.data.facts import FactSet
from attnbalance.data.sources.own_facts import (
    answers_of,
    popularity_of,
    question_and_start,
    statement_of,
    text_of,
    warn_of_cells,
)
from attnbalance.data.sources.table_files import Record, read_rows
from attnbalance.errors import DataError

REQUIRED = ("context", "question", "answer", "memory_answer")
OPTIONAL = ("subject", "relation", "popularity", "subject_start", "statement")
PLURAL = {"answers": "answer", "memory_answers": "memory_answer"}
"""Columns as `Conflict.as_dict` writes them, and as files of conflicts call them."""
QUOTES = ("prompt", "classes", "answer_index")
"""The columns of memo-trap (Liu et al.; McKenzie et al. 2024)."""
SWAPPED = {"question": "question", "sub_context": "context", "sub_answer": "answer", "org_answer": "memory_answer"}
"""The columns of NQ-Swap (Longpre et al. 2021), which also has the original's `org_context`, and ours."""


def load_conflicts(path: str | Path | None = None) -> FactSet:
    """Conflicts from a .json list, or a .jsonl, .csv, .tsv or .parquet table, with the columns of `REQUIRED`.

    These are the columns of Goyal et al.'s world facts and capitals. `answer` and `memory_answer` are a text or a JSON
    list of accepted ones; files that this package wrote, with `answers` and `memory_answers`, are read as well. Without
    the column `subject` the whole question counts as the subject. A table with the columns of `QUOTES` is read as
    memo-trap: the instruction becomes the context, and the beginning of the quote becomes the question. The wanted
    ending is the context's answer, and the usual ending is the remembered one. A table with the columns of `SWAPPED` is
    read as NQ-Swap: the swapped passage is the context, and the original answer is the remembered one. Rows that are
    no conflict (see `Conflict`), and rows that repeat an earlier one, are dropped and counted. Warns of cells that do
    not look like one answer (see `warn_of_cells`), but for quotes, which may end in any word. Raises `DataError` for a
    file that cannot be read, and if no row is left.
    """
    if path is None:
        raise DataError("conflicts come from a file: conflicts:PATH")
    name, dropped, conflicts = f"conflicts:{path}", Counter[str](), list[Conflict]()
    cells = dict[Conflict, list[object]]()
    for number, row in enumerate(read_rows(path), 1):
        where = f"{name}, row {number}"
        make = _quote if set(QUOTES) <= set(row) else _conflict
        try:
            row = _renamed(row)
            conflicts.append(make(row))
            if make is _conflict:
                cells[conflicts[-1]] = [row.get(column) for column in (*PLURAL, *PLURAL.values())]
        except NoConflictError as error:
            dropped[error.reason] += 1
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
    if not conflicts:
        raise DataError(f"{name} holds no conflict: {dict(dropped)}")
    warn_of_cells(path, list(cells), list(cells.values()))
    distinct = tuple(dict.fromkeys(conflicts))
    if repeated := len(conflicts) - len(distinct):
        dropped["repeated"] = repeated
    return FactSet(distinct, name, dict(dropped))


def _renamed(row: Record) -> Record:
    """A row with the columns of `SWAPPED` under our names; others as they are."""
    if not set(SWAPPED) <= set(row):
        return row
    if both := [ours for theirs, ours in SWAPPED.items() if ours in row and ours != theirs]:
        raise DataError(f"NQ-Swap's columns and {both[0]!r} in one table; keep one of them")
    return {SWAPPED.get(name, name): row[name] for name in row if name != "org_context"}


def _conflict(row: Record) -> Conflict:
    row = {name if row.keys() >= {name, PLURAL.get(name)} else PLURAL.get(name, name): row[name] for name in row}
    missing = [column for column in REQUIRED if row.get(column) in (None, "", [])]
    unknown = [column for column in row if column not in (*REQUIRED, *OPTIONAL)]
    if missing or unknown:
        what = f"no {missing[0]!r}" if missing else f"unknown column {unknown[0]!r}"
        raise DataError(f"{what}; a file of conflicts needs {', '.join(REQUIRED)}, and may have {', '.join(OPTIONAL)}")
    question, start = question_and_start(row)
    return Conflict(
        subject=text_of(row.get("subject") or question, "subject").strip(),
        relation=text_of(row.get("relation") or "conflict", "relation").strip(),
        answers=answers_of(row["answer"]),
        popularity=popularity_of(row.get("popularity")),
        question=question,
        subject_start=start,
        statement=statement_of(row.get("statement")),
        context=text_of(row["context"], "context").strip(),
        memory_answers=answers_of(row["memory_answer"]),
    )


def _quote(row: Record) -> Conflict:
    instruction, colon, start = str(row["prompt"]).partition('": ')
    try:
        ends = [str(end).strip(" .") for end in ast.literal_eval(str(row["classes"]))]
        index = int(str(row["answer_index"]))
    except (ValueError, SyntaxError, TypeError) as error:
        raise DataError(f"classes must be a list of two texts and answer_index 0 or 1, got {dict(row)}") from error
    if len(ends) != 2 or index not in (0, 1):
        raise DataError(f"classes must be a list of two texts and answer_index 0 or 1, got {dict(row)}")
    if not colon:
        raise NoConflictError("no instruction that quotes a word", start)
    return Conflict(
        start.strip(),
        "quote",
        (ends[index],),
        question=start.strip(),
        context=f'{instruction}"',
        memory_answers=(ends[1 - index],),
    )
