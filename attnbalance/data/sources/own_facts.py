"""A user's own facts: a .json, .jsonl, .csv, .tsv or .parquet file with one fact in each row."""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from attnbalance.data.conflicts import Conflict
from attnbalance.data.facts import Fact, FactSet
from attnbalance.data.sources.table_files import Record, parse_json, read_rows
from attnbalance.errors import DataError

REQUIRED = ("subject", "relation", "answers")
OPTIONAL = ("popularity", "question", "subject_start", "statement")

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
"""What a cell of text with a number looks like; Python would also read "1_0" and "nan"."""


SEPARATED = re.compile(r"\s*[^\[\s].*([|;]| / ).*", re.DOTALL)
"""A cell with a "|", ";" or " / " that is no JSON list."""

ENTITY = re.compile(r"&(?:[a-zA-Z]{2,8}\d{0,2}|#\d{1,7}|#x[0-9a-fA-F]{1,6});")
"""A character as HTML writes it, such as "&amp;"."""

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]")
"""A control character, such as NUL or a tab, or another that is not seen: a soft hyphen, a space of no width, a mark of
direction or a byte order mark. Joiners are seen: letters join or stay apart."""

COLLECTION = re.compile(
    r"""(?:c|array|list|tuple|set|frozenset)?\("""
    r"""(?:\s*(['"\[{]).*['"\]}]\s*,?(\s*dtype=.*)?|\s*-?[\d.]+\s*(,\s*-?[\d.]+\s*)+,?)\)|\{.*\}""",
    re.DOTALL,
)
"""How Python, pandas, R and databases write several values into one cell."""

CHANGED = re.compile(
    r"""-?[\d,]*\d\.0+|-?\d+,0+|-?\d+(\.\d+)?[eE][+-]?\d+|=".*"|TRUE|FALSE"""
    r"""|[+-]?\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:?\d\d)?"""
    r"""|\d\d?[/.]\d\d?[/.]\d{4} \d\d?:\d\d(:\d\d)?( [AP]M)?|-\d{9,14}""",
    re.ASCII,
)
"""A number, date or text as tables and spreadsheet programs rewrite it: 1867.0, 1E+05, ="007", TRUE,
1867-11-07 00:00:00, 11/7/1867 0:00, -3223584000000 (in milliseconds)."""

LISTED = re.compile(r"""\[\s*(["']).*\1\s*\]""")
"""A JSON or Python list of texts."""
QUOTED = re.compile(r""""[^"]*"|'[^']*'|\u201c[^\u201d]*\u201d|\u2018[^\u2019]*\u2019|\u00ab[^\u00bb]*\u00bb""")
"""A text within quotation marks, such as a JSON text."""

MISSING = {
    *("na", "n/a", "n.a.", "#na", "#n/a", "nan", "-nan", "nat", "null", "(null)", "none", "nil", "<na>", "\\n"),
    *("#null!", "#ref!", "#name?", "#value!", "#div/0!", "#num!"),
}
"""How tables write a cell without a value, in small letters."""

NO_ANSWER = MISSING | {"?", "-", "--", "unknown"}
"""How tables and people write that an answer is missing; the last four may be the name of a song, and so a subject."""


def load_own(path: str | Path) -> FactSet:
    """Facts from a table with one fact in each row, and the columns of `REQUIRED` and, optionally, `OPTIONAL`.

    `answers` is a list, or a string that is one answer or a JSON list of them. Subjects, relations and answers are text
    or whole numbers, which are read as text. White space around a cell is left out; `subject_start` counts it. Warns of
    cells that do not look like one answer: with "|" or ";", in quotation marks, 1867.0, "N/A", "AT&amp;T", with control
    characters, or read in a wrong encoding. Raises `DataError`, naming the row and the column, for a missing or unknown
    column and for what `Fact` refuses. Rows with the same subject, relation and question are merged, and counted in
    `dropped`.
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
    warn_of_cells(path, facts, [[row["answers"]] for row in rows])
    merged = FactSet(tuple(facts), str(path)).merged()
    repeated = len(facts) - len(merged)
    dropped = {"merged into an earlier row of the same question": repeated} if repeated else {}
    return FactSet(merged.facts, str(path), dropped)


def warn_of_cells(path: str | Path, facts: Sequence[Fact], cells: Sequence[Sequence[object]]) -> None:
    """Warn of facts whose cells hold several answers, or were changed by spreadsheet programs and pandas.

    cells: the cells from which each fact's answers were read, as they stand in the file.
    """
    answers = [(*fact.answers, *(fact.memory_answers if isinstance(fact, Conflict) else ())) for fact in facts]
    texts = [[ENTITY.sub("", cell) for cell in own if isinstance(cell, str)] for own in cells]
    checks = {
        """a '|', ';' or ' / ' in one answer; write several as a JSON list: ["first", "second"]""": [
            any(map(SEPARATED.fullmatch, own)) for own in texts
        ],
        "a text that is itself a list, as of lists that were written twice": [
            any(map(LISTED.fullmatch, (fact.subject, *own))) for fact, own in zip(facts, answers, strict=True)
        ],
        "a subject that stands for a missing value": [fact.subject.lower() in MISSING for fact in facts],
        "an answer that stands for a missing value": [
            any(text.lower() in NO_ANSWER for text in own) for own in answers
        ],
        """a number or date as a spreadsheet rewrites it (1867.0, 1E+05, ="007", 1867-11-07 00:00:00)""": [
            any(map(CHANGED.fullmatch, (fact.subject, *own))) for fact, own in zip(facts, answers, strict=True)
        ],
        "a character as HTML writes it (&amp;)": [
            any(map(ENTITY.search, (fact.subject, *own))) for fact, own in zip(facts, answers, strict=True)
        ],
        "characters that a wrong encoding has left (Ã§ for ç, or U+FFFD)": [
            any(map(_is_garbled, (fact.subject, *own))) for fact, own in zip(facts, answers, strict=True)
        ],
        "a control character or one that is not seen, such as NUL": [
            any(map(CONTROL.search, (fact.subject, *own))) for fact, own in zip(facts, answers, strict=True)
        ],
        "an answer in quotation marks, which count as a part of it": [
            any(map(QUOTED.fullmatch, own)) for own in answers
        ],
    }
    for what, hits in checks.items():
        if any(hits):
            first = hits.index(True)
            cell = f"{facts[first].subject!r}: {', '.join(map(repr, answers[first]))}"
            warnings.warn(
                f"{path}: {sum(hits)} of {len(facts)} facts have {what} (first: {cell[:200]}); fix these rows, or "
                "ignore this",
                stacklevel=3,
            )


def _is_garbled(text: str) -> bool:
    """Whether a text holds U+FFFD, or is what UTF-8 looks like that was read as Latin-1 or Windows-1252."""
    for encoding in ("latin-1", "cp1252"):
        with suppress(UnicodeError):
            if text.encode(encoding).decode() != text:
                return True
    return "\ufffd" in text


def _blank(cell: object) -> bool:
    """Whether a cell says nothing: absent, empty or white space."""
    return cell is None or not str(cell).strip()


def _fact(row: Record, where: str) -> Fact:
    try:
        question, start = question_and_start(row)
        return Fact(
            subject=text_of(row["subject"], "subject").strip(),
            relation=text_of(row["relation"], "relation").strip(),
            answers=answers_of(row["answers"]),
            popularity=popularity_of(row.get("popularity")),
            question=question,
            subject_start=start,
            statement=statement_of(row.get("statement")),
        )
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


def text_of(value: object, column: str) -> str:
    """A cell as text: text as it is, a whole number (such as a year) as its digits; other values raise `DataError`."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise DataError(f"{column} must be text, got {value!r}")
    return str(value)


def answers_of(value: object) -> tuple[str, ...]:
    """A cell of answers: a list, one answer, or a JSON list of them in a text."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = parse_json(value)
        except DataError as error:
            raise DataError(f"answers {value!r} is not a JSON list ({error})") from error
    if isinstance(value, str) and COLLECTION.fullmatch(value.strip()):
        raise DataError(
            f"answers must be one answer or a JSON list, got {value!r}; if this is one answer, write a list of one"
        )
    texts = [text_of(answer, "an answer").strip() for answer in (value if isinstance(value, list) else [value])]
    return tuple(dict.fromkeys(texts))


def question_and_start(row: Record) -> tuple[str | None, Any]:
    """The question of a row without the white space around it, and where its subject then starts; None for neither."""
    start, cell = start_of(row.get("subject_start")), row.get("question")
    if _blank(cell):
        return None, start
    question = text_of(cell, "question")
    if isinstance(start, int) and not isinstance(start, bool) and start >= 0:
        before = len(question) - len(question.lstrip())
        if start < before:
            raise DataError(f"subject_start {start} must not lie in the white space before the question {question!r}")
        start -= before
    return question.strip(), start


def start_of(value: object) -> Any:
    """A cell of subject_start: None if empty, the number in a text; other values, which `Fact` checks, as they are.

    Tables write 4 as 4.0 in a column with empty cells.
    """
    if value in (None, ""):
        return None
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return int(float(value)) if isinstance(value, str) and re.fullmatch(r"\d{1,9}(\.0)?", value, re.ASCII) else value


def statement_of(value: object) -> str | None:
    """A cell of statement: None if it says nothing."""
    return None if _blank(value) else text_of(value, "statement").strip()


def popularity_of(value: object) -> Any:
    """A cell of popularity: None if empty, the number in a text; other values, which `Fact` checks, as they are."""
    if value in (None, ""):
        return None
    return float(value) if isinstance(value, str) and NUMBER.fullmatch(value.strip()) else value
