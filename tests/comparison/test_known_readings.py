"""The readings that a comparison can hold."""

from __future__ import annotations

import pytest

from attnbalance.comparison.known_readings import READINGS, chosen_readings, reading_words
from attnbalance.errors import DataError


def test_the_maximum_of_the_mean_over_heads_is_said_in_words() -> None:
    assert "the largest attention probability, averaged over heads" in READINGS["subject attention"].about(
        "max-of-mean"
    )


def test_subject_attention_comes_first_and_once() -> None:
    assert chosen_readings() == ("subject attention",)
    assert chosen_readings(["rest share", "subject attention"]) == ("subject attention", "rest share")


def test_an_unknown_reading_is_refused_with_the_known_ones() -> None:
    with pytest.raises(DataError, match=r"readings must be among subject attention, .*; got 'entropy'"):
        chosen_readings(["entropy"])
    with pytest.raises(DataError, match="must be a list of names, got the text 'rest share'"):
        chosen_readings("rest share")


@pytest.mark.parametrize("title", READINGS)
def test_every_reading_has_words(title: str) -> None:
    entry = READINGS[title]
    assert entry.about("max").endswith(".")
    assert reading_words(title) == (entry.verb, entry.complement)
