"""Controls of a study, against hand-counted numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from attnbalance.data.facts import Fact, FactSet
from attnbalance.data.prompts import make_prompts
from attnbalance.data.synthetic import synthetic_facts
from attnbalance.finetuning.splits import Split, split_facts
from attnbalance.studies.controls import constant, relabelled, scored


def a_split() -> Split:
    return split_facts(synthetic_facts(0, subjects=60, answers=5), "bottom", seed=0)


def test_shuffled_labels_keep_every_answer_of_a_relation_and_tell_nothing_of_a_fact() -> None:
    split = a_split()
    other = relabelled(split, "shuffled", lambda fact: "", 3)
    for part in ("train", "validation"):
        own, new = getattr(split, part), getattr(other, part)
        assert [(f.subject, f.relation) for f in own] == [(f.subject, f.relation) for f in new]
        assert Counter((f.relation, f.answers) for f in own) == Counter((f.relation, f.answers) for f in new)
    same = sum(a.answer == b.answer for a, b in zip(split.train, other.train, strict=True)) / len(split.train)
    shares = [
        sum((count / len(facts)) ** 2 for count in Counter(fact.answer for fact in facts).values())
        for facts in (split.train.of_relations([relation]) for relation in split.train.relations)
    ]
    by_chance = sum(shares) / len(shares)
    assert same == pytest.approx(by_chance, abs=4 * (by_chance * (1 - by_chance) / len(split.train)) ** 0.5)
    assert other.heldout == split.heldout
    assert relabelled(split, "shuffled", lambda fact: "", 3) == other
    assert relabelled(split, "shuffled", lambda fact: "", 4) != other


def test_labels_of_the_base_are_the_first_sentence_that_it_says() -> None:
    split = a_split()
    said = {"employer": " Acme. It is", "hometown": " Old Town\nIn", "instrument": "  ", "teacher": ". No"}
    other = relabelled(split, "base", lambda fact: said[fact.relation], 0)
    answers = {fact.relation: fact.answers for fact in (*other.train, *other.validation)}
    assert answers == {"employer": ("Acme",), "hometown": ("Old Town",)}
    assert sum(fact.relation == "employer" for fact in other.train) == sum(
        fact.relation == "employer" for fact in split.train
    )


def test_the_facts_own_answers_are_no_other_split() -> None:
    split = a_split()
    assert relabelled(split, "facts", lambda fact: "", 0) is split


def test_a_constant_answer_is_right_where_it_is_accepted() -> None:
    facts = [Fact("a", "country", ("USA", "US")), Fact("b", "country", ("Peru",))]
    scores = constant(make_prompts(facts), {"country": ("US", "USA")})
    assert scores.outputs == ("US", "US")
    assert scores.correct == (True, False)
    assert scores.shortcut == (False, True)


def test_of_a_relation_that_is_not_trained_the_constant_answer_is_the_most_frequent_one() -> None:
    facts = [Fact("a", "country", ("Peru",)), *(Fact(name, "sport", ("golf",)) for name in "bc")]
    scores = constant(make_prompts([*facts, Fact("d", "sport", ("chess",))]), {"country": ("US",)})
    assert scores.outputs == ("US", "golf", "golf", "golf")
    assert scores.correct == (False, True, True, False)
    assert scores.shortcut == (True, None, None, None)


def test_scores_are_counted_by_what_the_base_completes() -> None:
    facts = FactSet(tuple(Fact(name, "r", (name,), float(i)) for i, name in enumerate("abcdef")))
    asked, trained = make_prompts(facts)[:2], make_prompts(facts)[2:]
    stated = {f"r/{name}": name in "acd" for name in "abcdef"}
    answers = constant(asked, {"r": ("a",)})
    learned = constant(trained, {"r": ("c",)})
    scores = scored(answers, stated, learned)
    assert (scores["correct"], scores["stated"]) == ([True, False], [True, False])
    assert (scores["new_facts"], scores["kept_facts"]) == (0.0, 0.5)  # of e, f; of c, d
    alone = scored(answers, stated)
    assert alone["new_facts"] is alone["kept_facts"] is alone["drift"] is alone["subject_attention"] is None


def test_equal_popularities_make_no_fifths() -> None:
    facts = [Fact(f"S{i}", "r", (f"A{i % 5}",), 1.0) for i in range(20)]
    prompts = make_prompts(facts)
    answers = constant(prompts, {})
    assert scored(answers, dict.fromkeys(answers.prompt_ids, True))["accuracy_by_quintile"] == []
    other = constant(make_prompts([replace(fact, popularity=float(i)) for i, fact in enumerate(facts)]), {})
    assert len(scored(other, dict.fromkeys(other.prompt_ids, True))["accuracy_by_quintile"]) == 5
