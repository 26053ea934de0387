"""Panels are drawn as they say, and claims put into words with their numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from attnbalance.papers.figure import Claim, Condition, Panel, PaperFigure, Series
from attnbalance.papers.page import (
    Done,
    answer_of,
    claim_as_dict,
    draw_panels,
    headline,
    lines,
    number,
    panel_as_dict,
    scores,
    standing,
)
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
    assert [panel_as_dict(panel)["log"] for panel in (A, B)] == [True, False]
    content = panel_as_dict(WORDS)
    assert content["series"][0]["x"] == ["a long name of a model", "another"]
    assert content["series"][0]["y"][1] == {"mean": 1.0, "low": None, "high": None, "n": 5}


WIDTH = 4.302653 * np.std([1.0, 1.1, 1.2], ddof=1) / np.sqrt(3)
"""Of the interval of three values 0.1 apart: Student's t with two degrees of freedom."""

RISES = Claim("x rises", "x, logits", (1.0, 1.1, 1.2), place="Figure 1", printed="about 1")
FROZEN = Condition("W_V is frozen", "trained", met=False)
CLAIMS = (
    RISES,
    Claim("y rises", "y", (-1.0, -1.1, -1.2), place="Section 2"),
    Claim("z is no worse", "z", (0.0, 0.01, -0.01), place="Section 3", least=-0.5),
    Claim("w rises", "w", (1.0, -1.0, 0.1), place="Section 4", setting=(FROZEN,)),
    Claim("v is 1", "v", (0.5, 0.5, 0.5), least=0.9, level=True),
)


def paper_figure(name: str, paper: str) -> PaperFigure:
    return PaperFigure(name, paper, "Figure 1", "", lambda *_: [], dict, lambda _: [], lambda _: [])


def test_a_claim_is_told_with_its_place_its_number_and_the_papers() -> None:
    bounds = f"[{1.1 - WIDTH:+.3g}, {1.1 + WIDTH:+.3g}]"
    assert number(RISES) == f"x, logits +1.1 {bounds}; the paper: about 1"
    assert number(CLAIMS[2]).endswith(", counts above -0.5")
    assert [standing(claim) for claim in CLAIMS] == [
        "Figure 1",
        "Section 2",
        "Section 3",
        "Section 4, outside its setting: W_V is frozen: trained",
        "an extension",
    ]
    met = replace(CLAIMS[3], setting=(replace(FROZEN, measured="frozen", met=True),))
    assert standing(met) == "Section 4, in its setting: W_V is frozen: frozen"
    told = lines(CLAIMS)
    assert told[0] == f"  seen         x rises (Figure 1): x, logits +1.1 {bounds}; the paper: about 1"
    assert [line.split("  ")[1] for line in told] == ["seen", "opposite", "seen", "cannot tell", "absent"]


def test_papers_are_scored_apart_and_by_their_own_statements_in_their_own_settings() -> None:
    figures = [paper_figure("a", "One"), paper_figure("b", "Two"), paper_figure("c", "One")]
    done = {"a": Done([], CLAIMS), "b": Done([], CLAIMS[1:2]), "c": Done([], CLAIMS[:1])}
    one, two = scores(figures, done).values()
    assert one == {
        "counts": {"seen": 3, "opposite": 1, "absent": 0, "cannot tell": 0},
        "outside": 1,
        "extensions": 1,
    }
    assert two["counts"] == {"seen": 0, "opposite": 1, "absent": 0, "cannot tell": 0}
    assert headline(figures, done, {"e": "", "d": ""}) == (
        "One: of 4 statements in the paper's setting 3 seen, 1 opposite, 0 absent, 0 cannot tell; Two: of 1 statement "
        "in the paper's setting 0 seen, 1 opposite, 0 absent, 0 cannot tell. Not run: d and e."
    )
    assert (
        headline(figures[:1], {"a": Done([], CLAIMS[3:])}, {}) == "One: no statement was tested in the paper's setting."
    )
    assert answer_of([], {}, {}) == "No figure was run."
    assert claim_as_dict(CLAIMS[3])["setting"] == [{"says": "W_V is frozen", "measured": "trained", "met": False}]
