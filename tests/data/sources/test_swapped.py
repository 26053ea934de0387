"""Facts stated with each other's answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attnbalance import Fact, FactSet, load_facts
from attnbalance.data.conflicts import Conflict
from attnbalance.data.sources.swapped import make_conflicts
from attnbalance.errors import DataError

HOMES = (("Ann", "Rome"), ("Bob", "Bern"))
FACTS = FactSet(
    (
        Fact("France", "capital", ("Paris",), 3.0, "Which city governs France?"),
        Fact("Spain", "capital", ("Madrid",)),
        Fact("Egypt", "capital", ("Cairo", "New Cairo")),
        Fact("Ann", "sport", ("golf",)),
    )
)


def test_each_context_states_another_answer_of_the_relation() -> None:
    for seed in range(20):
        conflicts = make_conflicts(FACTS, seed)
        assert [fact.subject for fact in conflicts] == ["France", "Spain", "Egypt"]
        assert conflicts.dropped == {"no other answer of the relation": 1}
        for made, fact in zip(conflicts, FACTS, strict=False):
            assert isinstance(made, Conflict)
            assert made.memory_answers == fact.answers
            assert made.answer in {"Paris", "Madrid", "Cairo"} - {fact.answer}
            assert made.context == f"The capital of {fact.subject} is {made.answer}."
    conflicts = make_conflicts(FACTS)
    assert conflicts[0].question == "Which city governs France?"
    assert conflicts[0].popularity == 3.0
    assert conflicts[1].question == "What is the capital of Spain?"


def test_a_facts_own_statement_is_the_context() -> None:
    stated = FactSet(tuple(Fact(name, "home", (place,), statement="{subject} lives in") for name, place in HOMES))
    made = make_conflicts(stated)[0]
    assert isinstance(made, Conflict)
    assert made.context == "Ann lives in Bern."
    assert (made.statement, made.remembered.statement) == ("{subject} lives in", "{subject} lives in")


def test_every_answer_is_drawn_and_a_seed_draws_the_same() -> None:
    drawn = {make_conflicts(FACTS, seed)[0].answer for seed in range(20)}
    assert drawn == {"Madrid", "Cairo"}
    assert make_conflicts(FACTS, 3).facts == make_conflicts(FACTS, 3).facts


def test_an_answer_that_contains_the_right_one_is_not_drawn() -> None:
    facts = FactSet((Fact("Egypt", "capital", ("Cairo",)), Fact("Utopia", "capital", ("New Cairo",))))
    assert make_conflicts(facts).dropped == {"no other answer of the relation": 2}


def test_an_answer_in_the_question_is_not_drawn() -> None:
    """Echoing the question would say it."""
    facts = FactSet((Fact("Peru City", "country", ("Chad",)), Fact("Ann", "country", ("Peru",))))
    conflicts = make_conflicts(facts)
    assert [(fact.subject, fact.answer) for fact in conflicts] == [("Ann", "Chad")]
    assert conflicts.dropped == {"no other answer of the relation": 1}


def test_swapped_facts_are_a_source(tmp_path: Path) -> None:
    path = tmp_path / "facts.jsonl"
    path.write_text("".join(json.dumps(fact.as_dict()) + "\n" for fact in FACTS))
    capitals = load_facts(path).of_relations(["capital"])
    assert load_facts(f"swapped:{path}", ["capital"], seed=3).facts == make_conflicts(capitals, 3).facts
    assert load_facts(f"swapped:{path}", ["capital"]).dropped == {}
    with pytest.raises(DataError, match=r"unknown source 'swapped'; sources are .*swapped:SOURCE"):
        load_facts("swapped")
