"""Conflicts from files of both kinds."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from attnbalance.data.conflicts import Conflict
from attnbalance.data.sources.conflicts import load_conflicts
from attnbalance.data.sources.load_facts import load_facts
from attnbalance.errors import DataError

ROW = {
    "context": "Lyon is the capital now.",
    "question": "What is the capital?",
    "answer": "Lyon",
    "memory_answer": "Paris",
}
QUOTES = """prompt,classes,answer_index
"Write a quote that ends in the word ""heavy"": Absence makes the heart grow","[' heavy.', ' fonder.']",0
"Write a quote that ends in the word ""late"": He said: better","[' late.', ' never.']",0
Absence makes the heart grow,"[' heavy.', ' fonder.']",0
"""


def written(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text(json.dumps(rows) if path.suffix == ".json" else "".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_repeated_rows_are_counted_once(tmp_path: Path) -> None:
    conflicts = load_conflicts(written(tmp_path / "some.json", [ROW, ROW | {"question": f" {ROW['question']} "}, ROW]))
    assert (len(conflicts), conflicts.dropped) == (1, {"repeated": 2})


@pytest.mark.parametrize("name", ["some.json", "some.jsonl"])
def test_rows_become_conflicts_and_what_is_none_is_counted(tmp_path: Path, name: str) -> None:
    rows = [
        ROW,
        ROW | {"answer": "Nice"},
        ROW | {"memory_answer": "Lyon"},
        ROW | {"memory_answer": '["Paris", "Rome"]'},
    ]
    conflicts = load_conflicts(written(tmp_path / name, [*rows, ROW | {"subject": "capital", "relation": "city"}]))
    assert conflicts.dropped == {
        "the context holds no accepted answer": 1, "the two answers contain each other": 1,
    }  # fmt: skip
    first, second, third = conflicts
    assert isinstance(first, Conflict)
    assert isinstance(second, Conflict)
    assert (first.subject, first.answers, first.memory_answers) == (ROW["question"], ("Lyon",), ("Paris",))
    assert second.memory_answers == ("Paris", "Rome")
    assert (third.subject, third.relation) == ("capital", "city")
    assert load_facts(f"conflicts:{tmp_path / name}").facts == conflicts.facts


def test_cells_that_do_not_look_like_an_answer_are_warned_of(tmp_path: Path) -> None:
    """Of both answers: a model that says the remembered 1950 would be counted wrong."""
    cells = {"memory_answer": ("1950.0", "NA", "'Paris'", "Paris|Rome"), "answer": ("Lyon; Lugdunum", "-")}
    rows = [
        ROW | {column: cell, "context": f"Lyon; Lugdunum is the capital - {i}.", "subject": f"s{i}"}
        for column, column_cells in cells.items()
        for i, cell in enumerate(column_cells)
    ]
    with pytest.warns(UserWarning, match="facts have") as caught:
        conflicts = load_conflicts(written(tmp_path / "some.json", [ROW, *rows]))
    assert [fact.subject for fact in conflicts] == [ROW["question"], "s0", "s1", "s2", "s3", "s0", "s1"]
    separated, missing, number, quoted = (str(each.message) for each in caught)
    assert "2 of 7 facts have a '|', ';' or ' / ' in one answer" in separated
    assert "(first: 's3': 'Lyon', 'Paris|Rome')" in separated
    assert "2 of 7 facts have an answer that stands for a missing value" in missing
    assert "1 of 7 facts have a number or date as a spreadsheet rewrites it" in number
    assert "1 of 7 facts have an answer in quotation marks" in quoted


def test_swapped_passages_of_nq_swap_are_contexts(tmp_path: Path) -> None:
    """The columns that its card on the Hub names; answers are lists."""
    row = {"question": "who sang it first", "org_context": "Ann sang it first.", "org_answer": ["Ann", "Ann Lee"]}
    row |= {"sub_context": "Bob sang it first.", "sub_answer": ["Bob"]}
    (conflict,) = load_conflicts(written(tmp_path / "nq.jsonl", [row]))
    assert isinstance(conflict, Conflict)
    assert (conflict.context, conflict.question) == ("Bob sang it first.", "who sang it first")
    assert (conflict.answers, conflict.memory_answers) == (("Bob",), ("Ann", "Ann Lee"))
    unknown = written(tmp_path / "other.jsonl", [row | {"color": "red"}])
    with pytest.raises(DataError, match="unknown column 'color'"):
        load_conflicts(unknown)
    with pytest.raises(DataError, match="row 1: NQ-Swap's columns and 'answer' in one table"):
        load_conflicts(written(tmp_path / "both.jsonl", [row | {"answer": "Cy"}]))
    several = row | {"sub_context": "Bob; Cid sang it first.", "sub_answer": "Bob; Cid"}
    with pytest.warns(UserWarning, match="Bob; Cid"):
        load_conflicts(written(tmp_path / "several.jsonl", [several]))


def test_quotes_are_an_instruction_and_a_beginning(tmp_path: Path) -> None:
    (tmp_path / "quotes.csv").write_text(QUOTES.replace("never", "none"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a quote may end in any word
        conflicts = load_conflicts(tmp_path / "quotes.csv")
    quote, other = conflicts
    assert other.question == "He said: better"
    assert isinstance(quote, Conflict)
    assert quote.context == 'Write a quote that ends in the word "heavy"'
    assert (quote.question, quote.answers, quote.memory_answers) == (
        "Absence makes the heart grow", ("heavy",), ("fonder",),
    )  # fmt: skip
    assert conflicts.dropped == {"no instruction that quotes a word": 1}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{name: text for name, text in ROW.items() if name != "context"}], "row 1: no 'context'; a file of conflicts"),
        ([ROW, ROW | {"extra": 1}], "row 2: unknown column 'extra'"),
        ([ROW | {"memory_answer": True}], "row 1: an answer must be text, got True"),
        ([ROW | {"answer": "Nice"}], "holds no conflict: {'the context holds no accepted answer': 1}"),
        ([ROW | {"popularity": -1}], "row 1: popularity must be a number"),
        ([{"prompt": "A: b", "classes": "['a']", "answer_index": 0}], "classes must be a list of two texts"),
        ([{"prompt": "A: b", "classes": "['a', 'c', 'd']", "answer_index": 0}], "classes must be a list of two texts"),
        ([{"prompt": "A: b", "classes": "a b", "answer_index": 0}], "classes must be a list of two texts"),
        ([{"prompt": "A: b", "classes": "['a', 'c']", "answer_index": -1}], "classes must be a list of two texts"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, rows: list[dict[str, object]], message: str) -> None:
    with pytest.raises(DataError, match=message.replace("{", r"\{")):
        load_conflicts(written(tmp_path / "bad.json", rows))


def test_files_that_hold_no_rows_are_refused(tmp_path: Path) -> None:
    (tmp_path / "object.json").write_text("{}")
    for path, message in (
        (tmp_path / "object.json", "must hold a JSON list of objects"),
        (tmp_path / "none.json", "no file at"),
        (None, "conflicts come from a file: conflicts:PATH"),
    ):
        with pytest.raises(DataError, match=message):
            load_conflicts(path)


def test_popularity_may_come_from_a_cell_of_text(tmp_path: Path) -> None:
    (tmp_path / "some.csv").write_text(
        "context,question,answer,memory_answer,popularity\nLyon it is.,Which city?,Lyon,Paris,120\n"
        "Rome it is.,Which town?,Rome,Paris,\n"
    )
    assert [fact.popularity for fact in load_conflicts(tmp_path / "some.csv")] == [120.0, None]
