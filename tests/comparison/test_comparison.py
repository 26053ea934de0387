"""Comparisons: paired differences that hold for all layers together, and accuracy on fifths by popularity."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attnbalance.errors import DataError
from attnbalance.readings.curves import layer_curve
from attnbalance.readings.reading import difference
from tests.fakes import a_comparison

MADE = a_comparison(
    {"top": [0.1, 0.2, 0.6], "bottom": [0.1, 0.2, 0.3]},
    {"top": [i < 30 for i in range(40)], "bottom": [i % 2 == 0 for i in range(40)]},
)


def test_a_label_that_was_not_measured_is_named_with_those_that_were():
    assert MADE["top"].label == "top"
    with pytest.raises(DataError, match="'middle'; labels are top, bottom"):
        MADE["middle"]


def test_curves_are_those_of_each_reading():
    assert MADE.curves() == {one.label: layer_curve(one.reading()) for one in MADE.measured}


def test_changing_the_curves_one_was_given_changes_no_others():
    MADE.curves().clear()
    assert list(MADE.curves()) == ["top", "bottom"]


def test_the_difference_is_paired_and_its_intervals_hold_for_all_layers_together():
    paired = difference(MADE["top"].reading(), MADE["bottom"].reading())
    found, single = MADE.difference("top", "bottom"), layer_curve(paired)
    assert found.mean == single.mean
    assert found == layer_curve(paired, simultaneous=True)
    assert all(f.low < s.low < s.high < f.high for f, s in zip(_ends(found), _ends(single), strict=True))


def _ends(curve):
    from attnbalance.statistics.intervals import Interval

    return [Interval(*ends, 0) for ends in zip(curve.mean, curve.low, curve.high, strict=True)]


def test_only_the_layer_that_was_moved_excludes_zero():
    assert [ends.excludes_zero for ends in _ends(MADE.difference("top", "bottom"))] == [False, False, True]


def test_a_difference_with_itself_is_zero():
    found = MADE.difference("top", "top")
    assert found.mean == found.low == found.high == (0, 0, 0)
    paired = MADE.accuracy_difference("top", "top")
    assert paired is not None
    assert paired.interval.mean == 0


def test_models_of_different_depth_have_no_difference():
    with pytest.raises(DataError, match="same layers"):
        a_comparison({"top": [0.1], "bottom": [0.1, 0.2]}).difference("top", "bottom")


def test_accuracy_is_compared_over_all_prompts_or_on_one_fifth():
    whole, first, last = (MADE.accuracy_difference("top", "bottom", fifth) for fifth in (None, 0, 4))
    assert whole is not None
    assert first is not None
    assert last is not None
    assert (whole.a_only, whole.b_only, whole.interval.n) == (15, 5, 40)
    assert (first.a_only, first.b_only, first.interval.n) == (4, 0, 8)
    assert (last.a_only, last.b_only, last.interval.n) == (0, 4, 8)


def test_without_recall_or_popularity_there_is_nothing_to_compare():
    assert a_comparison({"top": [0.1], "bottom": [0.1]}).accuracy_difference("top", "bottom") is None
    unknown = a_comparison({"top": [0.1], "bottom": [0.1]}, {"top": [True] * 40, "bottom": [False] * 40}, popular=False)
    assert unknown.accuracy_difference("top", "bottom", 0) is None
    assert unknown.accuracy_difference("top", "bottom") is not None


def _with_salience(**changes):
    """The comparison above with a second reading, twice the first, named "value salience (last)"."""
    measured = []
    for one in MADE.measured:
        first = one.reading()
        second = replace(first, name="value salience (last)", unit="logits", values=2 * first.values)
        measured.append(replace(one, readings=(first, second)))
    return replace(MADE, measured=tuple(measured), **changes)


def test_readings_are_found_by_their_title_and_the_first_is_the_default():
    made = _with_salience()
    assert made.titles == ("subject attention", "value salience")
    assert made["top"].reading() is made["top"].reading("subject attention")
    assert made["top"].reading("value salience").unit == "logits"
    with pytest.raises(DataError, match="top has no reading 'relevance'; it has subject attention, value salience"):
        made["top"].reading("relevance")


def test_each_reading_has_its_own_curves_and_differences():
    made = _with_salience()
    assert made.curves() == MADE.curves()
    for label, curve in made.curves("value salience").items():
        assert curve.mean == pytest.approx([2 * x for x in MADE.curves()[label].mean])
    assert made.difference("top", "bottom") == MADE.difference("top", "bottom")
    doubled = made.difference("top", "bottom", "value salience")
    assert doubled.mean == pytest.approx([2 * x for x in MADE.difference("top", "bottom").mean])


def test_all_models_need_the_same_readings():
    one, two = _with_salience().measured
    with pytest.raises(DataError, match="all models need the same readings: top has subject attention, value salience"):
        replace(MADE, measured=(one, replace(two, readings=two.readings[:1])))
