"""Multiple-choice questions from MMLU's files."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from attnbalance.data.choices import LETTERS, Choice
from attnbalance.data.instructions import InstructionSet
from attnbalance.data.sources.table_files import read_cells
from attnbalance.errors import DataError

PARTS = re.compile(r"_(dev|val|test|train)$")


def choice_files(path: str | Path) -> list[Path]:
    """The files of questions at a path: itself, or the .csv files of a folder and its subfolders, by name.

    Raises `DataError` where there is none.
    """
    path = Path(path)
    files = sorted(path.rglob("*.csv")) if path.is_dir() else [path] if path.is_file() else []
    if not files:
        raise DataError(f"no questions at {path}: name a .csv file of MMLU's form, or a folder that holds some")
    return files


def load_choices(path: str | Path) -> InstructionSet:
    """The questions of .csv files as MMLU has them: without a header, each row a question, its choices and a letter.

    A file's name is the topic: `prehistory_test.csv` holds questions about prehistory. A question that was read before
    is dropped and counted. Raises `DataError`, naming file and line, for rows that are no question with choices.
    """
    rows, dropped = dict[str, Choice](), Counter[str]()
    for file in choice_files(path):
        topic = PARTS.sub("", file.stem).replace("_", " ")
        for line, cells in read_cells(file):
            question, *choices, letter = cells if len(cells) > 2 else [*cells, "", ""]
            try:
                row = Choice(question, f" {letter.strip()}", choices=tuple(map(str.strip, choices)), topic=topic)
            except DataError as error:
                raise DataError(
                    f"{file}, line {line}: {error}; expected a question, 2 to {len(LETTERS)} choices and a letter"
                ) from error
            if row.prompt in rows:
                dropped["a question that was read before"] += 1
            else:
                rows[row.prompt] = row
    if not rows:
        raise DataError(f"{path} holds no questions")
    return InstructionSet(tuple(rows.values()), str(path), dict(dropped))
