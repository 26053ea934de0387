"""The kit of figures: head maps, layers, whiskers and legends hold the numbers that they are given."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from attnbalance.errors import DataError
from attnbalance.report.figures import draw_curves, draw_head_map, label_style, short_label, whiskers
from attnbalance.statistics.intervals import Interval
from tests.fakes import a_comparison

MADE = a_comparison({"top": [0.1, 0.2, 0.6], "bottom": [0.1, 0.2, 0.3]})


def _axes(figure: Figure) -> Any:
    return figure.axes


def test_the_head_map_of_a_pair_is_the_difference_centred_at_zero():
    a, b = (measured.reading() for measured in MADE.measured)
    image = _axes(draw_head_map(a, b, title="difference"))[0].images[0]
    expected = (a.values - b.values).mean(dim=0).numpy()
    assert np.asarray(image.get_array()) == pytest.approx(expected)
    low, high = image.get_clim()
    assert low == -high
    assert high == pytest.approx(np.abs(expected).max())


def test_the_head_map_of_a_reading_with_itself_is_white():
    a = MADE["top"].reading()
    image = _axes(draw_head_map(a, a, title="nothing"))[0].images[0]
    assert image.to_rgba(image.get_array())[..., :3] == pytest.approx(1.0, abs=0.01)


def test_each_name_of_a_curve_has_a_panel_and_all_panels_have_one_legend():
    curves = MADE.curves()
    named = {label: [replace(curve, name=name) for name in ("first", "second")] for label, curve in curves.items()}
    figure = draw_curves({**named, "top": [*named["top"], replace(curves["top"], name="third")]})
    shown = [ax for ax in _axes(figure) if ax.get_visible()]
    assert [ax.get_title() for ax in shown] == ["first", "second", "third"]
    for ax in shown[:2]:
        assert [tuple(line.get_ydata()) for line in ax.lines[:2]] == [curve.mean for curve in curves.values()]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["top", "bottom"]


def test_a_label_keeps_its_colour_in_panels_that_lack_other_labels():
    curves = MADE.curves()
    figure = draw_curves({"top": curves["top"], "bottom": [curves["bottom"], replace(curves["bottom"], name="second")]})
    first, second = (ax.lines[-1] for ax in _axes(figure))
    assert first.get_color() == second.get_color() != _axes(figure)[0].lines[0].get_color()


def test_the_y_axis_begins_at_zero_unless_something_drawn_is_negative():
    curve = MADE.curves()["top"]
    for unknown in (curve, replace(curve, low=(math.nan,) * len(curve.low))):
        [ax] = _axes(draw_curves({"top": unknown}))
        assert ax.get_ylim()[0] == 0
    for negative in ("mean", "low"):  # a band below zero must not be cut off
        [ax] = _axes(draw_curves({"top": replace(curve, **{negative: tuple(-x for x in getattr(curve, negative))})}))
        assert ax.get_ylim()[0] < min(getattr(curve, negative)) * -1 + 1e-9
        assert list(ax.lines[-1].get_ydata()) == [0, 0]


def test_two_curves_of_one_name_and_label_are_refused():
    curve = MADE.curves()["top"]
    with pytest.raises(DataError, match="top has two curves named"):
        draw_curves({"top": [curve, curve]})


def test_a_head_map_with_negative_means_is_coloured_around_zero():
    reading = MADE["top"].reading()
    image = _axes(draw_head_map(replace(reading, values=reading.values - 0.2), title="signed"))[0].images[0]
    low, high = image.get_clim()
    assert low == -high < 0


def test_drawing_needs_a_curve():
    with pytest.raises(DataError, match="at least one curve"):
        draw_curves({})


def test_whiskers_reach_the_ends_of_intervals_and_are_zero_without_one():
    mean, bars = whiskers([Interval(0.5, 0.4, 0.75, 9), Interval(0.5, math.nan, math.nan, 1)], 100)
    assert mean == pytest.approx([50, 50])
    assert bars == pytest.approx(np.array([[10, 0], [25, 0]]))


def test_long_labels_lose_their_middle_and_64_labels_have_styles_of_their_own():
    long = "a" * 20 + "b" * 20
    assert len(short_label(long)) == 32
    assert short_label(long) == "a" * 14 + "…" + "b" * 17
    assert short_label("b" * 32) == "b" * 32
    assert len({label_style(index) for index in range(64)}) == 64
