"""PopQA's table."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from attnbalance import make_prompts
from attnbalance.data.sources.popqa import QUESTIONS, load_popqa
from attnbalance.errors import BadRowsError, DataError

ROW = {
    "id": "1",
    "subj": "Paris",
    "prop": "capital of",
    "obj": "France",
    "s_pop": "900",
    "question": "What is Paris the capital of?",
    "possible_answers": '["France", "République française"]',
}


def written(folder: Path, *rows: dict) -> Path:
    path = folder / "popqa.tsv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter="\t")
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_the_span_comes_from_the_relations_own_question(tmp_path: Path) -> None:
    facts = load_popqa(written(tmp_path, ROW, ROW | {"subj": "What", "question": "What is What the capital of?"}))
    assert facts[0].answers == ("France", "République française")
    assert facts[0].popularity == 900
    assert [fact.subject_start for fact in facts] == [8, 8]
    assert [prompt.spans["subject"] for prompt in make_prompts(facts, "plain")] == [(8, 13), (8, 12)]


def test_a_question_of_another_form_is_searched_and_refused_where_the_subject_is_absent(tmp_path: Path) -> None:
    facts = load_popqa(written(tmp_path, ROW | {"question": "Paris rules which land?"}, ROW | {"question": "Which?"}))
    assert [fact.subject_start for fact in facts] == [None, None]
    with pytest.raises(BadRowsError, match=r"1 of 2(.|\n)*row 2: subject 'Paris' occurs 0 times in 'Which\?'"):
        make_prompts(facts)


def test_white_space_around_texts_is_left_out(tmp_path: Path) -> None:
    spaced = ROW | {"subj": "Paris ", "obj": " France", "possible_answers": '["France ", ""]'}
    spaced |= {"question": f" {ROW['question']} "}
    assert load_popqa(written(tmp_path, spaced))[0].as_dict() == {
        "subject": "Paris",
        "relation": "capital of",
        "answers": ["France"],
        "popularity": 900.0,
        "question": "What is Paris the capital of?",
        "subject_start": 8,
    }


def test_rows_without_subject_are_dropped_and_duplicates_merged_with_counts(tmp_path: Path) -> None:
    rows = [ROW, ROW | {"obj": "Texas", "possible_answers": '["Texas"]', "s_pop": "5"}, ROW | {"subj": " "}]
    facts = load_popqa(written(tmp_path, *rows))
    assert len(facts) == 1
    assert facts[0].answers == ("France", "République française", "Texas")
    assert facts[0].popularity == 900
    assert sorted(facts.dropped.values()) == [1, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"s_pop": "many"}, "row 1: popularity must be a number.*'many'"),
        ({"possible_answers": "x"}, "row 1"),
        ({"possible_answers": '"USA"'}, "JSON list"),
        ({"s_pop": "nan"}, "'nan'"),
        ({"possible_answers": "[" * 100_000}, "row 1: not JSON"),
        ({"possible_answers": "[" + "9" * 5000 + "]"}, "row 1: not JSON .*4300 digits"),
        ({"possible_answers": "[true]"}, "row 1: an answer must be text, got True"),
        ({"possible_answers": "[{}]"}, "row 1: an answer must be text, got {}"),
    ],
)
def test_a_bad_cell_is_named(change: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        load_popqa(written(tmp_path, ROW | change))


def test_a_table_that_is_not_popqa_says_what_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"subject": "a", "relation": "b", "answers": ["c"]}))
    with pytest.raises(DataError, match=r"lacks PopQA's column 'subj', .*it has 'subject', .*without 'popqa:'"):
        load_popqa(path)


def test_facts_of_ones_own_under_popqas_column_names_are_not_taken_for_popqa(tmp_path: Path) -> None:
    path = written(tmp_path, ROW, ROW | {"prop": "anthem"})
    with pytest.raises(DataError, match=r"row 2: prop must be one of PopQA's relations .*'anthem'.*without 'popqa:'"):
        load_popqa(path)


@pytest.mark.parametrize("column", ["subj", "prop", "question", "obj"])
def test_cells_that_are_no_text_are_refused_by_row(column: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(ROW | {column: ["a"]}))
    with pytest.raises(DataError, match=r"row 1: .* must be text, got \['a'\]"):
        load_popqa(path)


def test_without_the_hub_a_local_path_is_asked_for() -> None:
    with pytest.raises(DataError, match=r"cannot load akariasai/PopQA from the Hub .*popqa:PATH"):
        load_popqa()


def test_the_whole_of_popqa_loads_with_known_counts(popqa: Path) -> None:
    with popqa.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    with_subject = [row for row in rows if row["subj"].strip()]
    keys = {(row["subj"], row["prop"], row["question"]) for row in with_subject}
    facts = load_popqa(popqa)
    assert len(facts) == len(keys)
    assert len(facts) + sum(facts.dropped.values()) == len(rows)
    assert set(facts.relations) == set(QUESTIONS)
    for fact, prompt in zip(facts, make_prompts(facts, "plain"), strict=True):
        assert prompt.part("subject") == fact.subject
        assert prompt.text == QUESTIONS[fact.relation].replace("{subject}", fact.subject)
