"""Messages: what is cut in them, and what always stays."""

from __future__ import annotations

import pytest

from attnbalance.errors import (
    MESSAGE,
    VALUE,
    AttnBalanceError,
    BadRowsError,
    DataError,
    DivergenceError,
    ModelError,
    OutputError,
    shortened,
)

VALUES = {
    "a quoted text": repr("two words " * 1000),
    "a text with both quotes": repr('it\'s "so" ' * 1000),
    "a list": repr(list(range(5000))),
    "a mapping": repr({f"key {i}": i for i in range(5000)}),
    "a number": "9" * 4000,
    "a path": "/tmp/" + "x" * 100_000,
    "a bare text without white space": "x" * 600_000,
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_long_value_is_cut_where_it_stands_and_the_message_around_it_stays(value: str) -> None:
    message = str(DataError(f"steps must be a number of at least 1, got {value}; write a number"))
    expected = (
        f"steps must be a number of at least 1, got {value[: VALUE - 4]}...{value[-1]} ({len(value):,} characters)"
    )
    assert message.startswith(expected[:-1])
    assert message.endswith("characters); write a number")
    assert len(message) < len(expected) + 30


@pytest.mark.parametrize("kind", [AttnBalanceError, DataError, ModelError, OutputError, DivergenceError])
def test_every_kind_of_error_ends_even_where_no_value_can_be_told(kind: type[AttnBalanceError]) -> None:
    message = str(kind("expected this, got " + "short words " * 50_000 + "do that"))
    assert len(message) <= MESSAGE
    assert message.startswith("expected this, got short words")
    assert "characters left out" in message
    assert message.endswith("do that")


def test_bad_rows_show_the_first_three_and_the_remedy_however_long_the_rows_are() -> None:
    message = str(BadRowsError("rows are bad", [(i, "many words " * 5000) for i in range(3)], 3, "mend these rows"))
    assert len(message) <= MESSAGE
    assert message.startswith("3 of 3 rows are bad:\n  row 1: many words")
    assert message.endswith("mend these rows")


def test_a_message_of_ordinary_length_stays_as_it_is() -> None:
    quotes = "the model's layers don't hold 'a' or \"b\" " * 20  # apostrophes are no quotation marks
    for message in (quotes, "x" * VALUE, "words " * 300, "{question} [1, 2] 'qa'"):
        assert shortened(message) == message
        assert str(DataError(message)) == message


def test_a_message_that_is_raised_again_inside_another_is_not_cut_twice() -> None:
    for value in VALUES.values():
        once = shortened(f"got {value}, do that")
        assert shortened(once) == once
