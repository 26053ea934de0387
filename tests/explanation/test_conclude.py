"""Conclusions from numbers chosen by the test: groups, causes, edges, checks, hidden answers, examples."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from attnbalance.errors import DataError
from attnbalance.explanation.conclude import conclude
from attnbalance.readings.salience import ReadoutRanks
from attnbalance.statistics.intervals import mean_intervals
from tests.explanation.made import AFTER, ATTENTION, BEFORE, RANKS, N, a_change, an_explanation
from tests.fakes import a_comparison

WRONG = [i for i, right in enumerate(AFTER) if not right]


def test_groups_are_those_lost_and_gained_and_causes_add_up():
    explanation = an_explanation(a_change(-1.0, -0.5, 0.25))
    assert explanation.groups["lost"].indices == tuple(range(12))
    assert explanation.groups["gained"].indices == tuple(range(20, 24))
    for change in explanation.groups.values():
        total = sum(change.causes[name].mean for name in ("qk", "ov+mlp", "rest"))
        assert total == pytest.approx(change.total.mean, abs=1e-6)
        assert change.causes["ov+mlp"].mean == pytest.approx(change.causes["ov"].mean + change.causes["mlp"].mean)
        assert change.causes["rows"].mean == pytest.approx(-0.5)


def test_shares_of_a_change_that_is_not_sure_have_no_interval():
    assert math.isnan(an_explanation(a_change(0.0, 0.0)).groups["all"].shares["qk"].low)


def test_what_rows_carry_is_left_out_where_rows_cannot_be_edited():
    change = replace(a_change(-1.0, 0.0), rows=None)
    assert all("rows" not in group.causes for group in an_explanation(change).groups.values())


def test_edges_are_summed_over_heads_with_intervals_for_both_columns_of_all_layers():
    change = a_change(-1.0, 0.0)
    explanation = an_explanation(change)
    assert [edge.layer for edge in explanation.edges] == list(change.by_attention.layers)
    columns = torch.cat([change.by_attention.values.double().sum(-1), change.by_readout.values.double().sum(-1)], dim=1)
    subjects = [prompt.fact.subject for prompt in explanation.comparison.prompts]
    expected = mean_intervals(columns.numpy(), subjects, simultaneous=True, seed=explanation.comparison.seed)
    assert [edge.by_attention for edge in explanation.edges] == expected[:2]
    assert [edge.by_readout for edge in explanation.edges] == expected[2:]


def test_components_are_means_over_prompts():
    change = a_change(-1.0, 0.0)
    values = torch.arange(4.0 * N).reshape(N, 2, 2)
    change = replace(change, components={**change.components, "qk": {"subject": values}})
    components = an_explanation(change).components
    assert components["qk"] == {"subject": values.mean(0).tolist()}
    assert components["ov"]["rest"] == [[0.0]]


def test_accuracies_and_what_checks_bring_back_are_counted():
    explanation = an_explanation(a_change(-1, 0))
    assert {label: interval.mean for label, interval in explanation.accuracy.items()} == {"old": 0.5, "new": 0.3}
    assert (explanation.accuracy_change.a_only, explanation.accuracy_change.b_only) == (4, 12)
    control, boost, rows, weights = explanation.checks["new"]
    assert boost.accuracy.mean == (6 + 12) / 40
    assert boost.rescue.rescued is not None
    assert boost.rescue.rescued.mean == 0.5  # six of the twelve that are lost
    assert boost.rescue.over_control is not None
    assert boost.rescue.over_control.a_only == 6
    assert control.rescue.over_control is None
    for check in (rows, weights):
        assert check.rescue.rescued is not None
        assert check.rescue.rescued.mean == 1.0


def test_hidden_answers_are_counted_among_the_wrong_ones_with_their_control():
    hidden = an_explanation(a_change(-1, 0)).hidden["new"]
    assert hidden is not None
    assert hidden.wrong == len(WRONG)
    assert hidden.share.mean == pytest.approx(sum(i % 6 < 3 for i in WRONG) / len(WRONG))
    assert hidden.control.mean == 0.0
    assert hidden.difference.mean == pytest.approx(hidden.share.mean)


def test_chance_is_all_where_no_relation_has_more_candidates_than_are_counted():
    ones = torch.ones(N, dtype=torch.long)
    few = an_explanation(a_change(-1, 0), ranks=ReadoutRanks(ones, ones, torch.tensor([2, 3] * (N // 2)))).hidden["new"]
    mixed = an_explanation(a_change(-1, 0), ranks=ReadoutRanks(ones, ones, torch.tensor([2, 12] * (N // 2))))
    assert few is not None
    assert few.chance == 1.0
    hidden = mixed.hidden["new"]
    assert hidden is not None
    assert hidden.chance == pytest.approx(sum(0.25 if i % 2 else 1.0 for i in WRONG) / len(WRONG))


def test_a_fact_that_both_get_wrong_is_the_first_models_and_one_that_both_know_is_nobodys():
    facts = an_explanation(a_change(-1, -0.5)).facts
    assert [fact.right for fact in facts] == list(zip(BEFORE, AFTER, strict=True))
    assert [facts[i].wrong_in for i in (0, 12, 20, 39)] == ["new", None, "old", "old"]
    assert facts[12].comes_back == ()
    assert facts[0].comes_back == ("attention to the subject x4", "rows of all layers", "W_Q and W_K")
    assert facts[0].causes["ov+mlp"] == -0.5
    assert facts[0].margin[1] - facts[0].margin[0] == pytest.approx(facts[0].causes["qk"] - 0.5, abs=1e-6)
    assert [fact.readout_rank[0] for fact in facts] == RANKS.rank.tolist()


def test_ten_examples_begin_with_what_was_lost():
    explanation = an_explanation(a_change(-1, 0))
    assert len(set(explanation.examples)) == 10
    assert set(explanation.examples) <= set(range(12))
    assert explanation.examples == an_explanation(a_change(-1, 0)).examples


def test_models_that_were_not_asked_are_refused():
    comparison = a_comparison(ATTENTION, pair=("old", "new"))
    with pytest.raises(DataError, match="recall of 'old' was not measured"):
        conclude(comparison, a_change(-1, 0), {"old": RANKS, "new": RANKS}, {"old": [], "new": []}, 0, {})
