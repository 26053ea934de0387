"""The invented world: its size, popularity and answers."""

from collections import Counter

import numpy as np
import pytest
from scipy import stats

from attnbalance.data.synthetic import MOST_POPULAR, synthetic_facts
from attnbalance.errors import DataError


def test_every_subject_has_every_relation_and_one_popularity():
    facts = synthetic_facts(3, subjects=50, relations=3, answers=5)
    assert len(facts) == 150
    for fact in facts:
        assert len(fact.subject.split()) == 2
    by_subject = {fact.subject: {f.popularity for f in facts if f.subject == fact.subject} for fact in facts}
    assert len(by_subject) == 50
    assert all(len(popularity) == 1 for popularity in by_subject.values())


def test_popularity_is_zipf_by_hand():
    facts = synthetic_facts(0, subjects=4, relations=1, answers=2)
    assert [fact.popularity for fact in facts] == [MOST_POPULAR, MOST_POPULAR / 2, MOST_POPULAR / 3, MOST_POPULAR / 4]


def test_the_same_seed_gives_the_same_world_and_another_seed_another():
    assert synthetic_facts(5, subjects=20) == synthetic_facts(5, subjects=20)
    assert {f.subject for f in synthetic_facts(5)}.isdisjoint({f.answer for f in synthetic_facts(5)})
    assert synthetic_facts(5, subjects=20).facts != synthetic_facts(6, subjects=20).facts


def test_answers_of_a_relation_follow_zipf_and_are_its_own():
    facts = synthetic_facts(1, subjects=2000, relations=2, answers=6)
    expected = np.array([1 / j for j in range(1, 7)]) / sum(1 / j for j in range(1, 7))
    answers = []
    for relation in facts.relations:
        counts = sorted(Counter(f.answer for f in facts if f.relation == relation).values(), reverse=True)
        assert stats.chisquare(counts, 2000 * expected).pvalue > 1e-4
        answers.append({f.answer for f in facts if f.relation == relation})
    assert answers[0].isdisjoint(answers[1])


def test_no_name_tells_the_subject_alone():
    facts = synthetic_facts(2)
    for index in (0, 1):
        names = Counter(subject.split()[index] for subject in {f.subject for f in facts})
        assert np.mean(list(names.values())) > 20


@pytest.mark.parametrize(
    "sizes",
    [{"subjects": 1}, {"answers": 1}, {"relations": 0}, {"relations": 99}, {"subjects": 10**9}, {"answers": 100_000}],
)
def test_impossible_sizes_are_refused(sizes):
    with pytest.raises(DataError, match="needs 2 to 1000000 subjects"):
        synthetic_facts(0, **sizes)
