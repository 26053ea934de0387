"""The figures of an explanation hold its numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from matplotlib.figure import Figure

from attnbalance.explanation.figures import CAUSES, draw_causes, draw_steering
from attnbalance.statistics.intervals import Interval
from tests.explanation.made import a_change, an_explanation

EXPLANATION = an_explanation(a_change(-2.0, -0.5, 0.25))


def axes_of(figure: Figure) -> Any:
    return figure.axes


def test_bars_are_the_means_of_each_group_by_cause():
    [ax] = axes_of(draw_causes(EXPLANATION))
    bars = [container for container in ax.containers if container.get_label() in CAUSES.values()]
    assert [bar.get_label() for bar in bars] == list(CAUSES.values())
    for container, cause in zip(bars, CAUSES, strict=True):
        heights = [patch.get_height() for patch in container]
        assert heights == pytest.approx([change.causes[cause].mean for change in EXPLANATION.groups.values()])


def test_both_panels_hold_their_highest_point():
    checks = [replace(check, accuracy=Interval(0.9, 0.8, 0.95, 10)) for check in EXPLANATION.checks["new"]]
    better = replace(EXPLANATION, checks=dict(EXPLANATION.checks) | {"new": checks})
    figure = draw_steering(better)
    figure.draw_without_rendering()
    for ax in axes_of(figure):
        low, high = ax.get_ylim()
        assert low == 0
        assert high > 95


def test_the_axis_names_fifths_only_where_there_are_some():
    assert draw_causes(EXPLANATION).axes[0].get_xlabel() == "questions; fifth 1 is the most popular"
    groups = {name: change for name, change in EXPLANATION.groups.items() if "fifth" not in name}
    assert draw_causes(replace(EXPLANATION, groups=groups)).axes[0].get_xlabel() == "questions"


def test_points_are_the_accuracies_under_each_factor_in_percent():
    for ax, label in zip(axes_of(draw_steering(EXPLANATION)), ("old", "new"), strict=True):
        boost, control = (list(container.lines[0].get_ydata()) for container in ax.containers)
        plain = 100 * EXPLANATION.accuracy[label].mean
        checks = {check.kind: 100 * check.accuracy.mean for check in EXPLANATION.checks[label]}
        assert boost == pytest.approx([plain, checks["boost"]])
        assert control == pytest.approx([plain, checks["control"]])
        assert [text.get_text() for text in ax.get_xticklabels()] == ["1", "4"]
