"""The numbers along a run, against plain averages."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from tests.trajectory.made import a_trajectory

TITLE = "subject attention"


def test_means_are_plain_averages_and_changes_are_paired_with_the_first_checkpoint() -> None:
    trajectory = a_trajectory()
    tables = [measured.reading(TITLE).values.double().numpy() for measured in trajectory.comparison.measured]
    for i, table in enumerate(tables):
        per_prompt = (table - tables[0]).mean(axis=(1, 2))
        assert trajectory.means(TITLE)[i].mean == pytest.approx(table.mean(), abs=1e-12)
        # differences are taken in float32, as in `difference`
        assert trajectory.changes(TITLE)[i].mean == pytest.approx(per_prompt.mean(), abs=1e-7)
        assert trajectory.by_layer(TITLE)[i] == pytest.approx(table.mean(axis=(0, 2)), abs=1e-12)
    per_prompt = (tables[-1] - tables[0]).mean(axis=(1, 2))
    change, half = trajectory.changes(TITLE)[-1], stats.t.ppf(0.975, 39) * per_prompt.std(ddof=1) / np.sqrt(40)
    # bootstrap-t and Student's interval agree on 40 normal differences within a quarter of the half-width
    assert change.high - change.mean == pytest.approx(half, rel=0.25)
    assert change.mean - change.low == pytest.approx(half, rel=0.25)


def test_the_first_checkpoint_does_not_differ_from_itself() -> None:
    change = a_trajectory().changes(TITLE)[0]
    assert (change.mean, change.excludes_zero) == (0.0, False)


def test_the_ends_are_the_last_and_the_first_checkpoint_as_a_pair() -> None:
    ends = a_trajectory().ends
    assert [measured.label for measured in ends.measured] == ["step 30", "step 10"] == list(ends.pair or ())


def test_accuracy_is_the_share_of_right_answers_and_its_change_is_paired() -> None:
    trajectory = a_trajectory()
    rates, change = trajectory.accuracies(), trajectory.accuracy_change
    assert rates is not None
    assert change is not None
    assert [rate.mean for rate in rates] == [30 / 40, 25 / 40, 10 / 40]
    assert change.interval.mean == pytest.approx(-0.5)
    assert (change.a_only, change.b_only, change.p_value) == (0, 20, pytest.approx(2 * 0.5**20))


def test_without_answers_there_is_no_accuracy() -> None:
    trajectory = a_trajectory(right=None)
    assert trajectory.accuracies() is None
    assert trajectory.accuracy_change is None
