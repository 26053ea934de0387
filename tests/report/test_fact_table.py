"""Facts by relation."""

from __future__ import annotations

from attnbalance import Fact, FactSet, describe_facts


def test_each_relation_has_a_row_with_hand_counted_numbers() -> None:
    facts = FactSet(
        (
            Fact("Oslo", "country", ("Norway", "NO"), 10.0, "Where is Oslo?"),
            Fact("Bergen", "country", ("Norway",), 20.0),
            Fact("Rome", "country", ("Italy",), 30.0),
            Fact("Sápmi", "country", ("Sweden", "Norway"), 30.0),
            Fact("Ann", "birth", ("Paris|Oslo",), statement="{subject} was born in"),
            Fact("Bob", "birth", ("Rome",), 1234.0),
        )
    )
    rows = [line.split(" | ") for line in describe_facts(facts).splitlines()[2:]]
    assert rows[0] == [
        "| country",
        "4",
        "3",
        "Norway (75.0%)",
        "13 / 25 / 30",
        "Where is Oslo?",
        "The country of Oslo is |",
    ]
    assert rows[1] == [
        "| birth",
        "2",
        "2",
        "Paris\\|Oslo (50.0%)",
        "1,234 / 1,234 / 1,234 (1 facts)",
        "What is the birth of Ann?",
        "Ann was born in |",
    ]
    assert "| none |" in describe_facts(FactSet((Fact("s", "r", ("a",)),)))
