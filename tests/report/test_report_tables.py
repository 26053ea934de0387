"""The JSON and Parquet tables of a comparison, against hand counts and a naive loop."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from attnbalance.report import tables
from attnbalance.report.tables import curves_json, readings_table, recall_json, write_readings
from tests.report.fakes import a_comparison

ATTENTION = {"top": [0.1, 0.2, 0.6], "bottom": [0.1, 0.4]}
MADE = a_comparison(ATTENTION, {"top": [i < 30 for i in range(40)]})
READINGS = [(one.label, one.attention) for one in MADE.measured]
COLUMNS = ["label", "reading", "prompt_id", "layer", "head", "value"]


def test_curves_json_holds_means_and_bounds_of_each_label():
    found = curves_json(MADE)
    assert list(found) == ["name", "reduce", "curves"]
    assert (found["name"], found["reduce"]) == ("subject attention (max)", "max")
    top, bottom = found["curves"]
    assert list(top) == ["label", "layers", "mean", "low", "high", "n"]
    assert (top["label"], top["layers"], bottom["layers"], top["n"]) == ("top", [0, 1, 2], [0, 1], 40)
    values = MADE["top"].attention.values.double()
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


def test_recall_json_without_wrong_answers_or_popularity_has_no_rate_and_no_fifths():
    [all_right] = recall_json(a_comparison(ATTENTION, {"top": [True] * 40}, popular=False))
    assert all_right["shortcut_rate"] is None
    assert all_right["by_popularity"] == []


def _naive_rows(comparison):
    return [
        (one.label, one.attention.name, prompt_id, layer, head, one.attention.values[i, j, head].item())
        for one in comparison.measured
        for i, prompt_id in enumerate(one.attention.prompt_ids)
        for j, layer in enumerate(one.attention.layers)
        for head in range(one.attention.values.shape[2])
    ]


def test_the_readings_table_holds_every_number_at_its_place():
    table = readings_table(READINGS)
    assert [str(kind) for kind in table.schema.types[3:]] == ["int32", "int32", "float"]
    assert [pa.types.is_dictionary(kind) for kind in table.schema.types[:3]] == [True, True, True]
    rows = list(zip(*(table[name].to_pylist() for name in COLUMNS), strict=True))
    assert rows == _naive_rows(MADE)


def test_parquet_written_in_many_batches_reads_back_as_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "BATCH_ROWS", 50)
    path = tmp_path / "readings.parquet"
    write_readings(READINGS, path)
    assert pq.ParquetFile(path).metadata.num_row_groups > 2
    read = pq.read_table(path)
    assert read.column_names == COLUMNS
    rows = list(zip(*(column.to_pylist() for column in read.columns), strict=True))
    assert rows == _naive_rows(MADE)
    assert [p.name for p in tmp_path.iterdir()] == ["readings.parquet"]
