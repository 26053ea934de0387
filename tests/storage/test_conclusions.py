"""Conclusions on salience from readings chosen by the test, and the sentence and figures made of them."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from attnbalance.readings.curves import layer_curve
from attnbalance.readings.salience import ReadoutRanks
from attnbalance.storage.conclusions import conclude
from tests.fakes import a_comparison, a_reading

N = 40
PROMPTS = a_comparison({"a": [0.1]}, pair=None).prompts
RANKS = ReadoutRanks(torch.arange(N) % 6 + 1, torch.full((N,), 5), torch.full((N,), 6))


def test_shares_curves_and_correlations_are_those_of_the_readings():
    reading = a_reading(PROMPTS, [0.1, -0.2], 2, 1)
    salience = conclude("a", [reading], RANKS, PROMPTS, 0, None, 0)
    assert salience.curves == (layer_curve(reading, seed=0),)
    assert salience.top[3].share.mean == sum(i % 6 < 3 for i in range(N)) / N
    assert salience.top[3].control.mean == 0.0
    assert (salience.top[1].chance, salience.top[3].chance) == (pytest.approx(1 / 6), 0.5)
    popularity = [prompt.fact.popularity for prompt in PROMPTS]
    assert salience.popularity is not None
    for layer, mean in enumerate(salience.popularity[0].mean):
        expected = stats.spearmanr(reading.values[:, layer].double().sum(-1).numpy(), popularity).statistic
        assert mean == pytest.approx(expected, abs=1e-12)


def test_without_popularity_there_is_no_correlation():
    prompts = a_comparison({"a": [0.1]}, pair=None, popular=False).prompts
    assert conclude("a", [a_reading(prompts, [0.1], 2, 1)], RANKS, prompts, 0, None, 0).popularity is None
