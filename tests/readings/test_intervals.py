"""Intervals against a naive bootstrap with its own random numbers, and against closed forms."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from scipy import stats

from attnbalance.readings.intervals import (
    Interval,
    finite,
    mean_intervals,
    rank_correlations,
    ratio_intervals,
    seed_interval,
    share_interval,
)


def _naive_interval(values, clusters, resamples=1500, seed=7):
    """The clustered percentile bootstrap as a loop over resamples, clusters and prompts."""
    rng, groups = random.Random(seed), {}
    for value, cluster in zip(values, clusters, strict=True):
        groups.setdefault(cluster, []).append(value)
    names, means = list(groups), []
    for _ in range(resamples):
        drawn = [value for _ in names for value in groups[rng.choice(names)]]
        means.append(sum(drawn) / len(drawn))
    means.sort()
    return means[int(0.025 * resamples)], means[int(0.975 * resamples)]


def _expanded(mean, ends, n, confidence=0.95):
    """Percentile ends moved away from the mean by Hesterberg's correction, as in a table of t quantiles."""
    factor = stats.t.isf((1 - confidence) / 2, n - 1) / 1.959964 * math.sqrt(n / (n - 1))
    return tuple(mean + (end - mean) * factor for end in ends)


def _data(seed=0, n=60, clusters=20):
    rng = np.random.default_rng(seed)
    names = [f"s{i % clusters if i < 40 else 0}" for i in range(n)]  # unequal clusters: s0 has a third of all prompts
    return rng.normal(size=n) + np.array([int(name[1:]) / 5 for name in names]), names


def test_intervals_agree_with_a_naive_loop_over_clusters():
    values, names = _data()
    [found] = mean_intervals(values[:, None], names)
    low, high = _expanded(values.mean(), _naive_interval(values.tolist(), names), 20)
    assert found.mean == pytest.approx(values.mean())
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.1 * (high - low))


def test_intervals_of_single_prompts_agree_with_the_normal_theory_of_a_mean():
    values = np.random.default_rng(1).normal(loc=3, size=400)
    [found] = mean_intervals(values[:, None], [str(i) for i in range(400)])
    half = 1.96 * values.std() / 20
    assert (found.low, found.high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.01)


def test_prompts_of_one_subject_count_as_one():
    values = np.random.default_rng(2).normal(size=30)
    alone = mean_intervals(values[:, None], [str(i) for i in range(30)])[0]
    repeated = mean_intervals(np.repeat(values, 5)[:, None], [str(i) for i in range(30) for _ in range(5)])[0]
    unclustered = mean_intervals(np.repeat(values, 5)[:, None], [str(i) for i in range(150)])[0]
    assert repeated.high - repeated.low == pytest.approx(alone.high - alone.low, rel=0.15)
    assert unclustered.high - unclustered.low < 0.6 * (repeated.high - repeated.low)


def test_a_wider_confidence_gives_a_wider_interval():
    values, names = _data()
    plain, wide = (mean_intervals(values[:, None], names, confidence=c)[0] for c in (0.95, 0.999))
    assert wide.low < plain.low < plain.high < wide.high


def test_each_column_is_what_it_is_alone():
    values, names = _data()
    both = mean_intervals(np.stack([values, 2 * values], axis=1), names)
    alone = mean_intervals(values[:, None], names)[0]
    assert (both[0].low, both[0].high) == pytest.approx((alone.low, alone.high))
    assert (both[1].low, both[1].high) == pytest.approx((2 * both[0].low, 2 * both[0].high))


def test_the_order_of_prompts_changes_nothing():
    values, names = _data()
    order = np.random.default_rng(3).permutation(len(names))
    before, after = (
        mean_intervals(values[:, None], names)[0],
        mean_intervals(values[order, None], [names[i] for i in order])[0],
    )
    assert (after.mean, after.low, after.high) == pytest.approx((before.mean, before.low, before.high))


def test_a_constant_has_an_interval_without_width():
    [found] = mean_intervals(np.full((10, 1), 0.25), [str(i) for i in range(10)])
    assert (found.mean, found.low, found.high) == pytest.approx((0.25, 0.25, 0.25))


@pytest.mark.parametrize("n", [8, 20])
def test_few_clusters_cover_the_true_mean_as_often_as_they_say(n):
    values, covered = np.random.default_rng(n).normal(size=(n, 2000)), []
    for confidence in (0.95, 1 - 0.05 / 8):  # alone, and Bonferroni for 8 layers
        found = mean_intervals(values, [str(i) for i in range(n)], confidence=confidence)
        covered.append(sum(not x.excludes_zero for x in found) / 2000)
    assert covered[0] == pytest.approx(0.95, abs=0.02)
    assert covered[1] == pytest.approx(1 - 0.05 / 8, abs=0.006)


@pytest.mark.parametrize("confidence", [0.95, 1 - 0.05 / 32])
@pytest.mark.parametrize("n", [8, 20, 200])
def test_intervals_of_normal_values_are_those_of_student(n, confidence):
    values = np.random.default_rng(n).normal(size=(n, 200))
    found = mean_intervals(values, [str(i) for i in range(n)], confidence=confidence)
    student = stats.t.interval(confidence, n - 1, values.mean(axis=0), stats.sem(values, axis=0))
    widths = np.array([x.high - x.low for x in found]) / (student[1] - student[0])
    assert np.mean(widths) == pytest.approx(1, abs=0.04)


def test_a_bonferroni_bound_hardly_depends_on_the_seed():
    values = np.random.default_rng(5).exponential(size=(300, 1))
    names = [str(i) for i in range(300)]
    ends = [mean_intervals(values, names, confidence=1 - 0.05 / 32, seed=seed)[0].low for seed in range(20)]
    assert np.std(ends) < 0.05 * (values.mean() - np.mean(ends))


def test_fewer_than_five_clusters_have_no_interval():
    values = [[0.1], [0.2], [0.4], [0.3], [0.2]]
    assert math.isnan(mean_intervals(values, list("abcdd"))[0].low)
    assert not math.isnan(mean_intervals(values, list("abcde"))[0].low)


def test_one_cluster_has_no_interval():
    [found] = mean_intervals([[1.0], [2.0]], ["a", "a"])
    assert found.mean == 1.5
    assert math.isnan(found.low)
    assert not found.excludes_zero
    assert found.as_dict() == {"mean": 1.5, "low": None, "high": None, "n": 2}


def test_large_data_is_resampled_in_blocks_with_the_same_result_as_its_standard_error():
    values = np.random.default_rng(4).normal(size=5000)
    [found] = mean_intervals(values[:, None], [str(i) for i in range(5000)])
    assert found.high - found.low == pytest.approx(2 * 1.96 / math.sqrt(5000), rel=0.1)


def test_shares_of_all_or_none_have_wilson_intervals_over_clusters():
    z2 = stats.norm.ppf(0.975) ** 2
    every = share_interval([True] * 12, [str(i // 3) for i in range(12)])  # 4 clusters
    assert (every.mean, every.low, every.high) == pytest.approx((1, 4 / (4 + z2), 1))
    none = share_interval([False] * 4, list("abcd"))
    assert (none.mean, none.low, none.high) == pytest.approx((0, 0, z2 / (4 + z2)))


def test_one_cluster_has_no_interval_even_if_all_hits_are_alike():
    for hit in (True, False):
        found = share_interval([hit] * 3, ["one"] * 3)
        assert found.mean == hit
        assert math.isnan(found.low)
        assert math.isnan(found.high)
    assert share_interval([True] * 2, list("ab")).low == pytest.approx(2 / (2 + 1.959964**2))


def test_a_share_stays_between_none_and_all():
    found = share_interval([True] + [False] * 5, list("abcdef"))
    assert found.low == 0
    assert share_interval([False] + [True] * 5, list("abcdef")).high == 1


def test_other_shares_agree_with_the_naive_loop():
    hits, names = [i % 3 == 0 for i in range(60)], [str(i // 2) for i in range(60)]
    found, ends = share_interval(hits, names), _naive_interval(list(map(float, hits)), names)
    low, high = _expanded(1 / 3, ends, 30)
    assert found.mean == pytest.approx(1 / 3)
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.03)


def test_zero_is_excluded_only_by_both_ends_on_one_side():
    ends = [(0.1, 0.2), (-0.2, -0.1), (-0.1, 0.1), (0.0, 0.1)]
    assert [Interval(0.0, low, high, 1).excludes_zero for low, high in ends] == [True, True, False, False]
    assert [finite(x) for x in (1.5, math.nan, math.inf)] == [1.5, None, None]


def _table(n=200, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.normal(size=n)
    return np.stack([y + rng.normal(size=n), rng.normal(size=n), -(y**3)], axis=1), y, [str(i) for i in range(n)]


def test_rank_correlations_are_spearmans():
    x, y, names = _table()
    for column, found in zip(x.T, rank_correlations(x, y, names), strict=True):
        assert found.mean == pytest.approx(stats.spearmanr(column, y).statistic, abs=1e-12)
    rounded = np.round(x, 0)  # ties
    assert rank_correlations(rounded, y, names)[0].mean == pytest.approx(stats.spearmanr(rounded[:, 0], y).statistic)


def test_rank_correlations_of_noise_exclude_zero_as_rarely_as_they_should():
    hits = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        found = rank_correlations(rng.normal(size=(40, 1)), rng.normal(size=40), [str(i) for i in range(40)], seed=seed)
        hits += found[0].excludes_zero
    assert hits <= 22  # 5% of 200 is 10; more than 22 has probability 2e-4 under it


def test_a_constant_has_no_correlation_and_few_clusters_no_interval():
    x, y, names = _table()
    assert rank_correlations(np.ones((200, 1)), y, names)[0].mean == 0
    assert math.isnan(rank_correlations(x, y, ["a", "b"] * 100)[0].low)


def test_shares_of_a_total_add_up_and_a_total_that_may_be_zero_has_none():
    x, _, names = _table()
    parts = x[:, :2] + [3.0, 1.0]
    found = ratio_intervals(parts, parts.sum(1), names)
    assert sum(one.mean for one in found) == pytest.approx(1)
    assert found[0].mean == pytest.approx(parts[:, 0].sum() / parts.sum())
    assert found[0].low < found[0].mean < found[0].high
    centred = x[:, :1] - x[:, :1].mean()
    assert math.isnan(ratio_intervals(centred, centred[:, 0] + 1e-3, names)[0].low)


def test_shares_of_a_total_hold_the_truth_as_often_as_they_should():
    missed = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        total = rng.normal(2.0, 1.0, size=60)
        part = 0.7 * total + rng.normal(0, 0.5, size=60)
        (found,) = ratio_intervals(part[:, None], total, [str(i) for i in range(60)], seed=seed)
        missed += not found.low <= 0.7 <= found.high
    assert missed <= 22  # as above


def test_an_interval_over_seeds_is_students():
    values = [0.31, 0.12, 0.25, 0.4]
    found = seed_interval(values)
    low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert (found.mean, found.low, found.high, found.n) == pytest.approx((0.27, low, high, 4))
    # by hand: the t quantile of 2 degrees of freedom is 4.303; mean 2, deviation 1, over the root of 3
    three = seed_interval([1.0, 2.0, 3.0])
    assert (three.low, three.high) == pytest.approx((2 - 4.3027 / math.sqrt(3), 2 + 4.3027 / math.sqrt(3)), abs=1e-4)


def test_one_seed_has_no_interval_and_equal_seeds_have_one_without_width():
    one = seed_interval([0.5])
    assert one.as_dict() == {"mean": 0.5, "low": None, "high": None, "n": 1}
    assert not one.excludes_zero
    same = seed_interval([0.5, 0.5, 0.5])
    assert (same.mean, same.low, same.high) == (0.5, 0.5, 0.5)


def test_intervals_over_seeds_hold_the_truth_as_often_as_they_should():
    rng = np.random.default_rng(0)
    found = [seed_interval(rng.normal(size=3).tolist()) for _ in range(2000)]
    assert sum(one.excludes_zero for one in found) == pytest.approx(100, abs=40)  # 5%, four standard deviations


def test_neither_order_nor_a_shift_changes_the_width_of_an_interval_over_seeds():
    first, second = seed_interval([0.1, 0.5, 0.3]), seed_interval([1.3, 1.1, 1.5])
    assert second.low - first.low == pytest.approx(1.0)
    assert second.high - first.high == pytest.approx(1.0)
