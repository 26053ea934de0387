"""The bootstrap's ends against a naive bootstrap-t with its own random numbers."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from attnbalance.statistics.bootstrap import bootstrap_ends, cluster_ratios


def _means(values, clusters, *, simultaneous=False, seed=0):
    """The mean of each column, its standard error, and the two ends of its interval."""
    table = np.asarray(values, dtype=float)
    ratios = cluster_ratios(table, np.ones(len(table)), clusters)
    return ratios.ratio, ratios.error, *bootstrap_ends(ratios, simultaneous=simultaneous, seed=seed)


def _mean_and_error(groups):
    """The mean over all prompts of groups of prompts, and its standard error from what each group adds to it."""
    n, prompts = len(groups), [value for group in groups for value in group]
    mean = sum(prompts) / len(prompts)
    adds = [sum(value - mean for value in group) / len(prompts) for group in groups]
    return mean, math.sqrt(n / (n - 1) * sum(x * x for x in adds))


def _naive_interval(columns, clusters, resamples=2500, seed=7):
    """The bootstrap-t of columns of values as a loop over resamples and clusters; of several, the largest t counts.

    Returns how many standard errors each end lies from the mean.
    """
    rng, names = random.Random(seed), list(dict.fromkeys(clusters))
    tables = [[[v for v, c in zip(column, clusters, strict=True) if c == name] for name in names] for column in columns]
    wholes = [_mean_and_error(table) for table in tables]
    highest, lowest = [], []
    for _ in range(resamples):
        drawn = [rng.randrange(len(names)) for _ in names]
        resampled = [_mean_and_error([table[i] for i in drawn]) for table in tables]
        t = [(mean - whole) / max(error, 1e-9) for (mean, error), (whole, _) in zip(resampled, wholes, strict=True)]
        highest.append(max(t))
        lowest.append(min(t))
    return sorted(highest)[int(0.975 * resamples)], -sorted(lowest)[int(0.025 * resamples)]


def _data(seed=0, n=60, clusters=20):
    rng = np.random.default_rng(seed)
    names = [f"s{i % clusters if i < 40 else 0}" for i in range(n)]  # unequal clusters: s0 has a third of all prompts
    return rng.normal(size=n) + np.array([int(name[1:]) / 5 for name in names]), names


@pytest.mark.parametrize("columns", [1, 3])
def test_ends_agree_with_a_naive_loop_over_clusters(columns):
    values, names = _data()
    skewed = [np.exp(values / 2), values, np.roll(values, 7) ** 2][:columns]
    means, errors, lows, highs = _means(np.stack(skewed, axis=1), names, simultaneous=columns > 1)
    below, above = _naive_interval([column.tolist() for column in skewed], names)
    for i, column in enumerate(skewed):
        groups = [[v for v, c in zip(column, names, strict=True) if c == name] for name in dict.fromkeys(names)]
        assert (means[i], errors[i]) == pytest.approx(_mean_and_error(groups))
        # two bootstraps of 2,000 draws each: their 97.5% quantiles of t differ by 4% (one standard deviation)
        assert (means[i] - lows[i]) / errors[i] == pytest.approx(max(below, 2.093), rel=0.15)
        assert (highs[i] - means[i]) / errors[i] == pytest.approx(max(above, 2.093), rel=0.15)


def test_a_ratio_of_sums_is_taken_over_prompts_and_its_residuals_over_clusters():
    ratios = cluster_ratios([[1.0], [2.0], [6.0], [3.0]], [2.0, 2.0, 4.0, 4.0], ["a", "b", "a", "b"])
    assert ratios.ratio.tolist() == [1.0]
    assert ratios.totals.tolist() == [6.0, 6.0]
    assert ratios.residuals.tolist() == [[1.0], [-1.0]]  # 7 - 6 and 5 - 6
    assert ratios.error.tolist() == pytest.approx([2 / 12])  # sqrt(2 / 1 * (1 + 1)) over the total's sum


def test_simultaneous_intervals_contain_those_of_each_column_by_itself():
    values = np.random.default_rng(6).exponential(size=(25, 8))
    names = [str(i) for i in range(25)]
    (_, _, low, high), (_, _, widest_low, widest_high) = (
        _means(values, names, simultaneous=both) for both in (False, True)
    )
    assert (widest_low < low).all()
    assert (low < high).all()
    assert (high < widest_high).all()


def test_simultaneous_intervals_of_equal_columns_are_those_of_one():
    values, names = _data()
    _, _, low, high = _means(values[:, None], names)
    _, _, lows, highs = _means(np.repeat(values[:, None], 30, axis=1), names, simultaneous=True)
    np.testing.assert_allclose(lows, low[0])
    np.testing.assert_allclose(highs, high[0])


def test_columns_without_spread_or_with_unknown_values_widen_no_other():
    values = np.random.default_rng(10).normal(size=(30, 4))
    names = [str(i) for i in range(30)]
    odd = np.tile([0.1, 0.0, 0.0], (30, 1))
    odd[3, 1], odd[4, 2] = math.nan, 1e-9  # unknown; and rounding noise in a single prompt
    plain = _means(values, names, simultaneous=True)
    mean, _, low, high = mixed = _means(np.hstack([values, odd]), names, simultaneous=True)
    assert all((part[:4] == other).all() for part, other in zip(mixed, plain, strict=True))
    assert (low[4], high[4]) == (mean[4], mean[4])  # constant
    assert math.isnan(low[5])
    assert low[6] < 0 < mean[6] < high[6] < 1.1e-9  # a mean of nearly 1e-9 is still possible


def test_resamples_that_draw_one_cluster_only_leave_the_interval_finite():
    _, _, low, high = _means([[0.0], [0.0], [0.0], [0.0], [1.0]], list("abcde"))
    assert low[0] < 0
    assert 0.2 < high[0] <= 0.2 + 5 * 0.2 + 1e-9  # at most n standard errors, each .2 here


def test_each_column_is_what_it_is_alone():
    values, names = _data()
    _, _, lows, highs = _means(np.stack([values, 2 * values], axis=1), names)
    _, _, low, high = _means(values[:, None], names)
    assert (lows[0], highs[0]) == pytest.approx((low[0], high[0]))
    assert (lows[1], highs[1]) == pytest.approx((2 * low[0], 2 * high[0]))


def test_the_order_of_prompts_changes_nothing():
    values, names = _data()
    order = np.random.default_rng(3).permutation(len(names))
    before, after = _means(values[:, None], names), _means(values[order, None], [names[i] for i in order])
    np.testing.assert_allclose(np.concatenate(after), np.concatenate(before))


def test_large_data_is_resampled_in_blocks_with_the_same_result_as_its_standard_error():
    values = np.random.default_rng(4).normal(size=5000)
    _, _, low, high = _means(values[:, None], [str(i) for i in range(5000)])
    assert high[0] - low[0] == pytest.approx(2 * 1.96 / math.sqrt(5000), rel=0.1)
