"""trajectory.json holds the numbers of the trajectory."""

from __future__ import annotations

import json
import math

import pytest

from attnbalance.trajectory.tables import trajectory_json
from tests.trajectory.made import a_trajectory


def test_each_checkpoint_has_its_step_path_numbers_and_accuracy() -> None:
    trajectory = a_trajectory()
    table = json.loads(json.dumps(trajectory_json(trajectory), allow_nan=False))
    assert [entry["step"] for entry in table["checkpoints"]] == [10, 20, 30]
    assert [entry["accuracy"]["mean"] for entry in table["checkpoints"]] == [0.75, 0.625, 0.25]
    assert table["checkpoints"][0]["adapter"] == "run/<b>checkpoint"
    (reading,) = table["readings"]
    values = [measured.reading().values.double() for measured in trajectory.comparison.measured]
    assert reading["by_layer"] == [pytest.approx(each.mean(dim=(0, 2)).tolist()) for each in values]
    assert [mean["mean"] for mean in reading["mean"]] == pytest.approx([float(each.mean()) for each in values])
    assert reading["change"][-1]["mean"] == pytest.approx(float((values[-1] - values[0]).mean()), abs=1e-7)
    assert table["accuracy_change"]["p_value"] == pytest.approx(2 * 0.5**20)


def test_a_bound_that_is_not_known_is_null_and_so_is_accuracy_without_answers() -> None:
    trajectory = a_trajectory(right=None, subject="Ann")
    assert math.isnan(trajectory.means("subject attention")[0].low)
    table = json.loads(json.dumps(trajectory_json(trajectory), allow_nan=False))
    assert table["readings"][0]["mean"][0]["low"] is None
    assert table["accuracy_change"] is None
    assert "accuracy" not in table["checkpoints"][0]
