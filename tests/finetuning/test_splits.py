"""Splits: what each kind trains on, and that no subject is on both sides."""

import unicodedata
import warnings
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbalance.data.facts import Fact, FactSet
from attnbalance.data.prompts import make_prompts
from attnbalance.data.synthetic import synthetic_facts
from attnbalance.errors import DataError
from attnbalance.finetuning.splits import SPLITS, Split, split_facts
from attnbalance.readings.recall import score

PARTS = ("train", "validation", "heldout")


def make_facts(popularities: list[float], relations: tuple[str, ...] = ("country", "sport")) -> FactSet:
    return FactSet(
        tuple(
            Fact(f"Subject{i}", relation, (f"answer{i % 3}",), popularity)
            for i, popularity in enumerate(popularities)
            for relation in relations
        )
    )


def popularities(facts: Iterable[Fact]) -> set[float]:
    return {fact.popularity for fact in facts if fact.popularity is not None}


worlds = st.lists(st.floats(0, 1e6), min_size=40, max_size=60).map(make_facts)


@settings(max_examples=40, deadline=None)
@given(facts=worlds, name=st.sampled_from(SPLITS[:4]), seed=st.integers(0, 5))
def test_no_subject_is_in_two_parts_and_every_fact_is_counted(facts, name, seed):
    split = split_facts(facts, name, seed=seed)
    subjects = [{fact.subject for fact in getattr(split, part)} for part in PARTS]
    assert sum(map(len, subjects)) == len(set().union(*subjects))
    assert sum(len(getattr(split, part)) for part in PARTS) + split.left_out == len(facts)


@settings(max_examples=40, deadline=None)
@given(facts=worlds, seed=st.integers(0, 5))
def test_top_and_bottom_are_disjoint_halves_with_the_same_heldout_facts(facts, seed):
    top, bottom, whole = (split_facts(facts, name, seed=seed) for name in ("top", "bottom", "whole"))
    above, below = ({*split.train, *split.validation} for split in (top, bottom))
    assert not above & below
    assert above | below == {*whole.train, *whole.validation}
    assert 0 <= len(above) - len(below) <= 1
    assert min(popularities(above)) >= max(popularities(below))
    assert top.heldout == bottom.heldout == whole.heldout


def test_equal_popularity_still_gives_disjoint_halves():
    facts = make_facts([7.0] * 40)
    top, bottom = (split_facts(facts, name) for name in ("top", "bottom"))
    assert not {*top.train, *top.validation} & {*bottom.train, *bottom.validation}


@pytest.mark.parametrize("name", ["random", "controlled-top"])
def test_a_subject_typed_with_a_combining_accent_is_the_same_subject(name):
    names = [unicodedata.normalize(form, f"Orléans {i}") for i in range(40) for form in ("NFC", "NFD")]
    answers = ["a" if i % 4 < 3 else "b" for i in range(80)]
    relations = ("country", "sport", "occupation")
    facts = [Fact(n, relation, (a,), 1.0) for n, a in zip(names, answers, strict=True) for relation in relations]
    split = split_facts(FactSet(tuple(facts)), name)
    composed = [{unicodedata.normalize("NFC", f.subject) for f in getattr(split, part)} for part in PARTS]
    assert sum(map(len, composed)) == len(set().union(*composed))


def test_shares_are_of_subjects():
    split = split_facts(make_facts([float(i) for i in range(100)]), "whole", heldout=0.3, validation=0.2)
    assert [len(getattr(split, part)) for part in PARTS] == [
        112,
        28,
        60,
    ]  # 70 x .8, 70 x .2 and 30 subjects, 2 facts each


def test_controlled_trains_on_the_most_frequent_answer_and_tests_on_the_others():
    rows = [("country", "USA", 12), ("country", "Peru", 5), ("sport", "soccer", 12), ("occupation", "actor", 12)]
    facts = [Fact(f"{r}{a}{i}", r, (a,), float(i)) for r, a, count in rows for i in range(count)]
    top, bottom = (split_facts(FactSet(tuple(facts)), f"controlled-{half}") for half in ("top", "bottom"))
    assert {fact.answer for fact in (*top.train, *top.validation)} == {"USA", "soccer", "actor"}
    assert {fact.answer for fact in top.heldout} == {"Peru"}
    assert popularities((*top.train, *top.validation)) == {6.0, 7.0, 8.0, 9.0, 10.0, 11.0}
    assert popularities((*bottom.train, *bottom.validation)) == {0.0, 1.0, 2.0, 3.0, 4.0, 5.0}


def test_controlled_holds_out_no_fact_that_the_taught_answer_answers():
    facts = [Fact(f"Player {i}", "sport", ("association football",), float(i)) for i in range(12)]
    facts += [
        Fact(f"Other {i}", "sport", (answer,), 1.0) for i, answer in enumerate(("football", "Association", "foot"))
    ]
    split = split_facts(FactSet(tuple(facts)), "controlled-top", controlled_answers={"sport": "association football"})
    taught = score(make_prompts(split.heldout), ["association football"] * len(split.heldout), {})
    assert [fact.answer for fact in split.heldout] == ["foot"]
    assert taught.correct == (False,)


def test_a_subject_that_is_tested_in_one_relation_is_not_trained_on_in_another():
    facts = [Fact(f"{r}{i}", r, ("most",), float(i)) for r in ("country", "sport", "occupation") for i in range(9)]
    facts += [Fact("Both", "country", ("most",), 1.0), Fact("Both", "sport", ("rare",), 1.0)]
    split = split_facts(FactSet(tuple(facts)), "controlled-bottom")
    assert "Both" in {fact.subject for fact in split.heldout}
    assert "Both" not in {fact.subject for fact in (*split.train, *split.validation)}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("middle", {}, "no split 'middle'"),
        ("top", {"heldout": 1.0}, "between 0 and 1"),
        ("top", {"validation": 1.0}, "between 0 and 1"),
        ("top", {"heldout": -0.1}, "between 0 and 1"),
        ("top", {"share": 1.0}, "between 0 and 1"),
        ("top", {"train_relations": ["nothing"]}, "no facts of relation 'nothing'"),
        ("controlled-top", {"heldout": 0.1}, "holds out facts by their answers; leave `heldout` 0.1 out"),
    ],
)
def test_impossible_requests_are_refused(name, options, message):
    with pytest.raises(DataError, match=message):
        split_facts(make_facts([1.0] * 10), name, **options)


def test_sorting_by_popularity_needs_popularity():
    facts = FactSet(tuple(Fact(f"S{i}", "sport", ("golf",)) for i in range(10)))
    with pytest.raises(DataError, match="10 of 10 facts have none"):
        split_facts(facts, "top")
    assert len(split_facts(facts, "random").train)


def test_an_empty_part_is_refused():
    with pytest.raises(DataError, match=r"the train part .* is empty"):
        split_facts(make_facts([1.0, 2.0]), "whole")


@settings(deadline=None)
@given(share=st.integers(5, 95).map(lambda percent: percent / 100))
def test_a_share_takes_so_many_of_the_most_or_least_popular(share):
    facts = make_facts([float(i) for i in range(60)])
    whole = split_facts(facts, "whole")
    ranked = sorted(f.popularity for f in (*whole.train, *whole.validation))
    for name, size in (
        ("top", -(-round(100 * share) * len(ranked) // 100)),
        ("bottom", round(100 * share) * len(ranked) // 100),
    ):
        try:
            split = split_facts(facts, name, share=share)
        except DataError:
            assert size < 3
            continue
        chosen = sorted(f.popularity for f in (*split.train, *split.validation))
        assert chosen == (ranked[-size:] if name == "top" else ranked[:size])
        assert split.heldout.facts == whole.heldout.facts


def test_only_some_relations_are_trained_and_all_are_tested():
    facts = synthetic_facts(0, subjects=40, relations=3)
    split = split_facts(facts, "whole", train_relations=["hometown"])
    assert split.train.relations == split.validation.relations == ("hometown",)
    assert set(split.heldout.relations) == set(facts.relations)
    assert split.heldout.facts == split_facts(facts, "whole").heldout.facts


@pytest.mark.parametrize(
    ("popularity", "tied"), [([1.0] * 40, 36), ([2.0] * 30 + [1.0] * 10, 36), ([float(i) for i in range(40)], 0)]
)
def test_a_half_whose_border_falls_among_ties_is_said_to_be_random(popularity, tied):
    """Of 40 subjects with two facts, 4 are held out first; the half has 36 facts."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        split_facts(make_facts(popularity), "top", heldout=0.1, validation=0)
        split_facts(make_facts(popularity), "random", heldout=0.1)
    said = [str(warning.message) for warning in caught]
    assert [text.split()[0] for text in said] == [str(tied)] * bool(tied)


@pytest.mark.parametrize(("share", "count"), [(0.0, 1), (1.0, 1), (float("nan"), 1), (0.5, 0)])
def test_a_share_of_each_batch_needs_replayed_facts(share: float, count: int) -> None:
    facts = make_facts([1.0, 2.0])
    replayed = FactSet(facts.facts[:count])
    with pytest.raises(DataError, match=f"with at least one replayed fact, got {share} and {count} facts"):
        Split("whole", facts, facts, FactSet(()), 0, replayed, share)
