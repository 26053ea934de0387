"""Files of instructions, row by row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets import Dataset

from attnbalance.data.instructions import Instruction
from attnbalance.data.sources.instructions import load_instructions
from attnbalance.data.sources.load_facts import load_facts
from attnbalance.errors import DataError

ROWS = [
    {"instruction": "Name a {city}.", "input": "", "output": "\n\nRome"},
    {"instruction": "Where does he live? ", "input": "He moved to Oslo.", "output": "In Oslo.\nIt is cold."},
    {"instruction": "Say nothing.", "input": "", "output": " "},
]


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_a_file_is_read_row_by_row_and_empty_outputs_are_counted(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows.{suffix}"
    path.write_text(json.dumps(ROWS) if suffix == "json" else "\n".join(json.dumps(row) for row in ROWS))
    read = load_instructions(path)
    expected = (
        Instruction("Name a {city}.", "Rome"),
        Instruction("Where does he live?", "In Oslo.\nIt is cold.", "He moved to Oslo."),
    )
    assert (read.rows, read.dropped, read.source, len(read)) == (expected, {"no output": 1}, str(path), 2)
    only = read.with_input()
    assert (only.rows, only.dropped) == (expected[1:], {"no output": 1, "no input": 1})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"instruction": "a"}, r"row 1: no column 'output'"),
        ({"messages": []}, r"row 1: no column 'instruction'; a file of instructions needs instruction, output"),
        ({"instruction": " ", "output": "b"}, "row 1: instruction must not be empty"),
        ({"instruction": "a", "output": 3}, "row 1: 'output' must be text, got 3"),
        ({"instruction": "a", "output": "\ud800"}, "row 1: .*half a character"),
        ({"instruction": "a", "output": "b", "system": "c"}, "row 1: 'system' cannot be trained on, got 'c'; put"),
        ({"instruction": "a", "output": "b", "system_prompt": "c"}, "row 1: 'system_prompt' cannot be trained on"),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "row 1: 'history' cannot be trained on"),
        ({"instruction": "a", "output": ""}, "holds no instruction with an output"),
    ],
)
def test_rows_that_cannot_be_taught_are_named(tmp_path: Path, row: dict, message: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([row]))
    with pytest.raises(DataError, match=message):
        load_instructions(path)


def test_texts_that_stand_for_a_missing_value_are_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(
        "instruction,input,output,text,system\na,<noinput>,NULL,c,\nb,No input.,NA,c,\nc,say no input,d,c,\n"
    )
    with pytest.warns(UserWarning, match="stands for a missing value") as warned:
        read = load_instructions(path)
    assert [str(warning.message).removeprefix(f"{path}: ") for warning in warned] == [
        f"2 of 3 rows have an {what} that stands for a missing value (first: {first!r}); leave these cells empty, or "
        "ignore this"
        for what, first in (("output", "NULL"), ("input", "<noinput>"))
    ]
    expected = [("a", "NULL", "<noinput>"), ("b", "NA", "No input."), ("c", "d", "say no input")]
    assert [(row.instruction, row.output, row.input) for row in read.rows] == expected


def test_plain_texts_are_not_warned_of(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    path = tmp_path / "rows.json"
    rows = [{**row, "system": empty, "history": []} for row, empty in zip(ROWS, ("  ", "NULL", None), strict=True)]
    rows[0] |= {"question": "Which city?", "context": "Rome.", "answers": "Rome", "paragraphs": 3}  # not read
    path.write_text(json.dumps(rows))
    assert len(load_instructions(path)) == 2
    path = tmp_path / "rows.csv"
    path.write_text("instruction,output,history,system\nSay no input,noinput,[],\n")
    assert [row.output for row in load_instructions(path).rows] == ["noinput"]
    assert not recwarn.list


ANSWERED = {"question": " Who won? ", "id": "1", "answers": [{"text": "Rome", "answer_start": 0}, {"text": "it"}]}
NOT_ANSWERED = {"question": "Who lost?", "id": "2", "answers": [], "is_impossible": True}


@pytest.mark.parametrize("kind", ["original", "hub", "rows", "parquet"])
def test_squads_questions_are_instructions_whose_input_is_the_context(tmp_path: Path, kind: str) -> None:
    """Its own nested file; the Hub's columns, as JSON lines and Parquet; and rows with a list of answers."""
    path = tmp_path / {"original": "train.json", "parquet": "train.parquet"}.get(kind, "train.jsonl")
    context = "Rome won it."
    if kind == "original":
        paragraphs = [{"context": context, "qas": [ANSWERED]}, {"context": context, "qas": [NOT_ANSWERED]}]
        path.write_text(json.dumps({"version": "v2.0", "data": [{"title": "Rome", "paragraphs": paragraphs}]}))
    else:
        rows = [{"title": "Rome", "context": context, **row} for row in (ANSWERED, NOT_ANSWERED)]
        if kind != "rows":
            for row in rows:
                row["answers"] = {
                    key: [each.get(key, 9) for each in row["answers"]] for key in ("text", "answer_start")
                }
        if kind == "parquet":
            Dataset.from_list(rows).to_parquet(path)
        else:
            path.write_text("\n".join(map(json.dumps, rows)))
    read = load_instructions(path)
    assert read.rows == (Instruction("Who won?", "Rome", context),)
    assert read.dropped == {"no output": 1}


def test_squads_published_file_is_read_whole(squad: Path) -> None:
    """Against its numbers: 10,570 questions, and answers that stand in their contexts."""
    read = load_instructions(squad)
    assert (len(read), dict(read.dropped)) == (10570, {})
    assert all(row.output in row.input for row in read.rows)
    articles = json.loads(squad.read_text())["data"]
    first = articles[0]["paragraphs"][0]
    assert read.rows[0].instruction == first["qas"][0]["question"].strip()
    assert len(read.with_input()) == 10570


@pytest.mark.parametrize(
    "rows",
    [
        {"data": [{"paragraphs": [{"context": "c", "qas": [{"question": "q", "answers": {}}]}]}]},
        {"data": [{"paragraphs": "abc"}]},
        {"data": [{"paragraphs": [{"context": "c", "qas": [{"question": "q", "answers": "Rome"}]}]}]},
        {"data": [{"paragraphs": [{"context": "c"}]}]},
        [{"question": "q", "context": "c", "answers": {"text": "Rome"}}],
        [{"question": "q", "context": "c", "answers": [{"test": "Rome"}]}],
    ],
)
def test_a_file_that_is_not_quite_squads_is_refused(tmp_path: Path, rows: object) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    with pytest.raises(DataError, match="rows.json is not in SQuAD's form"):
        load_instructions(path)


def test_a_question_of_squad_that_cannot_be_taught_is_named_by_its_number(tmp_path: Path) -> None:
    asked = [{"question": text, "answers": [{"text": "Rome"}]} for text in ("Who?", " ")]
    path = tmp_path / "squad.json"
    path.write_text(json.dumps({"data": [{"paragraphs": [{"context": "c", "qas": [each]} for each in asked]}]}))
    with pytest.raises(DataError, match="squad.json, question 2: instruction must not be empty"):
        load_instructions(path)
    with pytest.raises(DataError, match="unknown column 'paragraphs'"):
        load_facts(str(path))


def test_an_instruction_that_stands_for_a_missing_value_is_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"instruction": "N/A", "output": "b"}, *ROWS]))
    with pytest.warns(UserWarning, match=r"1 of 3 rows have an instruction that stands .* \(first: 'N/A'\)"):
        load_instructions(path)
