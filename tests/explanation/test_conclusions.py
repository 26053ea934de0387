"""What an explanation is asked for by name."""

from __future__ import annotations

from tests.explanation.made import a_change, an_explanation


def test_a_check_is_found_by_kind_and_strength_and_each_label_has_another():
    explanation = an_explanation(a_change(-1, 0))
    assert explanation.labels == ("old", "new")
    assert (explanation.other("old"), explanation.other("new")) == ("new", "old")
    boost, rows = explanation.check("new", "boost"), explanation.check("new", "rows", None)
    assert boost is not None
    assert rows is not None
    assert (boost.name, rows.name) == ("attention to the subject x4", "rows of all layers")
    assert explanation.check("new", "boost", 8.0) is None
    assert explanation.check("new", "rows") is None


def test_a_group_knows_its_size():
    groups = an_explanation(a_change(-1, 0)).groups
    assert (groups["all"].n, groups["lost"].n, groups["gained"].n, groups["fifth 1"].n) == (40, 12, 4, 8)
