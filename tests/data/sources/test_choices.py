"""MMLU's files: rows, topics, folders, and what is wrong with a row, by file and line."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from attnbalance.data.choices import Choice
from attnbalance.data.sources.choices import load_choices
from attnbalance.errors import DataError


def test_a_file_is_read_as_the_csv_module_reads_it(mmlu: Path) -> None:
    file = mmlu / "test" / "high_school_us_history_test.csv"
    with file.open(newline="", encoding="utf-8") as stream:
        raw = list(csv.reader(stream))
    questions = load_choices(file)
    assert len(questions) + sum(questions.dropped.values()) == len(raw) == 204
    kept = {row.instruction: row for row in questions.rows if isinstance(row, Choice)}
    for question, *choices, letter in raw:
        assert kept[question].choices == tuple(choice.strip() for choice in choices)
        assert kept[question].output == f" {letter}"
        assert kept[question].topic == "high school us history"


def test_a_folder_is_read_with_its_subfolders_and_repeated_questions_are_counted(tmp_path: Path) -> None:
    (tmp_path / "val").mkdir()
    (tmp_path / "val" / "pre_history_val.csv").write_text('"Which, of these?",iron,stone,B\n\nWho?,he,she,we,A\n')
    (tmp_path / "pre_history_dev.csv").write_text('"Which, of these?",iron,stone,B\n')
    questions = load_choices(tmp_path)
    assert [(row.instruction, row.output) for row in questions.rows] == [("Which, of these?", " B"), ("Who?", " A")]
    assert {row.topic for row in questions.rows if isinstance(row, Choice)} == {"pre history"}
    assert questions.dropped == {"a question that was read before": 1}


def test_a_question_with_two_letters_is_dropped_whole_and_counted(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("Which?,iron,stone,B\nWho?,he,she,A\nWhich?,iron,stone,A\nWhich?,iron,stone,B\n")
    questions = load_choices(tmp_path)
    assert [row.instruction for row in questions.rows] == ["Who?"]
    assert questions.dropped == {"a question that comes with two letters": 3}


def test_linked_folders_and_endings_in_capitals_are_read(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.CSV").write_text("Which?,iron,stone,B\n")
    (tmp_path / "mmlu").mkdir()
    (tmp_path / "mmlu" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "mmlu")
    questions = load_choices(tmp_path / "mmlu")
    assert [row.instruction for row in questions.rows] == ["Which?"]
    assert questions.dropped == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Which?,iron,stone,C\n", r"line 1: .*the letter of a choice, got ' C'"),
        ("Which?,iron,stone,B\nWho?,he,A\n", r"line 2: a question must have 2 to 10 choices, got 1"),
        ("Which?\n", r"line 1: .*expected a question, 2 to 10 choices and a letter"),
        ('Which?,"iron,stone,B\n', r"cannot read .*x.csv, line"),
        ("\n", "holds no questions"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        load_choices(tmp_path / "x.csv")


def test_paths_without_questions_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.csv"):
        with pytest.raises(DataError, match="no questions at"):
            load_choices(path)
    (tmp_path / "x.csv").write_bytes(b"Which?,\xff,stone,B\n")
    with pytest.raises(DataError, match="not UTF-8"):
        load_choices(tmp_path)
