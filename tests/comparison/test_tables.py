"""A comparison's curves and recall as JSON, against hand counts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from attnbalance.comparison.tables import curves_json, differences_json, recall_json
from attnbalance.data.scoring import CONTAINMENT, WHOLE_WORDS
from attnbalance.errors import DataError
from tests.fakes import a_comparison

ATTENTION = {"top": [0.1, 0.2, 0.6], "bottom": [0.1, 0.4]}
MADE = a_comparison(ATTENTION, {"top": [i < 30 for i in range(40)]})


def test_curves_json_holds_means_and_bounds_of_each_label():
    found = curves_json(MADE)
    assert list(found) == ["name", "reduce", "curves"]
    assert (found["name"], found["reduce"]) == ("subject attention (max)", "max")
    top, bottom = found["curves"]
    assert list(top) == ["label", "layers", "mean", "low", "high", "n"]
    assert (top["label"], top["layers"], bottom["layers"], top["n"]) == ("top", [0, 1, 2], [0, 1], 40)
    values = MADE["top"].reading().values.double()
    for layer in range(3):
        assert top["mean"][layer] == pytest.approx(float(sum(values[:, layer].flatten())) / 80)
        assert top["low"][layer] < top["mean"][layer] < top["high"][layer]


def test_a_missing_bound_is_null():
    found = curves_json(a_comparison({"only": [0.5]}, pair=None, subject="Ann"))
    assert found["curves"][0]["low"] == [None]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_recall_json_holds_hand_counted_accuracies():
    [top] = recall_json(MADE)
    assert (top["label"], top["accuracy"], top["n"], top["wrong"]) == ("top", 0.75, 40, 10)
    assert top["shortcut_rate"] == 0.5  # wrong are 30, ..., 39; the even ones are the shortcut
    assert top["shortcut_n"] == 10
    assert [part["accuracy"] for part in top["by_popularity"]] == [1, 1, 1, 0.75, 0]
    assert [
        (part["quintile"], part["popularity_high"], part["popularity_low"], part["n"]) for part in top["by_popularity"]
    ] == [
        (0, 1000, 993, 8),
        (1, 992, 985, 8),
        (2, 984, 977, 8),
        (3, 976, 969, 8),
        (4, 968, 961, 8),
    ]
    assert [(part["percent"], part["n"]) for part in top["top_percentiles"]][::9] == [(10, 4), (100, 40)]
    assert top["top_percentiles"][-1]["accuracy"] == 0.75
    assert json.loads(json.dumps([top], allow_nan=False)) == [top]


def test_recall_json_holds_both_scorings_and_the_ties_across_fifths():
    recall = MADE["top"].recall
    assert recall is not None
    lenient = {**recall.right, CONTAINMENT: (True,) * 36 + (False,) * 4}
    tied = tuple(popularity if i not in (7, 8) else 993.0 for i, popularity in enumerate(recall.popularity))
    changed = replace(recall, right=lenient, popularity=tied)
    [top] = recall_json(replace(MADE, measured=(replace(MADE["top"], recall=changed), MADE["bottom"])))
    assert top["accuracy"] == top["by_scoring"][WHOLE_WORDS]["accuracy"] == 0.75
    assert top["by_scoring"][CONTAINMENT]["accuracy"] == 0.9
    assert top["f1"]["mean"] == pytest.approx((1 + 3 * 0.75) / 4)  # the fakes' F1 is 1 or a quarter
    assert [part["tied"] for part in top["by_popularity"]] == [1, 1, 0, 0, 0]
    assert [part["tied"] for part in top["top_percentiles"]] == [0, 1, 0, 0, 0, 0, 0, 0, 0, 0]


def test_the_seed_of_a_comparison_draws_the_interval_of_f1():
    recall = MADE["top"].recall
    assert recall is not None
    spread = replace(recall, f1=tuple((i / 39) ** 8 for i in range(40)))
    measured = (replace(MADE["top"], recall=spread), MADE["bottom"])
    first, second = (recall_json(replace(MADE, measured=measured, seed=seed))[0]["f1"] for seed in (0, 1))
    assert first["mean"] == second["mean"] == pytest.approx(sum((i / 39) ** 8 for i in range(40)) / 40)
    assert first["high"] != second["high"]  # the other end is Student's, which needs no seed


def test_recall_json_without_wrong_answers_or_popularity_has_no_rate_and_no_fifths():
    [all_right] = recall_json(a_comparison(ATTENTION, {"top": [True] * 40}, popular=False))
    assert all_right["shortcut_rate"] is None
    assert all_right["shortcut_n"] == 0
    assert all_right["by_popularity"] == []


def test_further_readings_follow_the_first_in_curves_json():
    def two(one):
        return replace(one, readings=(one.reading(), replace(one.reading(), name="value salience (last)")))

    found = curves_json(replace(MADE, measured=tuple(map(two, MADE.measured))))
    assert {name: found[name] for name in ("name", "reduce", "curves")} == curves_json(MADE)
    [further] = found["further"]
    assert (further["name"], further["curves"]) == ("value salience (last)", found["curves"])


def test_differences_are_the_first_label_minus_the_second_by_layer_and_by_fifth():
    """Against means by hand; the most popular fifth is the first 8 of 40 questions."""
    correct = {"top": [i % 2 == 0 for i in range(40)], "bottom": [i < 2 for i in range(40)]}
    made = a_comparison({"top": [0.1, 0.5], "bottom": [0.2, 0.2]}, correct)
    found = differences_json(made)
    assert found["pair"] == ["top", "bottom"]
    [reading] = found["readings"]
    gap = made["top"].reading().values.double() - made["bottom"].reading().values.double()
    assert (reading["name"], reading["layers"]) == ("subject attention (max)", [0, 1])
    assert reading["mean"] == pytest.approx(gap.mean((0, 2)).tolist())
    assert all(
        low < mean < high for low, mean, high in zip(reading["low"], reading["mean"], reading["high"], strict=True)
    )
    names = [entry["group"] for entry in found["accuracy"]]
    assert names == ["all", "fifth 1", "fifth 2", "fifth 3", "fifth 4", "fifth 5"]
    assert [entry["mean"] for entry in found["accuracy"][:3]] == pytest.approx([18 / 40, 2 / 8, 4 / 8])
    assert found["accuracy"][0]["p_value"] == pytest.approx(2 * (1 + 20) / 2**20)  # top alone 19, bottom alone 1
    back = differences_json(replace(made, pair=("bottom", "top")))
    assert back["readings"][0]["mean"] == pytest.approx((-gap).mean((0, 2)).tolist())
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_differences_need_a_pair_and_are_of_models_of_one_shape():
    with pytest.raises(DataError, match="differences need a pair"):
        differences_json(replace(MADE, pair=None))
    found = differences_json(MADE)  # of three layers and of two
    assert found["readings"] == []
    assert differences_json(a_comparison({"top": [0.1], "bottom": [0.2]}))["accuracy"] == []
