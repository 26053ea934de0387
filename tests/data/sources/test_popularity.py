"""Popularity from a table of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnbalance import Fact, FactSet, load_facts
from attnbalance.data.sources.popularity import with_popularity
from attnbalance.errors import DataError

FACTS = FactSet(
    (Fact("Zürich", "country", ("CH",), 5.0), Fact("Oslo", "country", ("NO",)), Fact("Bern", "country", ("CH",)))
)


def table(folder: Path, *rows: str, head: str = "subject,popularity") -> Path:
    path = folder / "views.csv"
    path.write_text("\n".join([head, *rows]), encoding="utf-8")
    return path


def test_facts_take_the_tables_numbers_and_those_it_does_not_name_are_dropped_and_counted(tmp_path: Path) -> None:
    path = table(tmp_path, "Zu\u0308rich,70", "Oslo ,8.5", "Rome,3", "Oslo,8.5")
    joined = with_popularity(FACTS, path)
    assert [(fact.subject, fact.popularity) for fact in joined] == [("Zürich", 70.0), ("Oslo", 8.5)]
    assert joined.dropped == {f"no popularity in {path}": 1}
    assert with_popularity(joined, path).dropped == joined.dropped


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["Oslo,"], "row 1: no popularity of 'Oslo'"),
        (["Oslo,many"], "row 1: popularity must be a number of at least 0, got 'many'"),
        (["Oslo,1", "Oslo,2"], "row 2: 'Oslo' has the popularity 1 above and 2 here; keep one"),
        (["Rome,1"], "names none of the 3 facts' subjects"),
    ],
)
def test_a_row_that_says_nothing_is_refused(rows: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        with_popularity(FACTS, table(tmp_path, *rows))


def test_other_columns_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="row 1: expected the columns subject and popularity, got subject, views"):
        with_popularity(FACTS, table(tmp_path, "Oslo,3", head="subject,views"))


def test_facts_are_joined_before_some_are_drawn(tmp_path: Path) -> None:
    own = tmp_path / "facts.csv"
    own.write_text("subject,relation,answers\nZürich,country,CH\nOslo,country,NO\nBern,country,CH\n", encoding="utf-8")
    path = table(tmp_path, "Bern,4")
    assert [fact.popularity for fact in load_facts(own, limit=1, seed=0, popularity=path)] == [4.0]
