"""The language of objectives."""

from __future__ import annotations

import pytest

from attnbalance.errors import DataError
from attnbalance.finetuning.objectives.expression import LONGEST, parse_expression


@pytest.mark.parametrize("weight", ["0", "-1", "0.0", "1e999", "1.2.3", "-0.5", "1e-300", "9e-7", "1e30", "1000001"])
def test_weights_lie_between_a_millionth_and_a_million(weight: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_expression(f"ce + {weight}*floor(0.2)")
    expected = f"the weight of floor must be between 0.000001 and 1,000,000, got '{weight}'"
    assert str(caught.value) == f"objective 'ce + {weight}*floor(0.2)': {expected}"
    assert [parse_expression(f"{text}*ce").terms[0].weight for text in ("1e-6", "1000000")] == [1e-6, 1e6]


def test_a_weight_may_have_an_exponent_with_a_sign() -> None:
    terms = parse_expression("1e+3*ce+1E+06*floor + 2.e+1*kl+ce").terms
    assert [(term.name, term.weight) for term in terms] == [("ce", 1e3), ("floor", 1e6), ("kl", 20.0), ("ce", 1.0)]


def test_terms_are_read_as_they_are_written() -> None:
    terms = parse_expression(" ce+0.3 * row-anchor( question ) + own() ").terms
    assert [(term.name, term.argument, term.weight) for term in terms] == [
        ("ce", None, 1.0),
        ("row-anchor", "question", 0.3),
        ("own", None, 1.0),
    ]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("recommended", ["ce", "kl"]),
        ("floor + recommended", ["floor", "ce", "kl"]),
        (" recommended +floor", ["ce", "kl", "floor"]),
        ("ce(recommended)", ["ce"]),
        ("not-recommended", ["not-recommended"]),
        ("recommended-not", ["recommended-not"]),
    ],
)
def test_recommended_is_a_term_and_no_part_of_another_word(text: str, names: list[str]) -> None:
    assert [term.name for term in parse_expression(text).terms] == names


@pytest.mark.parametrize("text", ["2*recommended", "recommended(statement)", "recommended()"])
def test_recommended_takes_neither_weight_nor_argument(text: str) -> None:
    with pytest.raises(DataError, match="recommended takes no weight and no argument"):
        parse_expression(text)


def test_an_expression_has_a_largest_length() -> None:
    assert parse_expression("ce" + " " * (LONGEST - 2)).terms[0].name == "ce"
    with pytest.raises(DataError, match="an objective may have 2,000 characters, got 2,001"):
        parse_expression("ce" + " " * (LONGEST - 1))
