"""Instructions: prompts as Alpaca writes them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attnbalance.data.instructions import Instruction, InstructionSet
from attnbalance.errors import DataError


def test_prompts_are_alpacas_without_their_first_sentence() -> None:
    assert Instruction("Name a {city}.", "Rome").prompt == "### Instruction:\nName a {city}.\n\n### Response:\n"
    row = Instruction("Where?", "Oslo", "He moved to Oslo.")
    assert row.prompt == "### Instruction:\nWhere?\n\n### Input:\nHe moved to Oslo.\n\n### Response:\n"


def test_the_hash_tells_rows_and_their_order_apart() -> None:
    first, second = Instruction("a", "b"), Instruction("a", "b", "c")
    sets = [InstructionSet(rows) for rows in ((first, second), (second, first), (first,))]
    assert len({each.sha256 for each in sets}) == 3
    assert replace(sets[0], source="elsewhere").sha256 == sets[0].sha256


def test_texts_must_be_texts() -> None:
    with pytest.raises(DataError, match="output must be text"):
        Instruction("a", None)  # pyright: ignore[reportArgumentType]
    for value in (None, 0, ["text"]):
        with pytest.raises(DataError, match="input must be text"):
            Instruction("a", "b", value)  # pyright: ignore[reportArgumentType]
    with pytest.raises(DataError, match="expected instructions, got 'a'"):
        InstructionSet(("a",))  # pyright: ignore[reportArgumentType]


def test_rows_without_input_are_counted_once_and_only_if_there_are_any() -> None:
    both = InstructionSet((Instruction("a", "b"), Instruction("a", "b", "c")), dropped={"no output": 2})
    kept = both.with_input()
    assert (kept.rows, kept.dropped) == (both.rows[1:], {"no output": 2, "no input": 1})
    assert kept.with_input() == kept


def test_rows_that_name_one_of_some_names_are_left_out() -> None:
    texts = ("Rome", "rome!", "Romeo", "in New York,", "New Yorker", "U.S. law", "(u.s.)", "US")
    rows = [Instruction("Say it.", text) for text in texts]
    rows += [Instruction("Go to Rome.", "I go."), Instruction("Go.", "I go.", "Rome is far.")]
    left = InstructionSet(tuple(rows)).not_naming([" Rome ", "New York", "U.S."])
    assert [row.output for row in left.rows] == ["Romeo", "New Yorker", "US"]
    assert left.dropped == {"names one of the given": 7}
    others = ("我去东京了", "_Rome_", "New\nYork", "Zu\u0308rich", "Rome2", "Zürichs")
    rows = tuple(Instruction("Say it.", text) for text in others)
    left = InstructionSet(rows).not_naming(["东京", "Rome", "New York", "Z\u00fcrich"])
    assert [row.output for row in left.rows] == ["Rome2", "Zürichs"]
    spelled = InstructionSet(
        (Instruction("Where?", "In Co\u0302te d\u2019Ivoire."), Instruction("Wo?", "In der STRASSE"))
    )
    assert [len(spelled.not_naming([name])) for name in ("C\u00f4te d'Ivoire", "Straße")] == [1, 1]
    number = InstructionSet((Instruction("How many?", "There were 1,234 men."), Instruction("Pi?", "3.14")))
    assert [row.output for row in number.not_naming(["1234"]).rows] == ["3.14"]
    with pytest.warns(UserWarning, match="no instruction names"):
        assert len(number.not_naming(["14"])) == 2
    with pytest.raises(DataError, match="names must hold letters or digits, got '\u2122'"):
        number.not_naming(["1234", "\u2122"])
    marked = InstructionSet((Instruction("Say it.", "हिन्दी"), Instruction("New", "York")))
    with pytest.warns(UserWarning, match="no instruction names any of 2 names"):
        assert len(marked.not_naming(["हिन", "New York"])) == 2  # a mark goes on with a word; two texts
    for names in ([], ["Rome", " "]):
        with pytest.raises(DataError, match="one or more names, none of them empty"):
            left.not_naming(names)


def test_bare_rows_ask_the_same_without_their_input() -> None:
    rows = InstructionSet((Instruction("a", "b", "c"), Instruction("d", "e")), dropped={"no output": 1})
    assert rows.bare().rows == (Instruction("a", "b"), Instruction("d", "e"))
    assert rows.bare().dropped == rows.dropped


def test_a_sample_is_drawn_by_the_seed_without_repeats_in_the_old_order() -> None:
    rows = InstructionSet(tuple(Instruction(f"Say {i}.", str(i)) for i in range(30)))
    drawn = [rows.sample(10, seed).rows for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    numbers = [int(row.output) for row in drawn[0]]
    assert len(numbers) == 10
    assert numbers == sorted(set(numbers))
    assert rows.sample(31).rows == rows.rows
    with pytest.raises(DataError, match="the number of instructions must be at least 1, got 0"):
        rows.sample(0)
