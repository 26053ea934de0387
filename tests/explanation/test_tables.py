"""explain.json is finite and complete; changes.parquet has a row for each question."""

from __future__ import annotations

import json

import pytest

from attnbalance.explanation.sentences import headline
from attnbalance.explanation.tables import explanation_json, write_changes
from tests.explanation.made import AFTER, BEFORE, N, a_change, an_explanation


def test_json_is_finite_and_holds_every_group_check_and_share():
    explanation = an_explanation(a_change(-2.0, -0.5))
    written = explanation_json(explanation)
    assert json.loads(json.dumps(written, allow_nan=False)) == written
    assert written["answer"] == headline(explanation)
    assert written["left_out"] is None
    assert written["scoring"] == "whole-words"
    assert written["groups"]["all"]["shares"]["qk"]["mean"] == pytest.approx(0.8, abs=0.01)
    assert set(written["groups"]["all"]["causes"]) == {"qk", "ov", "mlp", "ov+mlp", "rest", "rows"}
    assert [edge["layer"] for edge in written["edges"]] == [0, 1]
    assert [len(checks) for checks in written["checks"].values()] == [4, 4]
    assert written["checks"]["new"][1]["accuracy"] == (6 + 12) / 40
    assert written["checks"]["new"][1]["over_control"]["p_value"] == pytest.approx(2 / 2**6)
    assert written["checks"]["new"][0]["over_control"] is None
    assert (written["hidden"]["new"]["chance"], written["hidden"]["new"]["top"]) == (0.5, 3)


def test_json_of_a_change_that_is_not_sure_has_null_for_the_ends_of_shares():
    share = explanation_json(an_explanation(a_change(0.0, 0.0)))["groups"]["all"]["shares"]["qk"]
    assert (share["low"], share["high"]) == (None, None)


def test_ten_examples_say_what_brings_each_fact_back():
    examples = explanation_json(an_explanation(a_change(-1, 0)))["examples"]
    assert len(examples) == 10
    assert all(example["wrong_in"] == "new" for example in examples)
    assert all("W_Q and W_K" in example["comes_back"] for example in examples)
    assert all("attention to other tokens x4" not in example["comes_back"] for example in examples)
    assert all([right for _, right in example["said"].values()] == [True, False] for example in examples)


def test_the_table_has_a_row_for_each_question(tmp_path):
    import pyarrow.parquet as pq

    explanation = an_explanation(a_change(-2.0, -0.5))
    write_changes(explanation, tmp_path / "changes.parquet")
    table = pq.read_table(tmp_path / "changes.parquet")
    assert len(table) == N
    assert (table["right_before"].to_pylist(), table["right_after"].to_pylist()) == (BEFORE, AFTER)
    assert table["margin_after"].to_pylist() == [fact.margin[1] for fact in explanation.facts]
    assert table["ov"].to_pylist() == [-0.25] * N
    types = {name: str(table.schema.field(name).type) for name in ("margin_before", "qk", "readout_rank_after")}
    assert types == {"margin_before": "float", "qk": "float", "readout_rank_after": "int64"}
