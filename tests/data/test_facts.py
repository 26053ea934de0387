"""Facts and sets of them."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from attnbalance import Fact, FactSet
from attnbalance.errors import ArgumentError, DataError


def fact(subject: str, relation: str = "sport", answer: str = "chess", popularity: float | None = None) -> Fact:
    return Fact(subject, relation, (answer,), popularity)


def test_a_relation_is_one_however_its_accents_were_typed() -> None:
    typed = ("père", "pe\u0300re")
    facts = FactSet(tuple(Fact(f"S{i}", relation, ("a",)) for i, relation in enumerate(typed)))
    assert facts.relations == typed[:1]
    assert all(len(facts.of_relations([relation])) == 2 for relation in typed)


def test_a_fact_gives_its_known_fields_as_json() -> None:
    whole = Fact("Rust", "author", ("A", "B"), 3.0, "Rust?", 0)
    assert whole.answer == "A"
    assert whole.as_dict() == {
        "subject": "Rust",
        "relation": "author",
        "answers": ["A", "B"],
        "popularity": 3.0,
        "question": "Rust?",
        "subject_start": 0,
    }
    stated = Fact("Rust", "author", ("A",), statement="{subject} was made by")
    assert stated.as_dict()["statement"] == "{subject} was made by"
    assert fact("x").as_dict() == {"subject": "x", "relation": "sport", "answers": ["chess"]}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (("Paris", "country", "France"), "answers must be a tuple of one or more texts, got 'France'"),
        (("Paris", "country", ()), r"answers must be a tuple of one or more texts, got \(\)"),
        (("Paris", "country", (3,)), "an answer must be text, got 3"),
        ((3, "country", ("France",)), "subject must be text, got 3"),
        ((" ", "country", ("France",)), "subject must not be empty, got ' '"),
        (("Paris", "", ("France",)), "relation must not be empty, got ''"),
        (("Oslo", "country", ("", "Norway")), "an answer must not be empty, got ''"),
        (("Oslo", "country", ("\u200b",)), r"an answer must not be empty, got '\\u200b'"),
        (
            ("Oslo", "country", ("  Norway ",)),
            "an answer must be one line without white space around it, got '  Norway '",
        ),
        ((" Oslo", "country", ("Norway",)), "subject must be one line without white space around it, got ' Oslo'"),
        (("Oslo", "country\n", ("Norway",)), "relation must be one line without white space around it"),
        (("Oslo", "country", ("Norway\nEurope",)), r"an answer must be one line .*, got 'Norway\\nEurope'"),
        (("Paris", "country", ("France",), float("nan")), "popularity must be a number of at least 0, got nan"),
        (("Paris", "country", ("France",), "12"), "popularity must be a number of at least 0, got '12'"),
        (("Paris", "country", ("France",), -1), "popularity must be a number of at least 0, got -1"),
        (("Paris", "country", ("France",), True), "popularity must be a number of at least 0, got True"),
        (("Paris", "country", ("France",), 10**400), "popularity must be a number of at least 0, got 1000"),
        (("Paris", "country", ("France",), None, 7), "question must be text, got 7"),
        (("Paris", "country", ("France",), None, " "), "question must not be empty, got ' '"),
        (("Paris", "country", ("France",), None, "Paris?", 3.0), "subject_start must be a whole number .*, got 3.0"),
        (("Paris", "country", ("France",), None, "Paris?", True), "subject_start must be a whole number .*, got True"),
        (("Paris", "country", ("France",), None, "Paris?", -1), "subject_start must be a whole number .*, got -1"),
        (
            ("Paris", "country", ("France",), None, None, 0),
            "subject_start must come with a question, got 0 without one",
        ),
        *(
            (("Paris", "country", ("France",), None, None, None, statement), message)
            for statement, message in (
                ("Paris is in", r"statement must hold {subject} once, no other field, and .*; got 'Paris is in'"),
                ("{subject} in {subject}", "statement must hold {subject} once"),
                ("{subject} has the {relation}", "statement must hold {subject} once"),
                ("{subject!r} is in", "statement must hold {subject} once"),
                ("{subject:>9} is in", "statement must hold {subject} once"),
                ("{subject} is {in", "statement '{subject} is {in' is not a format string"),
                ("{subject} is in ", "statement must be one line without white space around it"),
                (3, "statement must be text, got 3"),
            )
        ),
    ],
)
def test_a_field_that_a_facts_file_could_not_hold_is_refused(parts, message) -> None:
    with pytest.raises(DataError, match=message):
        Fact(*parts)


def test_numpy_numbers_and_lists_are_kept_as_plain_values() -> None:
    fact = Fact("Rust", "author", ["A"], np.int64(3), "Is Rust?", np.int32(3))  # type: ignore
    assert fact == Fact("Rust", "author", ("A",), 3.0, "Is Rust?", 3)
    assert [type(value) for value in (fact.answers, fact.popularity, fact.subject_start)] == [tuple, float, int]
    assert FactSet((fact,)).sha256 == FactSet((Fact("Rust", "author", ("A",), np.float32(3), "Is Rust?", 3),)).sha256


def test_relations_come_in_order_and_an_unknown_one_is_named_with_those_there_are() -> None:
    facts = FactSet((fact("a", "z"), fact("b", "y"), fact("c", "z")), "mine")
    assert facts.relations == ("z", "y")
    assert [fact.subject for fact in facts.of_relations(["z"])] == ["a", "c"]
    with pytest.raises(DataError, match="no facts of relation 'w' in mine; it has: y, z"):
        facts.of_relations(["z", "w"])


def test_sampling_is_seeded_without_replacement_and_keeps_order() -> None:
    facts = FactSet(tuple(fact(f"s{i:02}") for i in range(50)))
    drawn = facts.sample(20, seed=3)
    assert drawn.facts == facts.sample(20, seed=3).facts != facts.sample(20, seed=4).facts
    assert [fact.subject for fact in drawn] == sorted({fact.subject for fact in drawn})
    assert len(drawn) == 20
    assert facts.sample(50).facts == facts.sample(99).facts == facts.facts
    with pytest.raises(DataError, match="at least 1, got 0"):
        facts.sample(0)


def test_merging_joins_answers_of_one_question_and_keeps_the_largest_popularity() -> None:
    same = [Fact("Jo", "sport", answers, popularity) for answers, popularity in [(("a", "b"), 2.0), (("b", "c"), 9.0)]]
    other = Fact("Jo", "sport", ("d",), None, "Jo plays what?")
    merged = FactSet((same[0], other, same[1])).merged()
    assert [(fact.answers, fact.popularity) for fact in merged] == [(("a", "b", "c"), 9.0), (("d",), None)]
    assert merged.merged().facts == merged.facts


def test_merging_keeps_the_recorded_place_of_a_subject_and_refuses_two_of_them() -> None:
    places = [Fact("Paris", "r", ("a",), question="Is Paris in Paris?", subject_start=start) for start in (None, 12, 3)]
    assert [fact.subject_start for fact in FactSet(tuple(places[:2])).merged()] == [12]
    with pytest.raises(
        DataError, match=r"'Is Paris in Paris\?' must have one subject_start for 'Paris', got 3 and 12;"
    ):
        FactSet(tuple(places)).merged()


def test_merging_keeps_the_statement_and_refuses_two_of_them() -> None:
    stated = [Fact("Rust", "author", (answer,), statement="{subject} was made by") for answer in "AB"]
    assert FactSet((fact("Rust", "author", "C"), *stated)).merged().facts == (
        Fact("Rust", "author", ("C", "A", "B"), statement="{subject} was made by"),
    )
    other = Fact("Rust", "author", ("A",), statement="{subject} is by")
    with pytest.raises(DataError, match=r"facts of 'Rust' \(author\) .*'{subject} is by' and '{subject} was made by'"):
        FactSet((*stated, other)).merged()


def test_the_most_frequent_answer_of_a_relation_brings_its_aliases_whatever_the_order_of_the_facts() -> None:
    facts = FactSet(
        (
            Fact("a", "country", ("Peru",)),
            Fact("b", "country", ("Chile", "Republic of Chile")),
            Fact("c", "country", ("Chile", "Republic of Chile")),
            Fact("d", "sport", ("golf",)),
            Fact("e", "sport", ("chess",)),
        )
    )
    wanted = {"country": ("Chile", "Republic of Chile"), "sport": ("chess",)}
    for order in permutations(facts):
        assert FactSet(order).most_frequent_answers() == wanted
        assert FactSet(order).tied_relations() == ("sport",)


def test_the_shortcut_accepts_no_answer_of_another_entity() -> None:
    springfield = [Fact("Springfield", "country", (answer,)) for answer in ("USA", "Canada")]
    cities = [Fact(f"city {i}", "country", ("USA",)) for i in range(9)]
    facts = FactSet((*springfield, *cities)).merged()
    assert facts[0].answers == ("USA", "Canada")
    assert facts.most_frequent_answers() == {"country": ("USA",)}


def test_the_shortcuts_forms_are_those_that_all_its_facts_accept_in_the_order_of_the_first() -> None:
    accepted = [("USA", "Canada", "America", "US"), ("USA", "US", "America"), ("USA", "Peru", "America", "US")]
    facts = FactSet(tuple(Fact(f"city {i}", "country", answers) for i, answers in enumerate(accepted)))
    assert facts.most_frequent_answers() == {"country": ("USA", "America", "US")}


@pytest.mark.parametrize("seed", [None, 1.5, -1])
def test_a_draw_needs_a_seed_that_makes_it_again(seed: object) -> None:
    facts = FactSet((Fact("a", "r", ("x",)), Fact("b", "r", ("y",))))
    with pytest.raises(DataError, match="seed must be an integer"):
        facts.sample(1, seed)  # pyright: ignore[reportArgumentType]


def test_a_set_of_facts_holds_facts():
    with pytest.raises(ArgumentError, match=r"FactSet: facts must be a collection of Fact, got \('a',\)"):
        FactSet(("a",))
    with pytest.raises(ArgumentError, match="facts must be a collection of Fact, got Fact"):
        FactSet(fact("Rust"))


def test_a_set_of_facts_prints_its_name_and_size():
    facts = FactSet((Fact("a", "r", ("x",)), Fact("b", "r", ("y",)), Fact("b", "s", ("y",))), "mine")
    assert repr(facts) == "FactSet('mine', 3 facts of 2 relations)"
    assert repr(FactSet(())) == "FactSet('facts', 0 facts of 0 relations)"
