"""The line of an output that holds its answer."""

from __future__ import annotations

import pytest

from attnbalance.data.lines import first_line, visible


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
