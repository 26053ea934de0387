"""The figures of a comparison hold its numbers, in every size."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from attnbalance.comparison.figures import draw_accuracy, draw_difference
from attnbalance.errors import DataError
from attnbalance.report.figures import draw_curves, draw_head_map
from tests.fakes import a_comparison

ATTENTION = {"top": [0.1, 0.2, 0.6], "bottom": [0.1, 0.2, 0.3]}
CORRECT = {"top": [i < 30 for i in range(40)], "bottom": [i < 10 for i in range(40)]}
MADE = a_comparison(ATTENTION, CORRECT)


def _axes(figure: Figure) -> Any:
    return figure.axes


def _lines(ax):
    return {line.get_label(): line for line in ax.lines}


def _legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_curves_are_drawn_at_their_means_inside_their_bands():
    figure = draw_curves(MADE.curves())
    [ax] = _axes(figure)
    for (label, curve), band in zip(MADE.curves().items(), ax.collections, strict=True):
        assert tuple(_lines(ax)[label].get_ydata()) == curve.mean
        drawn = band.get_paths()[0].vertices[:, 1]
        assert (drawn.min(), drawn.max()) == pytest.approx((min(curve.low), max(curve.high)))
    assert _legend(figure) == ["top", "bottom"]
    assert ax.get_xlabel() == "layer"
    assert "probability" in ax.get_ylabel()


def test_filled_points_of_the_difference_are_the_layers_whose_interval_excludes_zero():
    [ax] = _axes(draw_difference(MADE))
    curve = MADE.difference("top", "bottom")
    sure = [layer for layer, low, high in zip(curve.layers, curve.low, curve.high, strict=True) if low > 0 or high < 0]
    assert list(_lines(ax)["differs: interval excludes zero"].get_xdata()) == sure == [2]
    assert list(_lines(ax)["interval holds zero"].get_xdata()) == [0, 1]


def test_a_difference_needs_a_pair_of_the_same_depth():
    with pytest.raises(DataError, match="pair"):
        draw_difference(replace(MADE, pair=None))
    with pytest.raises(DataError, match="same layers"):
        draw_difference(a_comparison({"top": [0.1], "bottom": [0.1, 0.2]}))


def test_accuracy_is_drawn_in_percent_by_fifth_and_by_top_percentile():
    fifths, tops = _axes(draw_accuracy(MADE))
    assert list(fifths.containers[0].lines[0].get_ydata()) == [100, 100, 100, 75, 0]
    assert list(fifths.containers[1].lines[0].get_ydata()) == [100, 25, 0, 0, 0]
    assert tops.containers[0].lines[0].get_ydata()[-1] == 75
    assert list(tops.containers[1].lines[0].get_ydata())[:3] == pytest.approx([100, 100, 100 * 10 / 12])
    places = fifths.containers[0].lines[0].get_xdata()
    assert np.all(np.abs(places - np.arange(5)) < 0.5)


def test_accuracy_without_popularity_is_one_point_a_label():
    [ax] = _axes(draw_accuracy(a_comparison(ATTENTION, CORRECT, popular=False)))
    assert [list(one.lines[0].get_ydata()) for one in ax.containers] == [[75], [25]]


def test_accuracy_needs_recall():
    with pytest.raises(DataError, match="recall was not measured"):
        draw_accuracy(a_comparison(ATTENTION))


@pytest.mark.parametrize(("n_layers", "n_labels"), [(1, 1), (80, 8)])
def test_every_size_can_be_drawn(n_layers, n_labels, tmp_path):
    attention = {f"$model_{i}$ of a long name {i}" * (1 + i % 2): [0.01 * i + 0.1] * n_layers for i in range(n_labels)}
    made = a_comparison(attention, dict.fromkeys(attention, CORRECT["top"]), pair=None)
    for figure in (
        draw_curves(made.curves()),
        draw_accuracy(made),
        draw_head_map(made.measured[0].reading(), title="$"),
    ):
        figure.savefig(tmp_path / "drawn.svg")
    assert len(set(_legend(draw_curves(made.curves())))) == n_labels


def test_a_label_that_begins_with_an_underscore_is_in_the_legend():
    assert _legend(draw_curves(a_comparison({"_a": [0.1], "b": [0.2]}, pair=None).curves())) == ["_a", "b"]


def test_drawing_does_not_touch_pyplot():
    before = "matplotlib.pyplot" in sys.modules
    draw_curves(MADE.curves())
    assert ("matplotlib.pyplot" in sys.modules) == before
