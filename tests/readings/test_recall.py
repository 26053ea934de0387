"""Recall: what is right, shares by popularity, and McNemar's test against hand numbers."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from attnbalance.data.facts import Fact
from attnbalance.data.prompts import Template, make_prompts
from attnbalance.data.scoring import CONTAINMENT, EXACT_MATCH, WHOLE_WORDS
from attnbalance.errors import DataError, OutputError
from attnbalance.readings.recall import Recall, score
from tests.recalls import a_recall


def test_scoring_tells_right_answers_from_the_shortcut():
    facts = [Fact(s, "country", (a,), p) for s, a, p in (("A", "USA", 3.0), ("B", "Peru", 2.0), ("C", "Chad", None))]
    prompts = make_prompts([*facts, Fact("D", "sport", ("golf",))])
    found = score(prompts, ["usa", "It is the USA", "France", "soccer"], {"country": ["USA", "United States"]})
    assert found.correct == (True, False, False, False)
    assert found.shortcut == (False, True, False, None)  # a right answer is no shortcut; sport has none
    assert found.popularity == (3.0, 2.0, None, None)
    assert found.prompt_ids == tuple(prompt.prompt_id for prompt in prompts)
    rate = found.shortcut_rate()
    assert rate is not None
    assert (rate.mean, rate.n) == (0.5, 2)


def test_both_scorings_are_kept_and_one_counts():
    facts = [Fact("Italy", "country", ("Italy", "IT")), Fact("Rome", "country", ("Italy", "IT"))]
    outputs = [" United States of America", " Italy"]
    words = score(make_prompts(facts), outputs, {})
    assert words.correct == words.right[WHOLE_WORDS] == (False, True)
    assert words.right[CONTAINMENT] == (True, True)  # un-it-ed
    contained = score(make_prompts(facts), outputs, {}, CONTAINMENT)
    assert contained.correct == (True, True)
    assert contained.by(WHOLE_WORDS).accuracy().mean == words.accuracy().mean == 0.5
    assert contained.by(CONTAINMENT) == contained
    assert contained.by(WHOLE_WORDS).shortcut_rate() is None  # it was told which wrong answers by containment are it
    with pytest.raises(DataError, match="must be one of whole-words, containment, exact-match, got 'exact'"):
        score(make_prompts(facts), outputs, {}, "exact")


def test_exact_matches_and_f1_are_of_the_first_line():
    facts = [Fact("A", "country", ("New York City", "NYC"), 1.0), *(Fact(s, "country", ("Peru",), 2.0) for s in "BCDE")]
    outputs = ["\n nyc!\nIt is a city", "It is the Peru", "Peru\nLima", "Chad", "Peru, Peru"]
    found = score(make_prompts(facts), outputs, {}, "exact-match")
    assert found.correct == (True, False, True, False, False)
    by_hand = (1.0, 2 * 1 / (3 + 1), 1.0, 0.0, 2 * 1 / (2 + 1))  # of 3 words, 1 in common with 1
    assert found.f1 == pytest.approx(by_hand)
    assert found.mean_f1().mean == pytest.approx(sum(by_hand) / 5)
    assert math.isnan(found.mean_f1().low)  # five subjects so different tell nothing
    many = [Fact(f"{fact.subject}{i}", fact.relation, fact.answers) for i in range(6) for fact in facts]
    spread = score(make_prompts(many), outputs * 6, {}).mean_f1()
    assert 0 < spread.low < sum(by_hand) / 5 < spread.high < 1
    rare = [Fact(f"s{i}", "r", ("yes",)) for i in range(300)]
    few = score(make_prompts(rare), ["yes"] * 3 + ["no"] * 297, {}).mean_f1()
    assert (few.mean, math.isnan(few.low)) == (0.01, True)  # most resamples hold hardly any
    assert found.at(found.prompt_ids[1:3]).f1 == found.f1[1:3]
    alike = found.at([found.prompt_ids[0], found.prompt_ids[2]]).mean_f1()
    assert alike.mean == 1.0
    assert math.isnan(alike.low)  # no spread says nothing of other questions


def test_a_subject_is_one_cluster_however_its_accents_were_typed():
    typed = [Fact("Zürich", "country", ("Peru",)), Fact("Zu\u0308rich", "sport", ("golf",))]
    assert len(set(score(make_prompts(typed), ["Peru", "golf"], {}).subjects)) == 1


def test_the_shortcut_stands_as_whole_words_under_each_scoring():
    prompts = make_prompts([Fact("A", "country", ("Peru",))])
    shortcuts = {"country": ("US",)}
    for scoring in (WHOLE_WORDS, CONTAINMENT):
        assert score(prompts, ["Australia"], shortcuts, scoring).shortcut == (False,)
        assert score(prompts, ["the US of A"], shortcuts, scoring).shortcut == (True,)
    assert score(
        prompts,
        [
            "the US of A",
        ],
        shortcuts,
        EXACT_MATCH,
    ).shortcut == (False,)
    assert score(prompts, ["The US."], shortcuts, EXACT_MATCH).shortcut == (True,)
    assert score(prompts, ["The US."], {"country": ()}).shortcut == (None,)  # no answer is no answer never given


def test_without_wrong_answers_of_a_trained_relation_there_is_no_shortcut_rate():
    assert a_recall([True, True]).shortcut_rate() is None
    assert a_recall([True, False], shortcut=[False, None]).shortcut_rate() is None


def test_fifths_go_from_the_most_popular_down_and_leave_the_unknown_out():
    popularity = [None if i == 3 else float(i) for i in range(11)]
    parts = a_recall([True] * 11, popularity=popularity).quintiles()
    assert parts == [[10, 9], [8, 7], [6, 5], [4, 2], [1, 0]]
    assert a_recall([True] * 3).quintiles() == []
    assert a_recall([True] * 3, popularity=[1.0, 2.0, 3.0]).quintiles() == [[2], [1], [0]]


def test_equal_popularities_fall_into_fifths_whatever_their_relation_or_order():
    relations = 5
    names = [f"{relation}/{i}" for relation in "abcde" for i in range(20)]
    correct = [name.startswith("a") for name in names]  # one relation in five is known
    recall = replace(a_recall(correct, popularity=[1.0] * len(names)), prompt_ids=tuple(names))
    shares = [sum(correct[i] for i in part) / len(part) for part in recall.quintiles()]
    spread = math.sqrt(0.2 * 0.8 / 20)  # of a share of 20 drawn at random
    assert max(abs(share - 1 / relations) for share in shares) < 3 * spread
    assert recall.tied() == [20] * 5
    turned = recall.at(names[::-1])
    assert [[turned.prompt_ids[i] for i in part] for part in turned.quintiles()] == [
        [names[i] for i in part] for part in recall.quintiles()
    ]


def test_ties_are_counted_where_they_cross_fifths_alone():
    assert a_recall([True] * 5, popularity=[5.0, 4.0, 3.0, 2.0, 1.0]).tied() == [0] * 5
    assert a_recall([True] * 10, popularity=[5.0, 5.0, 4.0, 4.0, 3.0, 3.0, 2.0, 2.0, 1.0, 1.0]).tied() == [0] * 5
    assert a_recall([True] * 10, popularity=[9.0, 8.0, 4.0, 3.0, 3.0, 3.0, 3.0, 2.0, 1.0, 0.0]).tied() == [
        0,
        1,
        2,
        1,
        0,
    ]
    assert a_recall([True] * 3).tied() == []


def test_ties_are_counted_where_they_cross_the_border_of_the_most_popular_alone():
    apart = a_recall([True] * 10, popularity=[float(i) for i in range(10)])
    assert apart.tied_tops() == [0] * 10
    some = a_recall([True] * 10, popularity=[9.0, 8.0, 4.0, 3.0, 3.0, 3.0, 3.0, 2.0, None, 0.0])
    assert [x for x, _ in some.by_top_percentile()] == list(range(10, 101, 10))
    assert [found.n for _, found in some.by_top_percentile()] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 9]
    assert some.tied_tops() == [0, 0, 0, 1, 2, 3, 0, 0, 0, 0]
    assert a_recall([True] * 3).tied_tops() == []


def test_accuracies_by_fifth_and_by_top_percentile_are_hand_counted():
    recall = a_recall([i < 5 for i in range(10)], popularity=[100.0 - i for i in range(10)])
    fifths = recall.by_quintile()
    assert [found.mean for _, found in fifths] == [1, 1, 0.5, 0, 0]
    assert [bounds for bounds, _ in fifths][:2] == [(99, 100), (97, 98)]
    tops = recall.by_top_percentile()
    assert [x for x, _ in tops] == list(range(10, 101, 10))
    assert [found.mean for _, found in tops] == pytest.approx([1, 1, 1, 1, 1, 5 / 6, 5 / 7, 5 / 8, 5 / 9, 0.5])
    assert [found.n for _, found in tops] == list(range(1, 11))


def test_the_whole_is_the_last_top_percentile():
    recall = a_recall([i % 3 == 0 for i in range(30)], popularity=[float(i) for i in range(30)])
    assert recall.by_top_percentile()[-1][1].mean == recall.accuracy().mean == pytest.approx(1 / 3)


def test_selection_takes_every_column_in_the_order_asked():
    recall = a_recall([True, False, True], popularity=[1.0, None, 3.0], shortcut=[False, True, False])
    found = recall.at(["p2", "p1"])
    assert (found.correct, found.shortcut, found.popularity) == ((True, False), (False, True), (3.0, None))
    with pytest.raises(DataError, match="no prompt 'x'"):
        recall.at(["x"])


def test_a_prompt_that_occurs_twice_is_refused():
    prompts = [
        Template(name, text).render(Fact("France", "capital", ("Paris",)))
        for name, text in (("a", "{question}"), ("b", "Q: {question}"))
    ]
    with pytest.raises(DataError, match="occurs more than once"):
        score(prompts, ["Paris", "Lyon"], {})
    with pytest.raises(DataError, match="occurs more than once"):
        score(prompts[:1], ["Paris"], {}).at([prompts[0].prompt_id] * 2)


def test_saved_answers_are_read_again_and_refused_by_the_name_that_was_changed() -> None:
    prompts = make_prompts([Fact("Oslo", "country", ("Norway",), 3.0), Fact("Lima", "country", ("Peru",))])
    answers = score(prompts, ["Norway", "Chile"], {"country": ("Norway",)})
    saved = json.loads(json.dumps(asdict(answers)))
    assert Recall.from_json(saved, Path("a.json")) == answers
    for name in saved:
        for changed in (saved | {name: 3}, {kept: value for kept, value in saved.items() if kept != name}):
            with pytest.raises(OutputError, match=f"a.json was changed: '{name}' must be"):
                Recall.from_json(changed, Path("a.json"))
    with pytest.raises(OutputError, match="a.json was changed: 'containment' must be a collection of bool, got none"):
        Recall.from_json(saved | {"right": {WHOLE_WORDS: [True, False]}}, Path("a.json"))


def test_recall_prints_the_number_of_right_answers():
    prompts = make_prompts([Fact("A", "country", ("Peru",)), Fact("B", "country", ("Chad",))])
    assert repr(score(prompts, ["Peru", "Perugia"], {})) == "Recall(1 of 2 right by whole-words)"
