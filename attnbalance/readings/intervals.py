"""Means with 95% intervals, by bootstrap over clusters of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """A mean with its interval over `n` prompts. `low` and `high` are NaN where one cluster alone was seen."""

    mean: float
    low: float
    high: float
    n: int

    @property
    def excludes_zero(self) -> bool:
        """Whether zero lies outside the interval (false where there is none)."""
        return self.low > 0 or self.high < 0

    def as_dict(self) -> dict[str, float | int | None]:
        """The interval as JSON; a bound that is not known is null."""
        return {"mean": self.mean, "low": finite(self.low), "high": finite(self.high), "n": self.n}


def finite(number: float) -> float | None:
    """The number, or None for one that JSON cannot hold."""
    return float(number) if np.isfinite(number) else None


def mean_intervals(
    values: npt.ArrayLike, clusters: Sequence[str], *, confidence: float = 0.95, seed: int = 0
) -> list[Interval]:
    """The mean of each column of `values` [prompt, column] over prompts, with its bootstrap percentile interval.

    Clusters (subjects) are drawn with replacement, all prompts of a cluster together, so prompts about one subject do
    not count as independent; the statistic is the mean over the prompts drawn. The columns share the same draws.
    """
    table = np.asarray(values, dtype=float)
    names, inverse = np.unique(np.asarray(clusters), return_inverse=True)
    means = table.mean(axis=0)
    if len(names) < 2:
        return [Interval(float(mean), np.nan, np.nan, len(table)) for mean in means]
    columns = np.column_stack([table, np.ones(len(table))])  # the last one counts prompts
    sums = np.asarray([np.bincount(inverse, column, len(names)) for column in columns.T], dtype=float).T
    drawn = _resampled_sums(sums, np.random.default_rng(seed))
    low, high = np.quantile(drawn[:, :-1] / drawn[:, -1:], [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
    return [Interval(float(m), float(lo), float(hi), len(table)) for m, lo, hi in zip(means, low, high, strict=True)]


def _resampled_sums(sums: npt.NDArray[np.float64], rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """The column totals of `sums` [cluster, column] in each bootstrap resample, [resample, column].

    A resample is the number of times that each cluster was drawn, so that its totals are one matrix product: some
    twenty times faster than gathering the clusters themselves, with the same draws.
    """
    n = len(sums)
    block = max(1, 4_000_000 // n)  # resamples at once: bounds memory at about 100 MB
    totals = []
    for size in [min(block, RESAMPLES - start) for start in range(0, RESAMPLES, block)]:
        drawn = rng.integers(0, n, (size, n)) + n * np.arange(size)[:, None]
        times = np.bincount(drawn.ravel(), minlength=size * n).reshape(size, n)
        totals.append(times.astype(float) @ sums)
    return np.concatenate(totals)


def share_interval(hits: Sequence[bool], clusters: Sequence[str], *, seed: int = 0) -> Interval:
    """The share of true values, with its 95% interval: clustered bootstrap, or Wilson's where all values are alike.

    The bootstrap of a share of exactly 0 or 1 has no width, however few prompts were seen; there the interval is
    Wilson's score interval on the number of clusters. `hits` must not be empty.
    """
    if all(hits) or not any(hits):
        clusters_seen = len(set(clusters))
        found = stats.binomtest(clusters_seen if hits[0] else 0, clusters_seen).proportion_ci(method="wilson")
        return Interval(float(hits[0]), float(found.low), float(found.high), len(hits))
    return mean_intervals(np.asarray(hits, dtype=float)[:, None], clusters, seed=seed)[0]
