"""Instructions from files with Alpaca's columns, and from SQuAD."""

from __future__ import annotations

import itertools
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attnbalance.arguments import expects
from attnbalance.data.instructions import Instruction, InstructionSet
from attnbalance.data.sources.own_facts import MISSING
from attnbalance.data.sources.table_files import Record, read_rows
from attnbalance.errors import DataError

COLUMNS = ("instruction", "output", "input")

CHAT_COLUMNS = ("system", "system_prompt", "history")
"""What some collections with Alpaca's columns put before the instruction."""

NO_INPUT = re.compile(r"\W*no\W*input\W*", re.IGNORECASE)
"""How some rows of Alpaca say that they have no input, e.g. "<noinput>"."""


@expects(path=(str, Path))
def load_instructions(path: str | Path) -> InstructionSet:
    """Instructions from a .json list, or a .jsonl, .csv, .tsv or .parquet table, with the columns of Alpaca, or SQuAD.

    Alpaca's are `instruction`, `output` and, optionally, `input` (Taori et al. 2023); other columns are not read.
    SQuAD (Rajpurkar et al. 2016) may be its own .json file, or a table with the columns `question`, `context` and
    `answers`. The question becomes the instruction, its context the input, and its first answer the output. White space
    around the texts is cut off. Rows without an output are dropped and counted. Warns of texts that stand for a missing
    value, such as an input "<noinput>". Raises `DataError` for a file that cannot be read, for rows that lack a column,
    have an empty instruction or text in one of `CHAT_COLUMNS`, and if no row is left.
    """
    dropped, instructions = Counter[str](), []
    for where, row in _rows(path):
        if missing := [column for column in COLUMNS[:2] if column not in row]:
            raise DataError(f"{where}: no column {missing[0]!r}; a file of instructions needs {', '.join(COLUMNS[:2])}")
        if chat := [column for column in CHAT_COLUMNS if _says(row.get(column))]:
            raise DataError(
                f"{where}: {chat[0]!r} cannot be trained on, got {row[chat[0]]!r:.80}; put its text into "
                "'instruction', or remove the column"
            )
        texts = {column: "" if row.get(column) is None else row[column] for column in COLUMNS}
        if wrong := [column for column, text in texts.items() if not isinstance(text, str)]:
            raise DataError(f"{where}: {wrong[0]!r} must be text, got {texts[wrong[0]]!r:.80}")
        stripped = {column: str(text).strip() for column, text in texts.items()}
        if not stripped["output"]:
            dropped["no output"] += 1
            continue
        try:
            instructions.append(Instruction(**stripped))
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
    if not instructions:
        raise DataError(f"{path} holds no instruction with an output")
    _warn_of_missing(path, instructions)
    return InstructionSet(tuple(instructions), str(path), dict(dropped))


def _rows(path: str | Path) -> Iterator[tuple[str, Record]]:
    """The rows of a file, each with its place; a question of SQuAD is a row with Alpaca's columns."""
    questions = itertools.count(1)
    for number, row in enumerate(read_rows(path), 1):
        try:
            if "instruction" not in row and "paragraphs" in row:
                for paragraph in _list(row["paragraphs"]):
                    for question in _list(paragraph["qas"]):
                        answered = _answered(question["question"], paragraph["context"], question["answers"])
                        yield f"{path}, question {next(questions)}", answered
                continue
            if "instruction" not in row and {"question", "context", "answers"} <= row.keys():
                row = _answered(row["question"], row["context"], row["answers"])
        except (KeyError, TypeError, IndexError) as error:
            raise DataError(f"{path} is not in SQuAD's form ({error!r}): {row!r:.80}") from error
        yield f"{path}, row {number}", row


def _answered(question: object, context: object, answers: Any) -> Record:
    """A question of SQuAD; its answers are a list of objects, or one object of lists (on the Hub)."""
    texts = _list(answers["text"]) if isinstance(answers, dict) else [answer["text"] for answer in _list(answers)]
    return {"instruction": question, "input": context, "output": texts[0] if texts else ""}


def _list(value: Any) -> list[Any]:
    """A value that must be a list."""
    if not isinstance(value, list):
        raise TypeError(f"expected a list, got {value!r:.80}")
    return value


def _says(cell: object) -> bool:
    """Whether a cell holds more than nothing, an empty list or a sign for a missing value."""
    text = "" if cell is None else str(cell).strip()
    return text not in ("", "[]") and text.lower() not in MISSING


def _warn_of_missing(path: str | Path, instructions: Sequence[Instruction]) -> None:
    """Warn of texts that stand for a missing value: they are trained on as they are."""
    for column in COLUMNS:
        texts = [getattr(row, column) for row in instructions]
        missing = [
            text for text in texts if text.lower() in MISSING or (column == "input" and NO_INPUT.fullmatch(text))
        ]
        if missing:
            warnings.warn(
                f"{path}: {len(missing)} of {len(texts)} rows have an {column} that stands for a missing value (first: "
                f"{missing[0]!r}); leave these cells empty, or ignore this",
                stacklevel=4,
            )


def load_names(path: str | Path) -> list[str]:
    """Names from a UTF-8 text file, one a line, for `InstructionSet.not_naming`; empty lines are skipped.

    Raises `DataError` for a file that cannot be read and for one without names.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}; save it as UTF-8") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error}") from error
    names = [line.strip() for line in lines if line.strip()]
    if not names:
        raise DataError(f"{path} holds no names; write one a line")
    return names
