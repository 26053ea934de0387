"""The sentence on what a model stores."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attnbalance.readings.curves import Curve
from attnbalance.statistics.intervals import Interval
from attnbalance.storage.conclusions import Salience, TopShare
from attnbalance.storage.sentences import answer

NAN = float("nan")
TOP = {3: TopShare(Interval(0.5, 0.4, 0.6, 40), Interval(0.25, 0.2, 0.3, 40), 0.3)}


def a_salience(mean: tuple[float, ...], low: tuple[float, ...], high: tuple[float, ...]) -> Salience:
    return Salience("a", (), (), (Curve("v", "u", (0, 1), mean, low, high, 40),), TOP, 0, None)


@pytest.mark.parametrize(
    ("salience", "expected"),
    [
        (
            a_salience((0.5, -0.9), (0.1, -1.0), (0.7, 0.2)),
            "rises with popularity at 1 of 2 layers (layer 0; most: Spearman +0.50 [+0.10, +0.70] at layer 0).",
        ),
        (
            a_salience((0.5, -0.9), (0.1, -1.0), (0.7, -0.2)),
            "rises with popularity at 1 of 2 layers (layer 0; most: Spearman +0.50 [+0.10, +0.70] at layer 0), but "
            "falls with popularity at 1 of 2 layers (layer 1; most: Spearman -0.90 [-1.00, -0.20] at layer 1).",
        ),
        (
            a_salience((-0.5, -0.9), (-0.7, -1.0), (-0.1, -0.2)),
            "falls with popularity at 2 of 2 layers (layers 0 and 1; most: Spearman -0.90 [-1.00, -0.20] at layer 1).",
        ),
        (
            a_salience((0.1, -0.2), (-0.1, -0.5), (0.3, 0.2)),
            "measurably with popularity at no layer",
        ),
        (
            a_salience((0.1, 0.2), (NAN, NAN), (NAN, NAN)),
            "; no interval for a correlation with popularity: it needs at least 10 subjects of known popularity, "
            "none of which has half of the questions, and values that differ.",
        ),
        (
            a_salience((0.0, 0.98), (NAN, 0.9), (NAN, 0.99)),
            "rises with popularity at 1 of 2 layers (layer 1; most: Spearman +0.98 [+0.90, +0.99] at layer 1).",
        ),
    ],
)
def test_every_sure_direction_is_named_with_its_layers(salience: Salience, expected: str) -> None:
    text = answer(salience)
    assert text.startswith("a: 50.0% [40.0, 60.0] of answers are among the first 3 of their relation")
    assert expected in text


def test_without_popularity_only_ranks_are_named() -> None:
    assert answer(replace(a_salience((), (), ()), popularity=None)).endswith("random orders would give 30.0%).")


def test_answers_that_begin_like_a_wrong_one_are_counted() -> None:
    alike = replace(a_salience((), (), ()), popularity=None, ambiguous=30)
    assert answer(alike).endswith(
        "30.0%). 30 of 40 answers begin with the same token as a wrong answer, and are not told from it."
    )


def test_relevance_that_is_left_out_is_named_with_the_reason() -> None:
    told = replace(a_salience((), (), ()), popularity=None, read_only="is outside X")
    assert answer(told).endswith(
        "30.0%). Relevance (the push towards the subject) is left out for a, whose family is outside X, so that rows "
        "can be read but not edited."
    )
