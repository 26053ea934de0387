"""`facts`, `families` and `tasks` from the command line."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest
from commands import run_command

from attnbalance import load_facts
from attnbalance.families import check_families
from attnbalance.families.check_families import FamilyOutcome
from attnbalance.harness.tasks import TASKS

ROWS = [
    {"subject": "Oslo", "relation": "country", "answers": ["Norway"], "statement": "{subject} lies in"},
    {"subject": "Rome", "relation": "country", "answers": ["Italy"], "question": "Where is Rome?"},
    {"subject": "Bern", "relation": "country", "answers": ["Switzerland"], "question": "Where is it?"},
]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_facts_are_shown_joined_with_popularity_and_written_for_other_commands(own: Path, tmp_path: Path) -> None:
    views, out = tmp_path / "views.csv", tmp_path / "ready.jsonl"
    views.write_text("subject,popularity\nOslo,7\nBern,9\n")
    code, text = run_command("facts", own, "--popularity", views, "--skip-bad", "--out", out)
    assert code == 0, text
    assert "1 fact of " in text
    assert "| country | 1 | 1 | Norway (100.0%) | 7 / 7 / 7 | What is the country of Oslo? | Oslo lies in |" in text
    assert f"Dropped: 1 (no popularity in {views})" in text
    assert "Dropped: 1 (questions do not hold their subject exactly once)" in text
    assert [fact.as_dict() for fact in load_facts(out)] == [ROWS[0] | {"popularity": 7.0}]


def test_bad_questions_and_files_give_one_message(own: Path, tmp_path: Path) -> None:
    for arguments, message in (
        ((), "row 3: subject 'Bern' occurs 0 times"),
        (("--skip-bad", "--out", tmp_path / "a.csv"), "must be a file whose name ends in .jsonl"),
        (("--skip-bad", "--out", own), "is already there"),
        (("--skip-bad", "--out", tmp_path / "no" / "a.jsonl"), "there is no folder"),
    ):
        code, text = run_command("facts", own, *arguments)
        assert code == 2
        assert message in text.replace("\n", " ")
        assert "Traceback" not in text
    assert [json.loads(line) for line in own.read_text().splitlines()] == ROWS


def test_conflicts_are_shown_and_not_written_as_facts(tmp_path: Path) -> None:
    path = tmp_path / "conflicts.json"
    row = {"context": "Oslo is in Chad.", "question": "Where is Oslo?", "answer": "Chad", "memory_answer": "Norway"}
    path.write_text(json.dumps([row]))
    code, text = run_command("facts", f"conflicts:{path}")
    assert code == 0, text
    assert "Chad (100.0%)" in text
    code, text = run_command("facts", f"conflicts:{path}", "--out", tmp_path / "a.jsonl")
    assert (code, "cannot hold conflicts" in text) == (2, True), text


def test_families_are_listed_with_what_came_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = run_command("families", "gpt2", "mistral")
    assert code == 0, text
    lines = text.splitlines()
    assert [line.split()[:2] for line in lines[:3]] == [["gpt2", "exact"], ["mistral", "exact"], ["mistral", "crossed"]]
    assert lines[3:5] == ["lengths beyond the prompts: 2 exact", "lengths crossed by most prompts: 1 exact"]
    assert run_command("families", "llamma")[0] == 2
    wrong = FamilyOutcome("gpt2", False, "WRONG", "rows are off")
    monkeypatch.setattr(check_families, "check_family", lambda name, crossed, dtype: wrong)
    assert f"transformers {metadata.version('transformers')}," in lines[5]
    code, text = run_command("families", "gpt2")
    assert (code, text.splitlines()[-2]) == (1, "lengths beyond the prompts: 1 WRONG")


def test_the_folder_of_tasks_is_printed_alone_and_holds_each_task() -> None:
    code, text = run_command("tasks")
    folder = Path(text.removesuffix("\n"))
    assert (code, folder.is_absolute()) == (0, True)
    assert sorted(path.stem for path in folder.glob("*.yaml")) == sorted(TASKS)
    code, text = run_command("--json", "tasks")
    printed = next(json.loads(line) for line in text.splitlines() if line.startswith("{"))
    assert printed["results"]["tasks"] == {"folder": str(folder), "names": list(TASKS)}
