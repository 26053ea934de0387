"""The figure of extraction ratios holds its intervals: worlds as panels, methods as lines, splits as colours."""

from __future__ import annotations

from typing import Any

import pytest

from attnbalance.statistics.intervals import Interval
from attnbalance.studies.figures import draw_extraction


def test_ratios_are_drawn_by_world_method_and_split() -> None:
    plain = {"top": Interval(0.5, 0.25, 0.75, 9), "bottom": Interval(0.25, 0.125, 0.5, 9)}
    methods = {"plain": plain, "other": {"bottom": Interval(1.0, 0.75, 1.25, 9)}}
    panels = {"one": methods, "two": methods}
    figure = draw_extraction(panels)
    left, two = axes = list[Any](figure.axes)
    assert [ax.get_title() for ax in axes] == ["one", "two"]
    assert [label.get_text() for label in left.get_yticklabels()] == ["plain", "other"]
    top, bottom = left.containers
    assert list(top.lines[0].get_xdata()) == [0.5]
    assert list(bottom.lines[0].get_xdata()) == [0.25, 1.0]
    whisker = bottom.lines[2][0].get_segments()[0][:, 0]
    assert list(whisker) == pytest.approx([0.125, 0.5])
    assert list(bottom.lines[0].get_ydata()) == pytest.approx([0.12, 1.12])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["top", "bottom"]
    assert len(two.containers) == 2
