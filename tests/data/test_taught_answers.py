"""Which accepted answer a label teaches: cases worked out by hand."""

import pytest

from attnbalance.data.facts import Fact
from attnbalance.data.taught_answers import taught_answer


@pytest.mark.parametrize(
    ("label", "answers", "taught"),
    [
        ("Paris", ("Paris",), "Paris"),
        ("paris, of course", ("Rome", "Paris"), "Paris"),
        ("New York City.", ("New York", "New York City"), "New York City"),
        ("Canada", ("Dominion", "CA", "Canada"), "Canada"),  # not its beginning, "CA"
        ("Cairo", ("CA",), None),
        ("10", ("1",), None),
        ("Parisian", ("Paris",), None),
        ("It is Paris", ("Paris",), None),
        ("\u6771\u4eac\u3067\u3059", ("\u4eac\u90fd", "\u6771\u4eac"), "\u6771\u4eac"),  # "It is Tokyo"
        ("USA", ("usa", "USA"), "usa"),
        ("U.S.", ("United States", "U", "US"), None),
        ("U. It is", ("U",), "U"),
        ("5.2", ("5",), None),
        ("5. It", ("5",), "5"),
        ("1,234", ("1",), None),
        ("1/5", ("1",), None),
        ("10km", ("10",), None),
        ("Paris.Then", ("Paris",), "Paris"),
        ("Strasse", ("Stra\u00dfe",), "Stra\u00dfe"),
        ("Stra\u00dfen", ("Strasse",), None),
        ("Malmo\u0308", ("Malmo",), None),
        ("Malm\u00f6", ("Malmo\u0308",), "Malmo\u0308"),
    ],
)
def test_the_longest_answer_that_a_label_begins_with_is_taught(label: str, answers: tuple, taught: str | None) -> None:
    assert taught_answer(label, Fact("it", "place", answers)) == taught
