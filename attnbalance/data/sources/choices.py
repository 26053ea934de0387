"""Multiple-choice questions from MMLU's files."""

from __future__ import annotations

import os
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
    within = (Path(folder) / name for folder, _, names in os.walk(path, followlinks=True) for name in names)
    files = [path] if path.is_file() else sorted(file for file in within if file.suffix.lower() == ".csv")
    if not files:
        raise DataError(f"no questions at {path}: name a .csv file of MMLU's form, or a folder that holds some")
    return files


def load_choices(path: str | Path) -> InstructionSet:
    """The questions of .csv files as MMLU has them: without a header, each row a question, its choices and a letter.

    A file's name is the topic: `prehistory_test.csv` holds questions about prehistory. A question that was read before
    is dropped and counted, and one that comes with two letters is dropped whole. Raises `DataError`, naming file and
    line, for rows that are no question with choices.
    """
    rows, dropped, contradicted = dict[str, Choice](), Counter[str](), set[str]()
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
            first = rows.setdefault(row.prompt, row)
            if first.answer != row.answer:
                contradicted.add(row.prompt)
            elif first is not row:
                dropped["a question that was read before"] += 1
    if contradicted:
        dropped["a question that comes with two letters"] = len(contradicted)
        rows = {prompt: row for prompt, row in rows.items() if prompt not in contradicted}
    if not rows:
        raise DataError(f"{path} holds no questions")
    return InstructionSet(tuple(rows.values()), str(path), dict(dropped))
