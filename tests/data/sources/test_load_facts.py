"""One name for every source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attnbalance import Fact, FactSet, load_facts
from attnbalance.data.sources.load_facts import SOURCES
from attnbalance.errors import DataError


@pytest.fixture
def own(tmp_path: Path) -> Path:
    rows = [{"subject": f"s{i}", "relation": "xyz"[i % 3], "answers": ["a"]} for i in range(12)]
    path = tmp_path / "facts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_a_path_is_ones_own_file_and_relations_and_limit_choose_from_it(own: Path) -> None:
    assert len(load_facts(own)) == 12
    drawn = load_facts(str(own), relations=["x", "y"], limit=5, seed=1)
    assert len(drawn) == 5
    assert set(drawn.relations) <= {"x", "y"}
    assert drawn.facts == load_facts(own, relations=["x", "y"], limit=5, seed=1).facts


def test_popqa_takes_a_path_behind_the_colon(popqa: Path) -> None:
    facts = load_facts(f"popqa:{popqa}", relations=["capital of"], limit=20)
    assert (len(facts), facts.relations) == (20, ("capital of",))


def test_what_cannot_be_had_is_named(own: Path) -> None:
    with pytest.raises(DataError, match=r"'w' in .*facts.jsonl; it has: x, y, z"):
        load_facts(own, relations=["w"])
    with pytest.raises(DataError, match="no facts left"):
        load_facts(own, relations=[])
    with pytest.raises(DataError, match="no file at absent.csv"):
        load_facts("popqa:absent.csv")
    with pytest.raises(DataError, match=r"cannot read facts\.txt: a file's name must end in \.json"):
        load_facts("facts.txt")


def test_an_unknown_source_is_named_with_those_that_there_are(
    own: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(SOURCES, "mine", lambda path: FactSet((Fact("s", "r", ("a",)),), "mine"))
    for text in ("myne:/tmp/x.jsonl", "myne"):
        with pytest.raises(DataError, match=r"unknown source 'myne'; sources are popqa .*, mine:PATH, or PATH of a"):
            load_facts(text)
    colon = own.rename(tmp_path / "own:facts.jsonl")
    monkeypatch.chdir(tmp_path)
    assert len(load_facts(colon.name)) == 12


def test_a_dataset_of_the_table_is_loaded_by_name_with_or_without_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "mine", lambda path: FactSet((Fact("s", "r", (path or "hub",)),), "mine"))
    assert load_facts("mine")[0].answer == "hub"
    assert load_facts("mine:folder/a:b.csv")[0].answer == "folder/a:b.csv"
