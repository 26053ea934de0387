"""SQuAD's scores: examples worked by hand from its definition, and properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnbalance.data.squad import exact_match, f1_score, squad_words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The  quick, brown fox!", ["quick", "brown", "fox"]),
        ("a.b and An c-d", ["ab", "and", "cd"]),  # punctuation goes before articles
        ("Theatre an-apple", ["theatre", "anapple"]),
        ("the a an", []),
        ("«Ñandú»", ["«ñandú»"]),  # other punctuation than ASCII's stays, as in SQuAD's script
    ],
)
def test_words_are_in_small_letters_without_punctuation_and_articles(text: str, words: list[str]) -> None:
    assert squad_words(text) == words


@pytest.mark.parametrize(
    ("line", "answers", "match", "f1"),
    [
        ("Paris", ["Paris"], True, 1.0),
        ("the PARIS.", ["Lyon", "Paris"], True, 1.0),
        ("It is Paris", ["Paris"], False, 2 * (1 / 3) * 1 / (1 / 3 + 1)),
        ("New York", ["New York City"], False, 2 * 1 * (2 / 3) / (1 + 2 / 3)),
        ("York New", ["New York"], False, 1.0),  # F1 ignores the order
        ("Paris Paris", ["Paris"], False, 2 * 0.5 * 1 / 1.5),
        ("", ["Paris"], False, 0.0),
        ("the", ["a"], False, 0.0),
        ("Lyon", [], False, 0.0),
    ],
)
def test_scores_worked_by_hand(line: str, answers: list[str], match: bool, f1: float) -> None:
    assert exact_match(line, answers) == match
    assert f1_score(line, answers) == pytest.approx(f1)


WORDS = st.lists(st.sampled_from(["new", "york", "the", "city", "a.", "of"]), max_size=6).map(" ".join)


@given(WORDS, st.lists(WORDS, max_size=4))
def test_an_exact_match_has_f1_of_1_and_no_answer_more_lowers_a_score(line: str, answers: list[str]) -> None:
    score = f1_score(line, answers)
    assert 0 <= score <= 1
    if exact_match(line, answers):
        assert score == 1.0
    assert f1_score(line, [*answers, "york"]) >= score
    assert all(f1_score(line, [answer]) == pytest.approx(f1_score(answer, [line])) for answer in answers)  # symmetric
