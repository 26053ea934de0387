"""Shares and paired gains against Wilson's interval by hand, and how often they hold the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from attnbalance.errors import DataError
from attnbalance.statistics.shares import gain_interval, share_interval


def _wilson(share, n, z):
    """The shares p at which (share - p) / sqrt(p (1 - p) / n) is z or -z: roots of a quadratic."""
    return tuple(sorted(np.roots([1 + z * z / n, -2 * share - z * z / n, share * share])))


def test_shares_of_all_or_none_have_wilson_intervals_over_clusters():
    z2 = stats.norm.ppf(0.975) ** 2
    every = share_interval([True] * 12, [str(i // 3) for i in range(12)])  # 4 clusters
    assert (every.mean, every.low, every.high) == pytest.approx((1, 4 / (4 + z2), 1))
    none = share_interval([False] * 4, list("abcd"))
    assert (none.mean, none.low, none.high) == pytest.approx((0, 0, z2 / (4 + z2)))


def test_one_cluster_has_no_interval_even_if_all_hits_are_alike():
    for hit in (True, False):
        alone = share_interval([hit] * 3, ["one"] * 3)
        assert alone.mean == hit
        assert math.isnan(alone.low)
        assert math.isnan(alone.high)
    assert share_interval([True] * 2, list("ab")).low == pytest.approx(2 / (2 + 1.959964**2))


@pytest.mark.parametrize(("hits", "clusters"), [([], []), ([True, False], ["a"])])
def test_hits_without_a_cluster_each_are_refused(hits, clusters):
    with pytest.raises(DataError, match="one or more prompts"):
        share_interval(hits, clusters)


def test_mixed_hits_of_fewer_than_five_clusters_have_no_interval():
    assert math.isnan(share_interval([True, False, True, False, True], list("abcdd")).low)
    assert not math.isnan(share_interval([True, False, True, False, True], list("abcde")).low)


def test_a_share_stays_between_none_and_all():
    low = share_interval([True] + [False] * 5, list("abcdef"))
    assert 0 <= low.low < low.mean
    assert share_interval([False] + [True] * 5, list("abcdef")).high <= 1


def test_shares_of_independent_prompts_are_wilsons_with_students_quantile():
    hits = [i % 3 == 0 for i in range(60)]
    interval = share_interval(hits, [str(i) for i in range(60)])
    assert interval.mean == pytest.approx(1 / 3)
    assert (interval.low, interval.high) == pytest.approx(_wilson(1 / 3, 60, stats.t.isf(0.025, 59)))


def test_prompts_of_one_subject_that_agree_count_as_one():
    hits = [i % 3 == 0 for i in range(60)]
    repeated = share_interval([hit for hit in hits for _ in range(5)], [str(i) for i in range(60) for _ in range(5)])
    # the variance over 60 clusters is that of 59.2 = 60 x (300 - 1) / 300 x 59 / 60 ... of independent prompts
    variance = (1 / 3) * (2 / 3) / 59
    n = (1 / 3) * (2 / 3) / variance * 300 / 299
    assert (repeated.low, repeated.high) == pytest.approx(_wilson(1 / 3, n, stats.t.isf(0.025, 59)))


def test_rare_hits_that_come_by_subject_are_covered_as_often_as_intervals_say():
    # 50 subjects of 5 prompts, a tenth of all right, correlation .5 within a subject; the bootstrap's percentile ends
    # held .89 at 20 subjects. 600 samples: a standard error of .009.
    rng, held, names = np.random.default_rng(3), 0, [str(i // 5) for i in range(100)]
    for _ in range(600):
        hits = rng.random((20, 5)) < rng.beta(0.1, 0.9, (20, 1))
        interval = share_interval(hits.ravel().tolist(), names)
        held += interval.low <= 0.1 <= interval.high
    assert held / 600 > 0.915


@pytest.mark.parametrize(("share", "subjects", "least"), [(0.05, 30, 0.83), (0.3, 10, 0.93), (0.3, 30, 0.93)])
def test_subjects_with_unequally_many_prompts_are_covered(share: float, subjects: int, least: float) -> None:
    # half of the subjects have 10 prompts, half have 1; nine in ten are alike within a subject. The variance over
    # clusters alone held .70, .85 and .94. 600 samples: a standard error of .014 and less.
    rng, held, sizes = np.random.default_rng(0), 0, np.repeat([10, 1], subjects // 2)
    names = np.repeat([str(i) for i in range(subjects)], sizes).tolist()
    for _ in range(600):
        own = np.repeat(rng.random(subjects) < share, sizes)
        interval = share_interval(
            np.where(rng.random(len(own)) < 0.9, own, rng.random(len(own)) < share).tolist(), names
        )
        held += interval.low <= share <= interval.high
    assert held / 600 > least


def test_unequal_clusters_that_agree_count_as_their_effective_number():
    sizes, right = [4, 2, 1, 1, 1, 1, 2, 4], [1, 0, 1, 0, 1, 0, 0, 1]
    names = [str(i) for i, size in enumerate(sizes) for _ in range(size)]
    hits = [bool(right[int(name)]) for name in names]
    k = 16**2 / (16 + 4 + 4 * 1 + 4 + 16)  # 5.8 of 8
    variance = 8 / 7 * sum((size * (r - 10 / 16)) ** 2 for size, r in zip(sizes, right, strict=True)) / 16**2
    n = min(k, 16 * (10 / 16 * 6 / 16) / 15 / variance)
    interval = share_interval(hits, names)
    assert (interval.low, interval.high) == pytest.approx(_wilson(10 / 16, n, stats.t.isf(0.025, k - 1)))
    z2 = stats.norm.ppf(0.975) ** 2
    assert share_interval([True] * 16, names).low == pytest.approx(k / (k + z2))


def test_gains_that_are_all_alike_are_bounded_by_what_was_not_seen():
    w = 1.959964**2 / (40 + 1.959964**2)  # the largest share of other gains that 40 subjects leave possible
    names = [str(i) for i in range(40)]
    for alike, ends in ((0, (-w, w)), (1, (1 - 2 * w, 1)), (-1, (-1, 2 * w - 1))):
        interval = gain_interval(np.full(40, alike), names)
        assert (interval.low, interval.high) == pytest.approx(ends)


def test_gains_that_only_go_one_way_are_a_share_above_and_leave_losses_possible_below():
    gained = np.array([1] * 12 + [0] * 28)
    names = [str(i) for i in range(40)]
    interval, share = gain_interval(gained, names), share_interval((gained == 1).tolist(), names)
    unseen = 1.959964**2 / (40 + 1.959964**2)
    assert interval.high == pytest.approx(share.high)
    assert interval.low == pytest.approx(0.3 - math.hypot(0.3 - share.low, unseen))


def test_turning_gains_round_turns_their_interval():
    gained = np.random.default_rng(0).choice([1, -1, 0], p=[0.3, 0.1, 0.6], size=50)
    names = [str(i // 2) for i in range(50)]
    there, back = gain_interval(gained, names), gain_interval(-gained, names)
    assert (back.mean, back.low, back.high) == pytest.approx((-there.mean, -there.high, -there.low))


@pytest.mark.parametrize(("n", "won", "lost"), [(50, 0.8, 0.05), (200, 0.02, 0.0), (20, 0.3, 0.3)])
def test_gains_are_covered_as_often_as_intervals_say(n, won, lost):
    # the bootstrap's percentile ends held .926, .902 and .952; 400 samples: a standard error of .011
    rng, held, names = np.random.default_rng(n), 0, [str(i) for i in range(n)]
    for _ in range(400):
        interval = gain_interval(rng.choice([1, -1, 0], p=[won, lost, 1 - won - lost], size=n), names)
        held += interval.low - 1e-12 <= won - lost <= interval.high + 1e-12
    assert held / 400 > 0.93


def test_gains_of_few_subjects_have_no_interval():
    assert math.isnan(gain_interval(np.array([1, 0, -1, 0]), list("abcd")).low)
    assert math.isnan(gain_interval(np.array([1, 1]), ["a", "a"]).high)


def test_a_share_of_none_or_all_lies_in_its_own_interval() -> None:
    for n in range(2, 200):
        names = [str(i) for i in range(n)]
        none, every = (share_interval([right] * n, names) for right in (False, True))
        assert not none.excludes_zero
        assert not none.low > 0
        assert not every.high < 1


@pytest.mark.parametrize("wrong", [2, 0.5, math.nan, -1])
def test_values_that_are_no_hits_or_gains_are_refused(wrong):
    clusters = [str(i) for i in range(30)]
    with pytest.raises(DataError, match="`hits` must hold 0, 1, got"):
        share_interval([wrong, *[0] * 29], clusters)
    if wrong != -1:
        with pytest.raises(DataError, match="`gained` must hold -1, 0, 1, got"):
            gain_interval([wrong, *[0] * 29], clusters)
