"""Intervals against closed forms and scipy, and how often they miss."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from scipy import stats

from attnbalance.errors import DataError
from attnbalance.statistics.intervals import (
    Interval,
    finite,
    mean_intervals,
    rank_correlations,
    ratio_intervals,
    seed_interval,
)
from attnbalance.statistics.shares import share_interval


def test_intervals_of_single_prompts_agree_with_the_normal_theory_of_a_mean():
    values = np.random.default_rng(1).normal(loc=3, size=400)
    [interval] = mean_intervals(values[:, None], [str(i) for i in range(400)])
    half = 1.96 * values.std() / 20
    assert (interval.low, interval.high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.01)


def test_prompts_of_one_subject_count_as_one():
    values = np.random.default_rng(2).normal(size=30)
    alone = mean_intervals(values[:, None], [str(i) for i in range(30)])[0]
    repeated = mean_intervals(np.repeat(values, 5)[:, None], [str(i) for i in range(30) for _ in range(5)])[0]
    unclustered = mean_intervals(np.repeat(values, 5)[:, None], [str(i) for i in range(150)])[0]
    assert repeated.high - repeated.low == pytest.approx(alone.high - alone.low, rel=0.15)
    assert unclustered.high - unclustered.low < 0.6 * (repeated.high - repeated.low)


def _family_errors(draw, truth, prompts, samples, **how):
    """The share of samples [prompt, layer] in which some layer's simultaneous interval does not hold the truth."""
    missed, names = 0, [str(i) for i in range(prompts)]
    for seed in range(samples):
        intervals = mean_intervals(draw(np.random.default_rng(seed)), names, simultaneous=True, seed=seed)
        missed += any(not interval.low <= truth <= interval.high for interval in intervals)
    return missed / samples


# Of 150 samples, 5% wrong bands give more than 9.4% with probability 1%, and the wrong method (Bonferroni over the
# normal percentile ends) gave 28% (Beta, 8 layers) and 33% (lognormal, 8 layers) or more.
@pytest.mark.parametrize("correlated", [0.0, 0.7])
def test_some_layer_of_a_skewed_reading_is_missed_as_rarely_as_simultaneous_intervals_promise(correlated):
    def beta(rng):
        z = math.sqrt(1 - correlated) * rng.normal(size=(20, 8)) + math.sqrt(correlated) * rng.normal(size=(20, 1))
        return stats.beta.ppf(stats.norm.cdf(z), 0.5, 8)

    assert _family_errors(beta, 0.5 / 8.5, 20, 150) < 0.094


def test_some_layer_of_a_lognormal_reading_is_missed_as_rarely_as_simultaneous_intervals_promise():
    assert _family_errors(lambda rng: rng.lognormal(size=(30, 8)), math.exp(0.5), 30, 150) < 0.094


def test_an_interval_of_a_skewed_mean_holds_it_as_often_as_it_says_at_20_subjects():
    # Columns share the draws of subjects, so 2,000 columns weigh as some 500 samples: a standard error of .01. The
    # percentile ends with Student's correction held .91.
    values = np.random.default_rng(20).beta(0.5, 8, size=(20, 2000))
    intervals = mean_intervals(values, [str(i) for i in range(20)])
    assert np.mean([interval.low <= 0.5 / 8.5 <= interval.high for interval in intervals]) > 0.93


def test_intervals_move_and_turn_with_their_values():
    values = np.random.default_rng(8).lognormal(size=(20, 3))
    names = [f"s{i // 2}" for i in range(20)]
    for both in (False, True):
        before = mean_intervals(values, names, simultaneous=both)
        after = mean_intervals(5 - 1000 * values, names, simultaneous=both)
        for interval, other in zip(before, after, strict=True):
            assert (other.low, other.high) == pytest.approx((5 - 1000 * interval.high, 5 - 1000 * interval.low))


def test_the_longer_tail_has_the_longer_end():
    values = np.random.default_rng(9).lognormal(size=(30, 1))
    [interval] = mean_intervals(values, [str(i) for i in range(30)])
    assert interval.high - interval.mean > 1.3 * (interval.mean - interval.low)


def test_a_constant_has_an_interval_without_width():
    [interval] = mean_intervals(np.full((10, 1), 0.25), [str(i) for i in range(10)])
    assert (interval.mean, interval.low, interval.high) == pytest.approx((0.25, 0.25, 0.25))


@pytest.mark.parametrize("n", [8, 20])
def test_few_clusters_cover_a_normal_mean_as_often_as_they_say(n):
    values = np.random.default_rng(n).normal(size=(n, 2000))
    intervals = mean_intervals(values, [str(i) for i in range(n)])
    assert np.mean([not interval.excludes_zero for interval in intervals]) == pytest.approx(0.955, abs=0.02)


@pytest.mark.parametrize("n", [20, 200])
def test_intervals_of_normal_values_are_nearly_those_of_student_and_none_is_narrower(n):
    values = np.random.default_rng(n).normal(size=(n, 200))
    intervals = mean_intervals(values, [str(i) for i in range(n)])
    student = stats.t.interval(0.95, n - 1, values.mean(axis=0), stats.sem(values, axis=0))
    widths = np.array([interval.high - interval.low for interval in intervals]) / (student[1] - student[0])
    assert widths.min() > 1 - 1e-9
    assert np.mean(widths) == pytest.approx(1.03, abs=0.03)  # the larger of Student's and the bootstrap's own, each end


def test_a_simultaneous_bound_hardly_depends_on_the_seed():
    values = np.random.default_rng(5).exponential(size=(300, 32))
    names = [str(i) for i in range(300)]
    ends = [mean_intervals(values, names, simultaneous=True, seed=seed)[0].low for seed in range(20)]
    assert np.std(ends) < 0.05 * (values[:, 0].mean() - np.mean(ends))
    assert mean_intervals(values, names, simultaneous=True) == mean_intervals(values, names, simultaneous=True)


def test_fewer_than_five_clusters_have_no_interval():
    values = [[0.1], [0.2], [0.4], [0.3], [0.2]]
    assert math.isnan(mean_intervals(values, list("abcdd"))[0].low)
    assert not math.isnan(mean_intervals(values, list("abcde"))[0].low)


@pytest.mark.parametrize(("largest", "known"), [(8, True), (18, True), (20, False), (60, False)])
def test_a_cluster_of_half_the_prompts_leaves_no_interval(largest, known):
    names = ["one"] * largest + [f"other {i}" for i in range(20)]  # worth 10.7, 4.2, 3.8 and 1.8 equal clusters
    values = np.random.default_rng(0).normal(1, 1, (len(names), 1))
    intervals = [mean_intervals(values, names)[0], share_interval([value > 1 for [value] in values], names)]
    intervals += ratio_intervals(values, np.ones(len(names)), names)
    intervals += rank_correlations(values, np.random.default_rng(1).normal(size=len(names)), names)
    assert [not math.isnan(interval.low) for interval in intervals] == [known] * 4


@pytest.mark.parametrize(
    "compute",
    [
        lambda: mean_intervals(np.ones((3, 2)), ["a", "b"]),
        lambda: mean_intervals(np.ones((0, 2)), []),
        lambda: mean_intervals(np.ones(3), ["a", "b", "c"]),
        lambda: ratio_intervals(np.ones((3, 2)), np.ones(2), ["a", "b", "c"]),
        lambda: rank_correlations(np.ones((3, 2)), np.ones(2), ["a", "b", "c"]),
        lambda: rank_correlations(np.ones((0, 2)), np.ones(0), []),
        lambda: seed_interval([]),
    ],
)
def test_numbers_that_do_not_fit_together_are_refused(compute):
    with pytest.raises(DataError, match="one or more"):
        compute()


def test_one_cluster_has_no_interval():
    [interval] = mean_intervals([[1.0], [2.0]], ["a", "a"])
    assert interval.mean == 1.5
    assert math.isnan(interval.low)
    assert not interval.excludes_zero
    assert interval.as_dict() == {"mean": 1.5, "low": None, "high": None, "n": 2}


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
    for column, interval in zip(x.T, rank_correlations(x, y, names), strict=True):
        assert interval.mean == pytest.approx(stats.spearmanr(column, y).statistic, abs=1e-12)
    rounded = np.round(x, 0)  # ties
    assert rank_correlations(rounded, y, names)[0].mean == pytest.approx(stats.spearmanr(rounded[:, 0], y).statistic)


def test_rank_correlations_of_noise_exclude_zero_as_rarely_as_they_should():
    hits = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        correlations = rank_correlations(
            rng.normal(size=(40, 1)), rng.normal(size=40), [str(i) for i in range(40)], seed=seed
        )
        hits += correlations[0].excludes_zero
    assert hits <= 22  # 5% of 200 is 10; more than 22 has probability 2e-4 under it


def test_some_layers_rank_correlation_is_missed_as_rarely_as_simultaneous_intervals_promise():
    # Bonferroni over percentile ends missed in 21% of samples at 30 layers; 9.4% as above
    missed, names = 0, [str(i) for i in range(20)]
    for seed in range(150):
        rng = np.random.default_rng(seed)
        correlations = rank_correlations(
            rng.normal(size=(20, 15)), rng.normal(size=20), names, simultaneous=True, seed=seed
        )
        missed += any(interval.excludes_zero for interval in correlations)
    assert missed / 150 < 0.094


def test_correlations_stay_within_one_and_unknown_values_have_none():
    x, y, names = _table(12)
    rising, unknown = np.stack([y**3, np.where(y > 1, math.nan, y)], axis=1).T
    perfect, none = rank_correlations(np.stack([rising, unknown], axis=1), y, names)
    # the nearest other orders of 12 have a correlation of 1 - 12 / (12^3 - 12); Fisher's width is from normal theory
    low = np.tanh(np.arctanh(1 - 12 / (12**3 - 12)) - stats.t.ppf(0.975, 11) * np.sqrt(1.06 / 9))
    assert (perfect.mean, perfect.low, perfect.high) == pytest.approx((1, low, 1))
    assert math.isnan(none.mean)
    assert math.isnan(none.low)
    close = rank_correlations(x[:, :1] + 5 * y[:, None], y, names)[0]
    assert -1 < close.low < close.mean < close.high < 1


def test_a_constant_has_no_correlation_and_few_clusters_no_interval():
    x, y, names = _table()
    for table, other in ((np.ones((200, 1)), y), (x, np.ones(200))):
        [interval, *_] = rank_correlations(table, other, names)
        assert interval.mean == 0
        assert math.isnan(interval.low)
        assert math.isnan(interval.high)
    assert math.isnan(rank_correlations(x, y, ["a", "b"] * 100)[0].low)


@pytest.mark.parametrize("n", [5, 6, 7, 8, 9])
def test_a_few_orders_are_never_a_finding(n):
    # with bootstrap intervals alone, some of 24 columns of noise "correlated" in 63% of samples of 5
    rng = np.random.default_rng(n)
    correlations = rank_correlations(rng.normal(size=(n, 24)), rng.normal(size=n), [str(i) for i in range(n)])
    assert not any(interval.excludes_zero for interval in correlations)


def test_repeating_every_prompt_of_equal_rankings_changes_no_end():
    x, names = np.arange(10.0), [str(i) for i in range(10)]
    alone = rank_correlations(x[:, None], x, names)[0]
    repeated = rank_correlations(np.repeat(x, 4)[:, None], np.repeat(x, 4), [n for n in names for _ in range(4)])[0]
    assert (repeated.low, repeated.high) == pytest.approx((alone.low, alone.high))


def test_no_interval_is_narrower_than_normal_theory_has_it():
    for seed in range(30):
        rng = np.random.default_rng(seed)
        x = np.arange(12.0)
        y = x + 0.4 * rng.normal(size=12)  # few prompts change places, so their influences hardly differ
        [interval] = rank_correlations(x[:, None], y, [str(i) for i in range(12)])
        least = 2 * stats.t.ppf(0.975, 11) * np.sqrt(1.06 / 9)
        assert np.arctanh(min(interval.high, 1 - 1e-12)) - np.arctanh(interval.low) >= 0.99 * least


def test_shares_of_a_total_add_up_and_a_total_that_may_be_zero_has_none():
    x, _, names = _table()
    parts = x[:, :2] + [3.0, 1.0]
    intervals = ratio_intervals(parts, parts.sum(1), names)
    assert sum(interval.mean for interval in intervals) == pytest.approx(1)
    assert intervals[0].mean == pytest.approx(parts[:, 0].sum() / parts.sum())
    assert intervals[0].low < intervals[0].mean < intervals[0].high
    centred = x[:, :1] - x[:, :1].mean()
    assert math.isnan(ratio_intervals(centred, centred[:, 0] + 1e-3, names)[0].low)
    assert math.isnan(ratio_intervals([[1.0], [2.0]], [1.0, -1.0], ["a", "b"])[0].mean)


def test_shares_of_a_total_hold_the_truth_as_often_as_they_should():
    missed = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        total = rng.normal(2.0, 1.0, size=60)
        part = 0.7 * total + rng.normal(0, 0.5, size=60)
        (interval,) = ratio_intervals(part[:, None], total, [str(i) for i in range(60)], seed=seed)
        missed += not interval.low <= 0.7 <= interval.high
    assert missed <= 22  # as above


def test_an_interval_over_seeds_is_students():
    values = [0.31, 0.12, 0.25, 0.4]
    interval = seed_interval(values)
    low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert (interval.mean, interval.low, interval.high, interval.n) == pytest.approx((0.27, low, high, 4))
    # by hand: the t quantile of 2 degrees of freedom is 4.303; mean 2, deviation 1, over the root of 3
    three = seed_interval([1.0, 2.0, 3.0])
    assert (three.low, three.high) == pytest.approx((2 - 4.3027 / math.sqrt(3), 2 + 4.3027 / math.sqrt(3)), abs=1e-4)


def test_one_seed_has_no_interval_and_equal_seeds_have_one_without_width():
    interval = seed_interval([0.5])
    assert interval.as_dict() == {"mean": 0.5, "low": None, "high": None, "n": 1}
    assert not interval.excludes_zero
    same = seed_interval([0.5, 0.5, 0.5])
    assert (same.mean, same.low, same.high) == (0.5, 0.5, 0.5)


def test_intervals_over_seeds_hold_the_truth_as_often_as_they_should():
    rng = np.random.default_rng(0)
    intervals = [seed_interval(rng.normal(size=3).tolist()) for _ in range(2000)]
    assert sum(interval.excludes_zero for interval in intervals) == pytest.approx(
        100, abs=40
    )  # 5%, four standard deviations


def test_neither_order_nor_a_shift_changes_the_width_of_an_interval_over_seeds():
    first, second = seed_interval([0.1, 0.5, 0.3]), seed_interval([1.3, 1.1, 1.5])
    assert second.low - first.low == pytest.approx(1.0)
    assert second.high - first.high == pytest.approx(1.0)


def test_columns_in_which_few_clusters_differ_keep_their_own_intervals_without_a_warning() -> None:
    rng, values = np.random.default_rng(0), np.zeros((30, 12))
    for column in values.T:
        column[rng.choice(30, 3, replace=False)] = rng.exponential(size=3)
    clusters = [str(i) for i in range(30)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert mean_intervals(values, clusters, simultaneous=True) == mean_intervals(values, clusters)
