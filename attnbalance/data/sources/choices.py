"""Multiple-choice questions from MMLU's files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from attnbalance.arguments import expects
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
    files = [path] if path.is_file() else sorted(_csv_files(path, set()))
    if not files:
        raise DataError(f"no questions at {path}: name a .csv file of MMLU's form, or a folder that holds some")
    return files


def _csv_files(folder: Path, seen: set[Path]) -> Iterator[Path]:
    """The .csv files of a folder and its subfolders, each folder once: links may lead back to one."""
    seen.add(folder.resolve())
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir() and path.resolve() not in seen:
            yield from _csv_files(path, seen)
        elif path.is_file() and path.suffix.lower() == ".csv":
            yield path


@expects(path=(str, Path))
def load_choices(path: str | Path) -> InstructionSet:
    """The questions of .csv files as MMLU has them: without a header, each row a question, its choices and a letter.

    A file's name is the topic: `prehistory_test.csv` holds questions about prehistory. Repeats of a question are
    dropped and counted. A question that occurs with two different letters is dropped altogether. Raises `DataError`,
    naming file and line, for rows that are no question with choices.
    """
    rows, times, contradicted = dict[str, Choice](), Counter[str](), set[str]()
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
            times[row.prompt] += 1
            if rows.setdefault(row.prompt, row).answer != row.answer:
                contradicted.add(row.prompt)
    again = {prompt: count - 1 for prompt, count in times.items() if prompt not in contradicted}
    dropped = {
        "a question that was read before": sum(again.values()),
        "a question that comes with two letters": sum(times[prompt] for prompt in contradicted),
    }
    rows = {prompt: row for prompt, row in rows.items() if prompt not in contradicted}
    if not rows:
        raise DataError(f"{path} holds no questions")
    return InstructionSet(
        tuple(rows.values()), str(path), {reason: count for reason, count in dropped.items() if count}
    )
