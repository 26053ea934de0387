"""Facts and conflicts that are written and read again are the same."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from attnbalance.data.conflicts import Conflict
from attnbalance.data.facts import Fact
from attnbalance.data.sources.conflicts import load_conflicts
from attnbalance.data.sources.written import load_written
from attnbalance.errors import DataError

FACTS = (
    Fact("Avala", "capital", ("NA", "N. A."), 3.0, "Avala and Avala: capital?", 10, "{subject}, whose capital is"),
    Fact("1867.0", "year", ("1867.0",)),
)
CONFLICTS = (
    Conflict("S", "r", ("Lyon", "Lugdunum"), 2.0, " S in S? ", 6, "{subject} is", "It is Lyon. ", ("NA", "Paris")),
    Conflict("Who?", "conflict", ("1867",), question="Who?", context="In 1867.", memory_answers=("1920",)),
)


@pytest.mark.parametrize("facts", [FACTS, CONFLICTS])
def test_what_was_written_is_read_as_it_was(tmp_path: Path, facts: tuple[Fact, ...]) -> None:
    path = tmp_path / "heldout.jsonl"
    path.write_text("".join(json.dumps(fact.as_dict()) + "\n" for fact in facts))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read = load_written(path)
    assert (read.facts, read.name) == (facts, str(path))
    if facts is CONFLICTS:
        stripped = replace(CONFLICTS[0], question="S in S?", subject_start=5, context="It is Lyon.")
        assert load_conflicts(path).facts == (stripped, CONFLICTS[1])


def test_facts_of_one_question_stay_apart(tmp_path: Path) -> None:
    facts = [Fact("Tom", "pet", ("cat",)), Fact("Tom", "pet", ("dog",)), Fact("Tom", "pet", ("dog",))]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(fact.as_dict()) + "\n" for fact in facts))
    assert list(load_written(path)) == facts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answer": "a"}, "row 1: .*unexpected keyword argument 'answer'"),
        ({"answers": "a"}, "row 1: answers must be a tuple"),
    ],
)
def test_a_row_that_this_package_did_not_write_is_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(CONFLICTS[1].as_dict() | changes))
    with pytest.raises(DataError, match=message):
        load_written(tmp_path / "rows.jsonl")
