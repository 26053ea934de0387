"""A user's own facts."""

from __future__ import annotations

import csv
import json
import re
import warnings
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from attnbalance import Fact
from attnbalance.data.sources.own_facts import load_own
from attnbalance.errors import DataError

GOOD = {"subject": "Peru", "relation": "capital", "answers": ["Lima"]}
GARBLED = "characters that a wrong encoding has left"


def written(folder: Path, *rows: object) -> Path:
    path = folder / "facts.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def test_all_columns_come_through_and_the_optional_ones_may_be_absent(tmp_path: Path) -> None:
    full = GOOD | {"popularity": 12, "question": "Peru's capital?", "subject_start": 0}
    second = {"subject": "Oslo", "relation": "country", "answers": "Norway", "question": None}
    facts = load_own(written(tmp_path, full, second))
    assert facts.facts == (
        Fact("Peru", "capital", ("Lima",), 12.0, "Peru's capital?", 0),
        Fact("Oslo", "country", ("Norway",)),
    )
    assert facts.dropped == {}


def test_white_space_around_a_question_is_no_part_of_it(tmp_path: Path) -> None:
    rows = [
        GOOD | {"question": question, "subject_start": start}
        for question, start in (("Peru: capital?", 0), ("Peru: capital? ", 0), (" \tPeru: capital?\n", 2))
    ]
    facts = load_own(written(tmp_path, *rows))
    assert facts.facts == (Fact("Peru", "capital", ("Lima",), None, "Peru: capital?", 0),)
    assert facts.dropped == {"merged into an earlier row of the same question": 2}
    with pytest.raises(DataError, match="subject_start 0 must not lie in the white space before"):
        load_own(written(tmp_path, GOOD | {"question": "  Peru?", "subject_start": 0}))


def test_a_relation_is_one_however_its_accents_were_typed(tmp_path: Path) -> None:
    rows = [{"subject": f"S{i}", "relation": name, "answers": ["a"]} for i, name in enumerate(("père", "pe\u0300re"))]
    assert load_own(written(tmp_path, *rows)).relations == ("père",)


@pytest.mark.parametrize("start", [7, 7.0, "7", "7.0"])
def test_a_whole_subject_start_may_be_written_with_a_point(tmp_path: Path, start: object) -> None:
    facts = load_own(written(tmp_path, GOOD | {"question": "Is the Peru of today Peru?", "subject_start": start}))
    assert facts[0].subject_start == 7


def test_cells_of_a_csv_hold_one_answer_or_a_json_list(tmp_path: Path) -> None:
    path = tmp_path / "facts.csv"
    path.write_text(
        'subject,relation,answers,popularity\nPeru,capital,"[""Lima"", ""City of Kings""]",7.5\nOslo,country,Norway,\n'
    )
    assert [(fact.answers, fact.popularity) for fact in load_own(path)] == [
        (("Lima", "City of Kings"), 7.5),
        (("Norway",), None),
    ]


def test_a_whole_number_is_read_as_text(tmp_path: Path) -> None:
    (fact,) = load_own(written(tmp_path, {"subject": 1984, "relation": "author", "answers": [2001, "two"]}))
    assert (fact.subject, fact.answers) == ("1984", ("2001", "two"))


def test_white_space_around_texts_and_numbers_is_left_out(tmp_path: Path) -> None:
    spaced = {"subject": " Oslo ", "relation": "country\n", "answers": [" Norway", "Noreg "], "popularity": " 1.5e2 "}
    facts = load_own(written(tmp_path, spaced | {"question": "  "}))
    assert facts.facts == (Fact("Oslo", "country", ("Norway", "Noreg"), 150.0),)


def test_answers_in_one_cell_that_are_no_json_list_are_refused_or_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "facts.csv"
    python = ("('x', 'y')", "('x',)", "{'x', 'y'}", "frozenset({'x', 'y'})", "(\"x\", 'y')", "array(['x', 'y'])")
    for cell in (*python, "(1879, 1880)", "{1879, 1880}", 'c("x", "y")', "{x,y}", '{"New York",x}'):
        quoted = cell.replace('"', '""')
        path.write_text(f'subject,relation,answers\nA,b,"{quoted}"\n')
        with pytest.raises(DataError, match="row 1: answers must be one answer or a JSON list, got "):
            load_own(path)
    path.write_text("subject,relation,answers\nA,b,x|y\nC,b,x; y\nB,b,(What's the Story) Morning Glory?\n")
    with pytest.warns(
        UserWarning, match=r"2 of 3 facts have a '\|', ';' or ' / ' in one answer.*\(first: 'A': 'x\|y'\)"
    ):
        facts = load_own(path)
    assert [fact.answers for fact in facts] == [("x|y",), ("x; y",), ("(What's the Story) Morning Glory?",)]


@pytest.mark.parametrize(
    "name", ["('Til Tuesday)", '("Weird Al") Yankovic (band)', "(2,4-D)", "('Tis) the Season (Live)"]
)
def test_names_that_begin_with_a_bracket_are_one_answer(tmp_path: Path, name: str) -> None:
    assert load_own(written(tmp_path, GOOD | {"answers": name}))[0].answers == (name,)
    assert load_own(written(tmp_path, GOOD | {"answers": ["{x}"]}))[0].answers == ("{x}",)  # as the error says


def test_missing_values_decimal_whole_numbers_and_quoted_answers_are_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "facts.csv"
    cells = ("A,b,NA", "B,b,None", "C,b,Nana", "D,b,1867.0", "7.0,b,c", "E,b,3.05", 'F,b,"""Paris"""', 'G,b,"""W"" Y"')
    path.write_text("\n".join(("subject,relation,answers", *cells)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        facts = load_own(path)
    missing, numbers, quoted = (str(each.message) for each in caught)
    assert "2 of 8 facts have an answer that stands for a missing value (first: 'A': 'NA'); fix these rows" in missing
    assert "2 of 8 facts have a number or date as a spreadsheet rewrites it (1867.0," in numbers
    assert "(first: 'D': '1867.0')" in numbers
    assert (
        """1 of 8 facts have an answer in quotation marks, which count as a part of it (first: 'F': '"Paris"')"""
        in quoted
    )
    assert [fact.answer for fact in facts] == ["NA", "None", "Nana", "1867.0", "c", "3.05", '"Paris"', '"W" Y']


def test_lists_that_were_written_twice_are_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "facts.jsonl"
    rows = [["A", ['["Pierre", "Paul"]']], ["['Ann']", ["x"]], ["[REC]", ["x"]], ["B", ["[1]", "y"]], ["C", ["z"]]]
    lines = ({"subject": subject, "relation": "b", "answers": answers} for subject, answers in rows)
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.warns(UserWarning, match=r"2 of 5 facts have a text that is itself a list.*first: 'A': ") as caught:
        load_own(path)
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("row", "what"),
    [
        *(
            (("A", cell), "an answer that stands for a missing value")
            for cell in (
                "#N/A",
                "n/a",
                "N.A.",
                "-NaN",
                "#NULL!",
                "#DIV/0!",
                "--",
                "NaT",
                r"\N",
                "(null)",
                "#REF!",
                "-",
                "?",
                "Unknown",
            )
        ),
        *(
            (("A", cell), "a number or date as a spreadsheet rewrites it")
            for cell in (
                *("1E+05", "2.5E-3", "1.867e+03", "1867.00", "1867,0", "1867,00", "1,867.0", '="007"', "-7.0", "TRUE"),
                *(
                    "1867-11-07 00:00:00",
                    "1867-11-07T00:00:00.000Z",
                    "1867-11-07 00:00:00+00:00",
                    "+1867-11-07T00:00:00Z",
                    "11/7/1867 0:00",
                    "11/7/1867 12:00:00 AM",
                    "-3223584000000",
                    "FALSE",
                ),
            )
        ),
        *(
            (("A", cell), "an answer in quotation marks")
            for cell in ("'Paris'", '"O\'Neill"', "\u201cParis\u201d", "\u2018Paris\u2019", "\u00abParis\u00bb")
        ),
        *(((cell, "x"), "a character as HTML writes it") for cell in ("AT&amp;T", "O&#39;Neill", "&#x4e;")),
        *((("A", cell), "a character as HTML writes it") for cell in ("AT&amp;T", "2&frac12;")),
        *(
            ((cell, "x"), "characters that a wrong encoding has left")
            for cell in ("Cura\ufffdao", "CuraÃ§ao", "Dvoâ€™rak")
        ),
        *((("A", cell), "characters that a wrong encoding has left") for cell in ("\ufffd\ufffd", "MÃ¼nchen")),
        *(
            ((cell, "x"), "a control character or one that is not seen")
            for cell in ("A\x00", "A\x07B", "A\tB", "A\x9fB")
        ),
        (("A", "x\x00y"), "a control character or one that is not seen"),
        *(((cell, "x"), "a control character or one that is not seen") for cell in ("\ufeffA", "A\u2060B")),
        *(
            (("A", f"Bo{cell}nn"), "a control character or one that is not seen")
            for cell in "\u00ad\u200b\u200e\u200f\u202e\u2066"
        ),
        *((("A", cell), "") for cell in ("\u0646\u0645\u06cc\u200c\u062e", "\U0001f469\u200d\U0001f680")),
        (("AT&T", "x"), ""),
        (("A", "Paris / Paree"), "a '|', ';' or ' / ' in one answer"),
        *((("A", cell), "") for cell in ("AT&T", "R&B", "1/5", "AC/DC")),
        *(((cell, "x"), "a subject that stands for a missing value") for cell in ("nan", "None", "#N/A")),
        *(((cell, "x"), "") for cell in ("?", "Unknown", "'39")),
        *(
            (("A", cell), "")
            for cell in (
                "Nano",
                "E5",
                "1e",
                "'t Hooft",
                "rock 'n' roll",
                "3.05",
                "N",
                "A-1",
                "O'Neill's",
                "True",
                "1867-11-07",
                "11/7/1867",
                "186711",
                "-1234567",
                "9780306406157",
            )
        ),
    ],
)
def test_cells_that_tables_write_in_the_place_of_an_answer_are_warned_of(
    tmp_path: Path, row: tuple[str, str], what: str
) -> None:
    subject, answer = row
    with (tmp_path / "facts.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("subject", "relation", "answers"), (subject, "r", answer)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (fact,) = load_own(tmp_path / "facts.csv")
    assert (fact.subject, fact.answer) == row
    messages = [str(each.message) for each in caught]
    assert [f"1 of 1 facts have {what}" in message for message in messages] == [True] * bool(what)


def test_rows_of_one_subject_typed_in_two_ways_are_one_question(tmp_path: Path) -> None:
    path = tmp_path / "facts.csv"
    path.write_text("subject,relation,answers\nS\u00e3o,b,c\nSa\u0303o,b,d\nSao,b,e\n")
    facts = load_own(path)
    assert [(fact.subject, fact.answers) for fact in facts] == [("S\u00e3o", ("c", "d")), ("Sao", ("e",))]
    assert sum(facts.dropped.values()) == 1


def test_rows_of_one_question_are_merged_and_counted(tmp_path: Path) -> None:
    facts = load_own(written(tmp_path, GOOD, GOOD | {"answers": ["Ciudad de los Reyes"]}))
    assert facts[0].answers == ("Lima", "Ciudad de los Reyes")
    assert sum(facts.dropped.values()) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"popularty": 3}, r"row 2: unknown column 'popularty' \(did you mean 'popularity'\?\)"),
        ({"subj": "x", "prop": "y", "obj": "z"}, "this looks like PopQA: write popqa:"),
        ({"answers": []}, "row 2: no 'answers'"),
        ({"subject": ""}, "row 2: no 'subject'"),
        ({"relation": None}, "row 2: no 'relation'"),
        ({"subject": "  "}, "row 2: subject must not be empty, got ''"),
        ({"answers": ["Lima", ""]}, "row 2: an answer must not be empty, got ''"),
        (
            {"answers": "Lima\nCusco"},
            r"row 2: an answer must be one line without white space around it, got 'Lima\\nCusco'",
        ),
        ({"subject_start": 3}, "row 2: subject_start must come with a question, got 3 without one"),
        ({"answers": "[Lima"}, r"'\[Lima' is not a JSON list"),
        ({"answers": {"a": 1}}, "an answer must be text, got"),
        ({"popularity": "high"}, "popularity must be a number of at least 0, got 'high'"),
        ({"popularity": -1}, "got -1"),
        ({"popularity": "inf"}, "got 'inf'"),
        ({"popularity": "1_0"}, "row 2: popularity must be a number of at least 0, got '1_0'"),
        ({"popularity": "١٢"}, "row 2: popularity must be a number of at least 0, got '١٢'"),
        ({"question": "Peru?", "subject_start": "first"}, "row 2: .*first"),
        ({"subject": True}, "row 2: subject must be text, got True"),
        ({"subject": ["Oslo"]}, r"row 2: subject must be text, got \['Oslo'\]"),
        ({"subject": {"a": 1}}, "row 2: subject must be text, got {'a': 1}"),
        ({"subject": 1.5}, "row 2: subject must be text, got 1.5"),
        ({"relation": True}, "row 2: relation must be text, got True"),
        ({"relation": ["capital"]}, "row 2: relation must be text"),
        ({"question": True}, "row 2: question must be text, got True"),
        ({"answers": True}, "row 2: an answer must be text, got True"),
        ({"answers": float("nan")}, "row 2: an answer must be text, got nan"),
        ({"answers": ["Lima", True]}, "row 2: an answer must be text, got True"),
        ({"answers": [["Lima"]]}, r"row 2: an answer must be text, got \['Lima'\]"),
        ({"answers": [float("inf")]}, "row 2: an answer must be text, got inf"),
        ({"popularity": True}, "row 2: popularity must be a number of at least 0, got True"),
        ({"popularity": 10**400}, "row 2: popularity must be a number of at least 0, got 1000"),
        ({"popularity": float("nan")}, "row 2: .*got nan"),
        ({"question": "Peru?", "subject_start": True}, "row 2: subject_start must be a whole number"),
        (
            {"question": "Peru?", "subject_start": 0.5},
            "row 2: subject_start must be a whole number of at least 0, got 0.5",
        ),
        (
            {"question": "Peru?", "subject_start": -1},
            "row 2: subject_start must be a whole number of at least 0, got -1",
        ),
        ({"subject": "Os\ud800lo"}, "row 2: .*half a character"),
        ({"answers": ["\udfff"]}, "row 2: .*half a character"),
        ({"relation": "\ud800"}, "row 2: .*half a character"),
        ({"question": "Oslo\ud800?"}, "row 2: .*half a character"),
        ({"answers": "[" * 100_000}, "row 2: answers .* is not a JSON list"),
        ({"answers": "[" + "9" * 5000 + "]"}, "row 2: answers .* is not a JSON list .*4300 digits"),
    ],
)
def test_a_bad_row_is_refused_with_its_number_and_the_value(change: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        load_own(written(tmp_path, GOOD, GOOD | change))


@pytest.mark.parametrize("column", ["subject", "relation", "question", "popularity"])
@pytest.mark.parametrize("nested", [{"a": 1}, ["Oslo"]])
def test_a_nested_column_of_a_parquet_file_is_refused_by_row(column: str, nested: object, tmp_path: Path) -> None:
    row = GOOD | {"question": "What is the capital of Peru?", "popularity": 1.0, column: nested}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "facts.parquet")
    with pytest.raises(DataError, match=f"row 1: {column} must be .*got {re.escape(str(nested))}"):
        load_own(tmp_path / "facts.parquet")


def test_a_blank_cell_is_no_statement_and_no_question(tmp_path):
    path = tmp_path / "facts.csv"
    path.write_text(
        "subject,relation,answers,question,statement\nAnn,born,Rome, ,  \nBob,born,Oslo,,{subject} is from\n"
    )
    assert [(fact.question, fact.statement) for fact in load_own(path)] == [(None, None), (None, "{subject} is from")]
