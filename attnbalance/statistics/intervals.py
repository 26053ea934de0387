"""Means, shares and rank correlations with 95% intervals over clusters of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy import stats

from attnbalance.arguments import expects
from attnbalance.errors import DataError
from attnbalance.statistics.bootstrap import bootstrap_ends, check_table, cluster_ratios

MIN_RANKED = 10
"""Least number of clusters for the interval of a rank correlation: fewer have too few orders."""


@dataclass(frozen=True)
class Interval:
    """A mean with its 95% interval.

    >>> Interval(0.3, 0.1, 0.5, 40).excludes_zero
    True

    Attributes:
        mean: The mean (or share, ratio, correlation).
        low: The interval's lower end; NaN with too few clusters.
        high: The interval's upper end; NaN with too few clusters.
        n: Number of prompts; of seeds, in an interval over seeds.
    """

    mean: float
    low: float
    high: float
    n: int

    @property
    def excludes_zero(self) -> bool:
        """Whether zero lies outside the interval (false without an interval)."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        """The mean with its interval, to three digits; the mean alone without an interval.

        >>> str(Interval(0.3, 0.1, 0.5, 40)), str(Interval(0.3, float("nan"), float("nan"), 2))
        ('0.3 [0.1, 0.5]', '0.3 (no interval)')
        """
        known = np.isfinite([self.low, self.high]).all()
        return f"{self.mean:.3g} [{self.low:.3g}, {self.high:.3g}]" if known else f"{self.mean:.3g} (no interval)"

    def within(self, lowest: float, highest: float) -> Interval:
        """The interval clipped to the possible values.

        >>> Interval(0.9, 0.7, 1.1, 40).within(0, 1).high
        1.0
        """
        low, high = np.clip([self.low, self.high], lowest, highest).tolist()
        return replace(self, low=low, high=high)

    def as_dict(self) -> dict[str, float | int | None]:
        """The interval as JSON; unknown numbers are null."""
        return {"mean": finite(self.mean), "low": finite(self.low), "high": finite(self.high), "n": self.n}


def finite(number: float) -> float | None:
    """The number, or None for one that JSON cannot hold.

    >>> finite(0.5), finite(float("nan"))
    (0.5, None)
    """
    return float(number) if np.isfinite(number) else None


@expects(clusters=[str])
def mean_intervals(
    values: npt.ArrayLike, clusters: Sequence[str], *, simultaneous: bool = False, seed: int = 0
) -> list[Interval]:
    """The mean of each column of `values` [prompt, column] over prompts, with its 95% bootstrap-t interval.

    Clusters (subjects) are drawn with replacement. All prompts of a cluster are drawn together, so prompts about one
    subject do not count as independent. Each resample's mean is divided by its own standard error (Hall 1992, "The
    bootstrap and Edgeworth expansion"). This corrects for skew: the two ends have their own quantiles. With
    `simultaneous`, these are quantiles of the largest t of all columns in a resample (Westfall and Young 1993,
    "Resampling-based multiple testing"), so all intervals hold together; correlated columns widen them less.

    Departures: each end is at least as far from the mean as in Student's interval. A resample's standard error is taken
    to be at least the sample's divided by the number of clusters. If over 2.5% of resamples give a column no spread
    (few of its clusters differ), it is left out of what is simultaneous: it widens no other interval, and its own is
    the separate one. If all columns are so, none of their intervals is simultaneous.

    An end may lie outside the range of the values. A constant column has an interval of zero width. There is no
    interval (NaN) for values that are not finite, with fewer than `MIN_CLUSTERS` clusters, and where one of them
    outweighs the others (see `are_enough`).

    Coverage measured by benchmarks/intervals.py on 30 columns, with 400 samples for each number: a column's own
    interval contains the mean in .92, .95, .96 of samples of 5, 10, 20 clusters with Beta(.5, 8) values; in .90, .91,
    .93 with lognormal values (.90, .90, .92 if columns correlate); in .95 and more with normal values. At least one
    simultaneous interval misses in at most 6% of samples of 10 or more clusters with any of these, in 2 to 9% with
    SmolLM2-135M's attention, and in up to 50% with 5 clusters. If one cluster holds a third of all prompts, a column's
    own interval contains the mean in .93 or .94 of samples of 10 to 50 clusters with Beta(.5, 8) values, and in .90 or
    .91 with lognormal values. If 30 clusters have 20, 10, 6, 5, 4, ... prompts, which are alike within a cluster, and
    larger clusters have larger values, it contains the mean in .81 to .86. A bootstrap cannot know values that the
    sample lacks: if one prompt in 25 has twenty times the usual attention, some layer's interval misses in 40% of
    samples of 20 prompts, 27% of 30, 4% of 150. The same happens with SmolLM2-135M's attention to 300 subjects of five
    relations, since a few subjects get nine standard deviations more than the mean: some layer's interval misses in
    45%, 57%, 43% and 8% of samples of 20, 30, 50 and 150 (200 samples each).
    """
    table = np.asarray(values, dtype=float)
    return _ratio_intervals(table, np.ones(len(table)), clusters, simultaneous, seed)


@expects(clusters=[str])
def ratio_intervals(
    parts: npt.ArrayLike, total: npt.ArrayLike, clusters: Sequence[str], *, seed: int = 0
) -> list[Interval]:
    """The share of each column of `parts` [prompt, column] in `total` [prompt], both summed over prompts.

    Intervals are those of `mean_intervals`, separate for each column. If the total's own interval contains zero, a
    share of it is meaningless and the interval is NaN. So is the share of a total of 0.
    """
    table, whole = np.asarray(parts, dtype=float), np.asarray(total, dtype=float)
    shares = _ratio_intervals(table, whole, clusters, False, seed)
    if mean_intervals(whole[:, None], clusters, seed=seed)[0].excludes_zero:
        return shares
    return [replace(share, low=np.nan, high=np.nan) for share in shares]


def seed_interval(values: Sequence[float]) -> Interval:
    """The mean of `values`, one number for each seed, with Student's 95% interval for the mean over all possible seeds.

    It covers everything that differs between seeds: training, and facts if each seed has its own. One seed has no
    interval (NaN). Raises `DataError` for no numbers.

    Seeds that agree by chance give an interval of zero width, which does not mean that the mean is known. So coverage
    can be below .95 for shares of few facts near 0 or 1. In simulations (4,000 samples each), a share of .95 of 16
    facts is covered in .66 of samples with 2 seeds, .86 with 3 and .90 with 5; of 60 facts, in .90 with 2 seeds and .96
    with 3.

    >>> interval = seed_interval([1.0, 2.0, 3.0])
    >>> print(f"{interval.mean:.1f} [{interval.low:.2f}, {interval.high:.2f}]")
    2.0 [-0.48, 4.48]
    """
    numbers = np.asarray(values, dtype=float)
    if not len(numbers):
        raise DataError("an interval over seeds needs one or more numbers, got none")
    mean, n = float(numbers.mean()), len(numbers)
    if n < 2:
        return Interval(mean, np.nan, np.nan, n)
    width = float(stats.t.ppf(0.975, n - 1) * numbers.std(ddof=1) / np.sqrt(n))
    return Interval(mean, mean - width, mean + width, n)


@expects(clusters=[str])
def rank_correlations(
    values: npt.ArrayLike, other: npt.ArrayLike, clusters: Sequence[str], *, simultaneous: bool = False, seed: int = 0
) -> list[Interval]:
    """Spearman's correlation of each column of `values` [prompt, column] with `other` [prompt], with its interval.

    Ranks are taken once, over all prompts; ties share their mean rank. The interval is computed for Fisher's z of the
    correlation, as `mean_intervals` of each prompt's linear influence on z, and transformed back to correlations.

    Departure: in z, each end is at least as far from the correlation as in normal theory: Student's quantile times
    sqrt(1.06 / (clusters - 3)) (Fieller, Hartley and Pearson 1957). If two rankings are equal or nearly so, the
    influence has no spread, and only this bound is left. There is no interval (NaN) with fewer than `MIN_RANKED`
    clusters, where one outweighs the others (see `are_enough`), and where all values of a column, or of `other`, are
    equal; the correlation is then 0.

    Coverage measured by benchmarks/intervals.py for normal values and 30 columns: at least one simultaneous interval
    misses in about 10% of samples of 10 clusters, and in 3 to 9% of 20 and more.

    Args:
        values: The table, one row for each prompt.
        other: The number of each prompt that the columns are correlated with.
        clusters: The subject of each prompt; whole subjects are drawn.
        simultaneous: Whether the intervals hold for all columns at once.
        seed: Seed of the bootstrap.
    """
    table, column = np.asarray(values, dtype=float), np.asarray(other, dtype=float)
    check_table(table, column, clusters)
    x, y = _standard_ranks(table), _standard_ranks(column[:, None])
    r = (x * y).mean(axis=0).clip(-1, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        influence = np.where(1 - r * r > 1e-12, (x * y - r * (x * x + y * y) / 2) / (1 - r * r), 0.0)
    n, n_clusters = len(x), len(set(clusters))
    if n_clusters < MIN_RANKED:
        return [Interval(float(mean), np.nan, np.nan, n) for mean in r]
    about_zero = mean_intervals(influence, clusters, simultaneous=simultaneous, seed=seed)
    constant = (np.abs(x).max(axis=0) == 0) | (np.abs(y).max() == 0)
    width = float(stats.t.ppf(0.975, n_clusters - 1)) * np.sqrt(1.06 / (n_clusters - 3))
    below = np.where(constant, np.nan, [np.maximum(width, -change.low) for change in about_zero])
    above = np.where(constant, np.nan, [np.maximum(width, change.high) for change in about_zero])
    nearest = 1 - 12 / (n_clusters**3 - n_clusters)  # the largest correlation of two orders of the clusters below 1
    z = np.arctanh(r.clip(-nearest, nearest))
    ends = np.minimum(np.tanh(z - below), r), np.maximum(np.tanh(z + above), r)
    return [Interval(float(mean), float(low), float(high), n) for mean, low, high in zip(r, *ends, strict=True)]


def _standard_ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The ranks of each column, scaled to mean 0 and standard deviation 1; zeros for a column of equal values."""
    ranks = stats.rankdata(values, axis=0)
    ranks = ranks - ranks.mean(axis=0)
    spread = ranks.std(axis=0)
    return np.divide(ranks, spread, out=np.zeros_like(ranks), where=spread != 0)


def _ratio_intervals(
    table: npt.NDArray[np.float64],
    total: npt.NDArray[np.float64],
    clusters: Sequence[str],
    simultaneous: bool,
    seed: int,
) -> list[Interval]:
    ratios = cluster_ratios(table, total, clusters)
    lows, highs = bootstrap_ends(ratios, simultaneous=simultaneous, seed=seed)
    return [
        Interval(float(ratio), float(low), float(high), len(table))
        for ratio, low, high in zip(ratios.ratio, lows, highs, strict=True)
    ]
