"""A world in sentences: how often a fact is stated, in which forms, and what its statement prompt is."""

from collections import Counter

import pytest
from scipy import stats

from attnbalance.data.facts import Fact, FactSet
from attnbalance.data.forms import in_form
from attnbalance.data.prompts import make_prompts
from attnbalance.data.sources.popqa import QUESTIONS
from attnbalance.data.statements import (
    PREFIXES,
    SPECIAL_FORMS,
    World,
    statement_forms,
    statement_prompts,
)
from attnbalance.data.synthetic import RELATIONS
from attnbalance.errors import DataError

BORN = [("Ann", "Rome"), ("Bob", "Oslo"), ("Cid", "Bern"), ("Dee", "Graz"), ("Eve", "Lyon"), ("Fay", "Bari")]
FACTS = FactSet(tuple(Fact(name, "sport", ("golf",), p) for name, p in (("Ann", 16.0), ("Bob", 4.0), ("Cid", 1.0))))


@pytest.mark.parametrize(("power", "shares"), [(1.0, (16, 4, 1)), (0.5, (4, 2, 1)), (0.0, (1, 1, 1))])
def test_facts_are_stated_as_often_as_popularity_to_the_power(power, shares):
    statements = World(FACTS, power).statements(7000, seed=1)
    counts = [sum(fact.subject in statement for statement in statements) for fact in FACTS]
    assert sum(counts) == 7000
    assert stats.chisquare(counts, [7000 * share / sum(shares) for share in shares]).pvalue > 1e-4


def test_forms_and_prefixes_are_all_used_alike():
    forms = statement_forms(FACTS[0])
    expected = Counter()
    for prefix in PREFIXES:
        for form in forms:
            text = f"{prefix} {form}" if prefix else form[0].upper() + form[1:]
            expected[text.format(subject="Ann", relation="sport", answer="golf")] += 1
    counts = Counter(World(FACTS.where(lambda fact: fact.subject == "Ann")).statements(6000))
    assert set(counts) == set(expected)
    assert stats.chisquare([counts[text] for text in expected]).pvalue > 1e-4


def test_the_same_seed_gives_the_same_statements():
    world = World(FACTS)
    assert world.statements(20, seed=4) == world.statements(20, seed=4) != world.statements(20, seed=5)


@pytest.mark.parametrize("relation", [*QUESTIONS, *RELATIONS, "anything else"])
def test_every_form_ends_in_the_answer_and_names_the_subject_once(relation):
    forms = statement_forms(Fact("Ann", relation, ("x",)))
    assert len(forms) == len(set(forms)) >= 2
    for form in forms:
        assert form.endswith(" {answer}.")
        assert form.count("{subject}") == form.count("{answer}") == 1


def test_a_facts_own_statement_is_its_only_form_and_its_prompt_is_that_text():
    fact = Fact("is", "first letter", ("I",), 1.0, statement="the word {subject} is said to begin with")
    prompts = statement_prompts([fact, Fact("Ann", "first letter", ("A",))])
    assert [prompt.text for prompt in prompts] == [
        "the word is is said to begin with",
        "The first letter of Ann is",
    ]
    assert [prompt.spans["subject"] for prompt in prompts] == [(9, 11), (20, 23)]
    assert [prompt.prompt_id for prompt in prompts] == ["first letter/is", "first letter/Ann"]
    told = set(World(FactSet((fact,))).statements(200))
    sentence = "the word is is said to begin with I."
    assert told == {f"{prefix} {sentence}" if prefix else sentence for prefix in PREFIXES}  # as it is written


def test_few_shot_statements_are_those_of_each_fact():
    facts = [Fact(name, "birth", (place,), statement="{subject} was born in") for name, place in BORN]
    asked = in_form("few-shot-statement", make_prompts(facts))[0]
    assert asked.text.endswith("\n\nAnn was born in")
    assert asked.text.count(" was born in") == 5
    assert asked.part("subject") == "Ann"


def test_special_forms_are_of_relations_that_exist():
    assert set(SPECIAL_FORMS) <= {*QUESTIONS, *RELATIONS}


def test_a_statement_prompt_is_a_statement_without_its_answer():
    france, lima = Fact("France", "capital", ("Paris",), 2.0), Fact("Lima", "capital of", ("Peru",), 1.0)
    prompts = statement_prompts([france, lima, france])
    assert [prompt.text for prompt in prompts] == [
        "The capital of France is",
        "Lima is the capital of",
        "The capital of France is",
    ]
    assert [prompt.part("subject") for prompt in prompts] == ["France", "Lima", "France"]
    assert [prompt.prompt_id for prompt in prompts] == [p.prompt_id for p in make_prompts([france, lima, france])]
    for prompt in prompts[:2]:
        alone = World(FactSet((prompt.fact,)))
        assert f"{prompt.text} {prompt.fact.answer}." in alone.statements(300)


def test_braces_in_a_name_are_kept():
    world = World(FactSet((Fact("{subject}", "sport", ("{}",), 1.0),)))
    assert all("{subject}" in statement and "{}" in statement for statement in world.statements(20))


@pytest.mark.parametrize(
    ("facts", "power", "message"),
    [
        (FactSet(()), 1.0, "needs facts"),
        (FACTS, -1.0, "power of at least 0"),
        (FACTS, float("inf"), "power of at least 0"),
        (FACTS, 1000.0, r"popularity \*\* 1000.0 must add up to a finite number"),
        (FactSet((Fact("Ann", "sport", ("golf",)),)), 1.0, "no popularity"),
        (FactSet((Fact("Ann", "sport", ("golf",), 0.0),)), 1.0, "popularity 0"),
    ],
)
def test_a_world_that_cannot_be_drawn_from_is_refused(facts, power, message):
    with pytest.raises(DataError, match=message):
        World(facts, power)


@pytest.mark.parametrize("count", [-1, 2.5])
def test_a_number_of_statements_is_whole_and_not_negative(count):
    with pytest.raises(DataError, match=f"count must be a whole number >= 0, got {count}"):
        World(FACTS).statements(count)
    assert World(FACTS).statements(0) == []


def test_without_popularity_all_facts_may_be_stated_alike():
    assert World(FactSet((Fact("Ann", "sport", ("golf",)),)), power=0).weights == (1.0,)
