"""EntityQuestions' files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attnbalance import load_facts, make_prompts
from attnbalance.data.sources.entity_questions import RELATIONS, load_entity_questions
from attnbalance.errors import DataError


def written(folder: Path, name: str, *rows: tuple[str, list[str]]) -> Path:
    path = folder / name
    path.write_text(json.dumps([{"question": question, "answers": answers} for question, answers in rows]))
    return path


def test_the_subject_stands_where_the_form_has_it(tmp_path: Path) -> None:
    path = written(
        tmp_path, "P112.dev.json", ("Who founded Who founded?", ["Ann"]), ("Who founded  Rome ?", ["Romulus"])
    )
    facts = load_entity_questions(path)
    assert [fact.subject for fact in facts] == ["Who founded", "Rome"]
    assert facts[0].as_dict() == {
        "subject": "Who founded",
        "relation": "founder",
        "answers": ["Ann"],
        "question": "Who founded Who founded?",
        "subject_start": 12,
    }
    assert [prompt.part("subject") for prompt in make_prompts(facts)] == ["Who founded", "Rome"]


def test_a_folder_holds_all_its_relations_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    written(tmp_path, "P170_similar.test.json", ("Who is the creator of Snoopy?", ["Schulz"]))
    written(tmp_path, "P36.dev.json", ("What is the capital of Peru?", ["Lima"]))
    written(tmp_path, "P131.dev.json", ("Where is Troy located?", ["Turkey"]))
    written(tmp_path, "P276.dev.json", ("Where is Troy located?", ["Hisarlik"]), ("Where is Ur located?", ["Iraq"]))
    (tmp_path / "relation_query_templates.json").write_text("{}")
    facts = load_entity_questions(tmp_path)
    assert [(fact.relation, fact.subject, fact.answers) for fact in facts] == [
        ("capital", "Peru", ("Lima",)),
        ("location", "Troy", ("Turkey", "Hisarlik")),
        ("creator", "Snoopy", ("Schulz",)),
        ("location", "Ur", ("Iraq",)),
    ]
    assert facts.dropped == {"merged into an earlier row of the same question": 1}


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("P36.dev.json", [("What is the capital of ?", ["Lima"])], r"row 1: expected a question of the form 'What is"),
        ("P36.dev.json", [("Capital of Peru?", ["Lima"])], r"P36.dev.json, row 1: .*got 'Capital of Peru\?'"),
        ("P36.dev.json", [("What is the capital of Peru?", [])], "row 1: no 'answers'"),
        ("P36.dev.json", [("What is the capital of Peru?", [{}])], "row 1: an answer must be text"),
        (
            "P9.dev.json",
            [("What?", ["x"])],
            "named by its property, as in P17.dev.json; got P9.dev.json; known are P17,",
        ),
        ("P361.dev.json", [("What?", ["x"])], "got P361.dev.json"),
        ("capitals.json", [("What?", ["x"])], "got capitals.json"),
    ],
)
def test_what_is_not_entity_questions_is_named(name: str, rows: list, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        load_entity_questions(written(tmp_path, name, *rows))


def test_a_folder_without_its_files_says_which_folders_there_are(tmp_path: Path) -> None:
    for name in ("train", "dev"):
        (tmp_path / name).mkdir()
    with pytest.raises(DataError, match=r"no file like P17.dev.json; it has the folders dev, train: choose one"):
        load_facts(f"entityquestions:{tmp_path}")
    with pytest.raises(DataError, match="holds no file like P17.dev.json$"):
        load_entity_questions(tmp_path / "dev")
    with pytest.raises(DataError, match="entityquestions:FOLDER"):
        load_facts("entityquestions")


def test_the_forms_are_those_of_the_dataset(entity_questions: Path) -> None:
    """The dataset's own list of templates is the oracle; P30 is in the list, but has no file."""
    theirs = json.loads((entity_questions / "relation_query_templates.json").read_text())
    ours = {name: [form.replace("{subject}", "[X]") for form in forms] for name, (_, *forms) in RELATIONS.items()}
    for name, template in theirs.items():
        assert name == "P30" or template in ours[name.removesuffix("_similar")]


def test_every_question_of_the_dataset_is_read_and_its_subject_found(entity_questions: Path) -> None:
    """Counts and subjects by the dataset's templates, with no code of ours."""
    theirs = json.loads((entity_questions / "relation_query_templates.json").read_text())
    asked = set()
    for path in (entity_questions / "dev").iterdir():
        before, after = theirs[path.name.split(".")[0]].split("[X]")
        questions = [row["question"] for row in json.loads(path.read_text())]
        asked |= {(q, q.removeprefix(before).removesuffix(after)) for q in questions}
    facts = load_facts(f"entityquestions:{entity_questions / 'dev'}")
    assert {(fact.question, fact.subject) for fact in facts} == asked
    assert len(facts) == len(asked)
    assert len(facts.relations) == 23
