"""Curves and head maps against loops and hand numbers."""

from __future__ import annotations

import math

import pytest
import torch

from attnbalance.readings.curves import head_map, layer_curve
from attnbalance.readings.reading import Reading, difference
from attnbalance.statistics.intervals import mean_intervals


def _reading(values, subjects=None):
    values = torch.as_tensor(values, dtype=torch.float32)
    ids = tuple(f"p{i}" for i in range(len(values)))
    return Reading(
        "attention", "probability", values, tuple(range(5, 5 + values.shape[1])), ids, tuple(subjects or ids)
    )


def test_a_curve_is_the_mean_over_heads_then_prompts():
    curve = layer_curve(_reading([[[0.1, 0.3], [0.5, 0.7]], [[0.2, 0.4], [0.6, 0.8]]]))
    assert curve.mean == pytest.approx((0.25, 0.65))
    assert (curve.layers, curve.n, curve.name, curve.unit) == ((5, 6), 2, "attention", "probability")


def test_intervals_of_a_curve_are_those_of_each_layer_by_itself():
    values = torch.rand(30, 3, 4, generator=torch.Generator().manual_seed(0))
    subjects = [f"s{i // 3}" for i in range(30)]
    curve = layer_curve(_reading(values, subjects), seed=4)
    for layer in range(3):
        column = [[sum(values[i, layer].tolist()) / 4] for i in range(30)]
        [alone] = mean_intervals(column, subjects, seed=4)
        assert (curve.mean[layer], curve.low[layer], curve.high[layer]) == pytest.approx(
            (alone.mean, alone.low, alone.high)
        )


def test_simultaneous_intervals_of_a_curve_are_those_of_all_its_layers():
    values = torch.rand(30, 3, 4, generator=torch.Generator().manual_seed(0))
    curve = layer_curve(_reading(values), simultaneous=True, seed=4)
    table = values.double().mean(-1).numpy()
    together = mean_intervals(table, [f"p{i}" for i in range(30)], simultaneous=True, seed=4)
    assert list(zip(curve.low, curve.high, strict=True)) == [(one.low, one.high) for one in together]
    assert all(wide < own for wide, own in zip(curve.low, layer_curve(_reading(values), seed=4).low, strict=True))


def test_the_order_of_prompts_changes_nothing():
    reading = _reading(torch.rand(20, 2, 2, generator=torch.Generator().manual_seed(1)))
    before, after = layer_curve(reading), layer_curve(reading.at(reading.prompt_ids[::-1]))
    for part in ("mean", "low", "high"):
        assert getattr(after, part) == pytest.approx(getattr(before, part))


def test_a_difference_with_itself_is_a_flat_curve_without_width():
    reading = _reading(torch.rand(20, 2, 2))
    curve = layer_curve(difference(reading, reading))
    assert curve.mean == curve.low == curve.high == (0, 0)


def test_a_bound_that_is_not_known_is_null():
    curve = layer_curve(_reading([[[0.5]], [[0.25]]], ["one", "one"]))
    assert math.isnan(curve.low[0])
    assert curve.as_dict() == {"layers": [5], "mean": [0.375], "low": [None], "high": [None], "n": 2}


def test_a_head_map_is_the_mean_over_prompts_in_each_head():
    values = torch.rand(6, 2, 3)
    found = head_map(_reading(values))
    for layer in range(2):
        for head in range(3):
            assert found[layer, head].item() == pytest.approx(sum(values[i, layer, head].item() for i in range(6)) / 6)
