"""The map and the lines show the numbers of the trajectory."""

from __future__ import annotations

import numpy as np
import pytest

from attnbalance.trajectory.figures import draw_map, draw_means
from tests.trajectory.made import a_trajectory

TITLE = "subject attention"


def test_the_map_has_a_row_a_layer_and_a_column_a_checkpoint() -> None:
    trajectory = a_trajectory()
    ax = draw_map(trajectory, TITLE).axes[0]
    np.testing.assert_array_equal(ax.images[0].get_array(), np.array(trajectory.by_layer(TITLE)).T)
    assert [label.get_text() for label in ax.get_xticklabels()] == ["10", "20", "30"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["0", "1"]
    assert ax.images[0].get_clim()[0] == 0


def test_negative_values_are_coloured_around_zero() -> None:
    low, high = draw_map(a_trajectory(((-0.4, 0.1), (0.1, 0.2)), None), TITLE).axes[0].images[0].get_clim()
    assert low == -high == pytest.approx(-0.4, abs=0.01)


def test_the_lines_are_the_means_and_accuracy_in_percent_beside_them() -> None:
    trajectory = a_trajectory()
    attention, accuracy = draw_means(trajectory, TITLE).axes
    assert list(attention.lines[0].get_xdata()) == [10, 20, 30]
    assert list(attention.lines[0].get_ydata()) == [mean.mean for mean in trajectory.means(TITLE)]
    assert list(accuracy.lines[0].get_ydata()) == [75, 62.5, 25]
    assert len(draw_means(a_trajectory(right=None), TITLE).axes) == 1
    attention.set_xlim(1, 3)
    assert all(tick == int(tick) for tick in attention.get_xticks())  # there is no step 1.5


def test_the_band_of_a_line_ends_where_the_interval_does() -> None:
    trajectory = a_trajectory()
    attention = draw_means(trajectory, TITLE).axes[0]
    corners = attention.collections[0].get_paths()[0].vertices
    assert corners[:, 1].max() == pytest.approx(max(mean.high for mean in trajectory.means(TITLE)))
    assert corners[:, 1].min() == pytest.approx(min(mean.low for mean in trajectory.means(TITLE)))
