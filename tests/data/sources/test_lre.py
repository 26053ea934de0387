"""The relations of Hernandez et al."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attnbalance import load_facts, make_prompts, statement_prompts
from attnbalance.data.sources.lre import load_lre
from attnbalance.errors import DataError

RELATION = {
    "name": "company CEO",
    "prompt_templates": ["{}'s CEO is", "The CEO of {} is"],
    "prompt_templates_zs": ["The name of the CEO of {} is", "Who is the CEO of {}? Their name is"],
    "properties": {},
    "samples": [{"subject": "CEO ", "object": "Ann"}, {"subject": "Acme", "object": "Bob"}],
}


def written(folder: Path, relation: object, name: str = "company_ceo.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(relation))
    return path


def test_a_fact_is_stated_and_asked_in_the_words_of_its_relation(tmp_path: Path) -> None:
    facts = load_lre(written(tmp_path, RELATION))
    assert facts[0].as_dict() == {
        "subject": "CEO",
        "relation": "company CEO",
        "answers": ["Ann"],
        "question": "Who is the CEO of CEO?",
        "subject_start": 18,
        "statement": "{subject}'s CEO is",
    }
    assert [prompt.text for prompt in statement_prompts(facts)] == ["CEO's CEO is", "Acme's CEO is"]
    assert [prompt.spans["subject"] for prompt in make_prompts(facts, "plain")] == [(18, 21), (18, 22)]


def test_without_a_question_one_is_made_from_the_relations_name(tmp_path: Path) -> None:
    facts = load_lre(written(tmp_path, RELATION | {"prompt_templates_zs": ["Why? {}'s boss is"]}))
    assert make_prompts(facts, "plain")[1].text == "What is the company CEO of Acme?"


def test_folders_are_read_whole_and_samples_of_one_subject_merged(tmp_path: Path) -> None:
    (tmp_path / "factual").mkdir()
    twice = [{"subject": "Acme", "object": "Bob"}, {"subject": "Acme", "object": "Cid"}]
    written(tmp_path / "factual", RELATION | {"samples": twice})
    written(tmp_path, RELATION | {"name": "boss"}, "boss.json")
    facts = load_facts(f"lre:{tmp_path}", limit=9)
    assert sorted((fact.relation, fact.subject, fact.answers) for fact in facts) == [
        ("boss", "Acme", ("Bob",)),
        ("boss", "CEO", ("Ann",)),
        ("company CEO", "Acme", ("Bob", "Cid")),
    ]
    assert facts.dropped == {"merged into an earlier sample of the same subject": 1}


@pytest.mark.parametrize(
    ("relation", "message"),
    [
        ([], r"company_ceo.json is not a relation of this form: expected a JSON object"),
        ({"name": 3.5}, "name must be text, got 3.5"),
        (RELATION | {"prompt_templates": []}, r"prompt_templates must be a list of texts that hold {} once, got \[\]"),
        (RELATION | {"prompt_templates": ["The CEO is"]}, "prompt_templates must be a list of texts that hold {} once"),
        (RELATION | {"prompt_templates": ["{} and {x}"]}, r"sample 1: statement must hold {subject} once"),
        (RELATION | {"prompt_templates_zs": "{} is"}, "prompt_templates_zs must be a list of texts"),
        (RELATION | {"samples": []}, "samples must be a list of objects with subject and object"),
        (RELATION | {"samples": [{"subject": "a"}]}, "sample 1: expected an object with subject and object"),
        (RELATION | {"samples": [{"subject": "a", "object": " "}]}, "sample 1: an answer must not be empty"),
    ],
)
def test_another_form_is_refused_by_name(relation: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        load_lre(written(tmp_path, relation))


def test_files_that_are_not_there_or_no_json_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no .json file"):
        load_lre(tmp_path)
    with pytest.raises(DataError, match="absent.json is not a relation of this form"):
        load_lre(tmp_path / "absent.json")
    (tmp_path / "a.json").write_bytes(b"\xff")
    with pytest.raises(DataError, match="a.json is not a relation of this form"):
        load_lre(tmp_path)
    with pytest.raises(DataError, match="lre:FOLDER"):
        load_facts("lre")


def test_every_relation_of_the_dataset_is_read(lre: Path) -> None:
    """Counts and statements from the files, with no code of ours."""
    relations = [json.loads(path.read_text()) for path in lre.rglob("*.json")]
    told = {
        relation["prompt_templates"][0].replace("{}", sample["subject"].strip())
        for relation in relations
        for sample in relation["samples"]
    }
    facts = load_facts(f"lre:{lre}")
    assert len(facts.relations) == len(relations) >= 40
    assert {prompt.text for prompt in statement_prompts(facts)} == told
    assert len(facts) + sum(facts.dropped.values()) == sum(len(relation["samples"]) for relation in relations)
