"""Panels are drawn as they say, and claims put into words with their numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from attnbalance.papers.figure import Claim, Panel, Series
from attnbalance.papers.page import answer_of, draw_panels, headline, number, panel_as_dict, sentence
from attnbalance.statistics.intervals import Interval


def series(label: str, x: tuple, mean: float, width: float = 0.1) -> Series:
    return Series(label, x, tuple(Interval(mean + i, mean + i - width, mean + i + width, 5) for i in range(len(x))))


A = Panel("one", "step", "accuracy", (series("a", (0, 1, 10), 0.1), series("b", (0, 1, 10), 5.0)), log=True)
B = Panel("two", "step", "accuracy", (series("b", (1, 10), 0.2), series("c", (1, 10), 0.3)))
WORDS = Panel("three", "model", "loss", (series("a", ("a long name of a model", "another"), 0.0, math.nan),))


def test_lines_and_bands_are_where_the_intervals_are() -> None:
    ax = draw_panels([A]).axes[0]
    assert [line.get_label() for line in ax.lines] == ["a", "b"]
    assert ax.lines[1].get_xydata().tolist() == [[0, 5], [1, 6], [10, 7]]
    band = ax.collections[0].get_paths()[0].vertices
    assert band[:, 1].min() == pytest.approx(0.0)
    assert band[:, 1].max() == pytest.approx(2.2)
    assert (ax.get_xlim()[0], ax.get_xscale()) == (0, "symlog")
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["0", "1", "10"]


def test_a_label_looks_alike_in_all_panels_and_a_row_of_one_y_axis_has_one_scale() -> None:
    drawing = draw_panels([A, B, WORDS])
    first, second, third = drawing.axes
    assert second.lines[0].get_color() == first.lines[1].get_color()
    assert second.lines[1].get_color() not in {line.get_color() for line in first.lines}
    assert first.get_ylim() != second.get_ylim()  # the third panel of the row measures something else
    same = draw_panels([A, B]).axes
    assert same[0].get_ylim() == same[1].get_ylim()
    assert [tick.get_text() for tick in third.get_xticklabels()] == ["a long name of a model", "another"]


def test_one_legend_where_one_panel_holds_all_labels_else_one_a_panel() -> None:
    shared = draw_panels([A, Panel("two", "x", "y", B.series[:1])])
    assert [text.get_text() for text in shared.legends[0].get_texts()] == ["a", "b"]
    assert all(ax.get_legend() is None for ax in shared.axes)
    apart = draw_panels([A, B])
    assert not apart.legends
    assert all(ax.get_legend() is not None for ax in apart.axes)


def test_panels_stand_in_rows_and_none_is_lost() -> None:
    for count, columns in ((1, 1), (3, 3), (4, 2), (5, 3), (8, 4)):
        axes = draw_panels([A] * count).axes
        shown = [ax for ax in axes if ax.get_visible()]
        assert len(shown) == count
        starts = [spec.colspan.start for ax in axes if (spec := ax.get_subplotspec()) is not None]
        assert len(set(starts)) == columns


def test_what_is_drawn_is_told_as_json() -> None:
    content = panel_as_dict(WORDS)
    assert content["series"][0]["x"] == ["a long name of a model", "another"]
    assert content["series"][0]["y"][1] == {"mean": 1.0, "low": None, "high": None, "n": 5}


def test_claims_are_put_into_words_by_verdict() -> None:
    claims = [
        Claim("x rises", "x, logits", (1.0, 1.1, 1.2)),
        Claim("y rises", "y", (-1.0, -1.1, -1.2)),
        Claim("z is no worse", "z", (0.0, 0.01, -0.01), 0.5),
        Claim("w rises", "w", (1.0, -1.0, 0.1)),
    ]
    width = 4.302653 * np.std([1.0, 1.1, 1.2], ddof=1) / np.sqrt(3)  # Student's t with two degrees of freedom
    assert number(claims[0]) == f"x, logits +1.1 [{1.1 - width:+.3g}, {1.1 + width:+.3g}]"
    assert number(claims[2]).endswith("margin 0.5")
    text = sentence(claims)
    assert text.index("seen: x rises") < text.index("z is no worse") < text.index("not seen: w rises")
    assert text.index("not seen") < text.index("reversed: y rises")
    assert headline({}, {"b": "", "a": ""}) == "Of 0 claims 0 are seen, 0 not seen, 0 reversed. Not run: a and b."
    assert answer_of([], {}, {}) == "Of 0 claims 0 are seen, 0 not seen, 0 reversed."
