"""Facts by relation."""

from __future__ import annotations

import pytest

from attnbalance import Fact, FactSet, describe_facts
from attnbalance.report.fact_table import relation_rows


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


def test_a_row_holds_the_numbers_of_its_relation_and_none_where_no_fact_has_a_popularity() -> None:
    known = (Fact("Oslo", "country", ("Norway",), 10.0), Fact("Rome", "country", ("Italy",)))
    country, birth = relation_rows(FactSet((*known, Fact("Ann", "birth", ("Paris",)))))
    assert (country.facts, country.answers, country.most_frequent, country.accepted) == (2, 2, "Norway", 0.5)
    assert (country.popularity, country.with_popularity) == (pytest.approx((10.0, 10.0, 10.0)), 1)
    assert (country.question, country.statement) == ("What is the country of Oslo?", "The country of Oslo is")
    assert (birth.facts, birth.popularity, birth.with_popularity) == (1, None, 0)
