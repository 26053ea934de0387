"""The line of an output that holds its answer."""

from __future__ import annotations

import pytest

from attnbalance.data.lines import first_line, is_blank, visible


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("Paris\nLyon", "Paris"),
        ("\n \u200b\nParis", "Paris"),
        ("It is:\n\n**Paris**\nLyon", "It is: **Paris**"),
        ("A:\nB:\nC", "A: B: C"),
        ("**Answer:**\nParis", "**Answer:** Paris"),
        ("答案：\n北京", "答案： 北京"),  # noqa: RUF001
        ("Only this:", "Only this:"),
        ("---\nParis", "Paris"),
        ("———\nParis", "Paris"),
        ("```text\nParis\n```", "Paris"),
        ("$\nThe dollar sign", "$"),
        ("``\nParis", "Paris"),
        ("🇨🇦\nOttawa", "🇨🇦"),
        ("?!\n", "?!"),
        ("\u00ad \u200b", ""),
    ],
)
def test_the_first_line_shows_more_than_punctuation_and_goes_on_after_a_colon(output: str, line: str) -> None:
    assert first_line(output) == line


def test_what_only_formats_a_text_is_not_visible() -> None:
    assert visible("Pa\u200bris\u00ad") == "Paris"


def test_variation_selectors_are_not_visible() -> None:
    assert (visible("❤\ufe0f"), visible("葛\U000e0100飾")) == ("❤", "葛飾")
    assert is_blank("\ufe0f \U000e0100")


def test_what_joins_signs_is_kept_and_what_joins_letters_is_not() -> None:
    family = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
    assert visible(family) == family
    assert visible("❤\ufe0f\u200d\U0001f525") == "❤\u200d\U0001f525"
    assert visible("می\u200dخواهم\u200d") == "میخواهم"  # noqa: RUF001
    assert visible("\u200d❤\u200d") == "❤"
    assert visible("\U0001f468\u200d\ufe0f\u200d\U0001f469") == "\U0001f468\u200d\U0001f469"
    assert is_blank("\u200d")
