"""Studentised bootstrap over clusters: 95% intervals for ratios of sums, separate or simultaneous."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

from attnbalance.errors import DataError
from attnbalance.seeds import check_seed

Array = npt.NDArray[np.float64]

RESAMPLES = 2000
"""Bootstrap resamples of the clusters."""

MIN_CLUSTERS = 5
"""Least number of clusters for a bootstrap interval: with fewer it would rest on normal theory alone."""

MIN_EFFECTIVE = 4.0
"""Clusters of unequal sizes must be worth more than this many equal ones (see `are_enough`)."""

TAIL = 0.025
"""Share of the resamples outside each end of an interval."""


@dataclass(frozen=True)
class Ratios:
    """The ratio of each column's sum to the total's sum, with what its standard error is made of.

    Attributes:
        ratio: [column] the column's sum over the total's sum.
        residuals: [cluster, column] the column's sum over the cluster minus ratio times the total's sum over it.
        totals: [cluster] the total's sum over the cluster.
        sizes: [cluster] the number of its prompts.
        error: [column] the ratio's linearised standard error over clusters.
    """

    ratio: Array
    residuals: Array
    totals: Array
    sizes: Array
    error: Array


def cluster_ratios(parts: npt.ArrayLike, total: npt.ArrayLike, clusters: Sequence[str]) -> Ratios:
    """The sum of each column of `parts` [prompt, column] over that of `total` [prompt], with clustered errors.

    Ratios to a total of 0 are NaN. Raises `DataError` for arrays that do not fit together (see `check_table`).
    """
    table, whole = np.asarray(parts, dtype=float), np.asarray(total, dtype=float)
    check_table(table, whole, clusters)
    names, inverse = np.unique(np.asarray(clusters), return_inverse=True)
    n = len(names)
    sums = np.asarray([np.bincount(inverse, column, n) for column in table.T], dtype=float).reshape(-1, n).T
    totals = np.bincount(inverse, whole, n).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = sums.sum(axis=0) / (totals.sum() or np.nan)
        residuals = sums - totals[:, None] * ratio
        rounding = 1e-12 * np.abs(table).max(axis=0)
        residuals[:, np.abs(residuals).max(axis=0) <= rounding] = 0.0  # equal up to rounding: no spread
        error = np.sqrt(n / max(n - 1, 1) * np.square(residuals).sum(axis=0)) / abs(totals.sum())
    return Ratios(ratio, residuals, totals, np.bincount(inverse, minlength=n).astype(np.float64), error)


def check_table(table: Array, total: Array, clusters: Sequence[str]) -> None:
    """Raise `DataError` unless there are prompts, with a row, a total and a cluster for each."""
    if table.ndim != 2 or total.ndim != 1 or not len(table) == len(total) == len(clusters) or not len(table):
        raise DataError(
            "statistics need one or more prompts, each with a row of numbers and a cluster, got shapes "
            f"{table.shape} and {total.shape} with {len(clusters)} clusters"
        )


def effective_number(sizes: npt.ArrayLike) -> float:
    """The number of equal clusters that tell as much as these: (sum of sizes)^2 / sum of squared sizes.

    Of Kish (1965, "Survey sampling"), for clusters whose prompts all agree.

    >>> effective_number([2, 2, 2]), effective_number([10, 1, 1])
    (3.0, 1.411764705882353)
    """
    size = np.asarray(sizes, dtype=float)
    return float(size.sum() ** 2 / np.square(size).sum())


def are_enough(sizes: npt.ArrayLike) -> bool:
    """Whether clusters with these numbers of prompts allow an interval: `MIN_CLUSTERS`, and none outweighs the rest.

    Their `effective_number` must exceed `MIN_EFFECTIVE`. It does not if one cluster holds half of everything.

    >>> are_enough([1, 1, 1, 1, 1]), are_enough([20] + [1] * 20)
    (True, False)
    """
    return np.size(sizes) >= MIN_CLUSTERS and effective_number(sizes) > MIN_EFFECTIVE


def bootstrap_ends(ratios: Ratios, *, simultaneous: bool, seed: int) -> tuple[Array, Array]:
    """The ends of the 95% interval of each ratio [column]; `mean_intervals` describes the method.

    NaN if the clusters are not enough (see `are_enough`), and for values that are not finite.
    """
    n = len(ratios.totals)
    check_seed(seed)
    if not are_enough(ratios.sizes):
        return np.full_like(ratios.ratio, np.nan), np.full_like(ratios.ratio, np.nan)
    t, without_spread = _studentised(ratios, np.random.default_rng(seed))
    student = stats.t.ppf(1 - TAIL, n - 1)
    below, above = (np.maximum(student, np.quantile(side, 1 - TAIL, axis=0)) for side in (t, -t))
    if simultaneous:
        # A column in which hardly any cluster differs has no usable t. It would widen all other intervals.
        usable = np.isfinite(ratios.error) & (without_spread <= TAIL)
        for ends, side in ((below, t), (above, -t)) if usable.any() else ():
            largest = side[:, usable].max(axis=1, initial=-np.inf)
            ends[usable] = max(student, float(np.quantile(largest, 1 - TAIL)))
    with np.errstate(invalid="ignore"):  # no ratio to a total of 0
        return ratios.ratio - below * ratios.error, ratios.ratio + above * ratios.error


def _studentised(ratios: Ratios, rng: np.random.Generator) -> tuple[Array, Array]:
    """Each resample's t [resample, column], and the share of resamples in which a column has no spread [column].

    t is the resample's ratio minus the sample's, divided by the resample's own standard error. That error counts as at
    least the sample's over n. Without this floor, a resample of equal clusters only would have an infinite t.
    """
    n, whole = len(ratios.totals), ratios.totals.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = np.where(ratios.error == 0, 1.0, ratios.error * whole)
        e, w = ratios.residuals / scale, (ratios.totals / whole)[:, None]
        columns, size = np.hstack([e, e * e, e * w, w, w * w]), e.shape[1]
        t, spreads = [], []
        for times in _draws(n, rng):
            moments = times @ columns
            u, uu, uw = (moments[:, i * size : (i + 1) * size] for i in range(3))
            v, vv = moments[:, -2:-1], moments[:, -1:]
            # u/v is the change of the ratio in standard errors; `spread` is the resample's error times v squared.
            spread = np.sqrt(n / (n - 1) * (v * v * uu - 2 * u * v * uw + u * u * vv).clip(min=0))
            t.append(np.nan_to_num(u * v / np.maximum(spread, v * v / n)))
            spreads.append((spread <= 1e-6 * v * v) & (ratios.error > 0))
    return np.concatenate(t), np.concatenate(spreads).mean(axis=0)


def _draws(n: int, rng: np.random.Generator) -> Iterator[Array]:
    """Blocks [resample, cluster] of the number of times each cluster is drawn.

    With these counts the totals of resamples are a matrix product, about twenty times faster than gathering clusters.
    """
    block = max(1, 4_000_000 // n)  # resamples in a block: keeps memory near 100 MB
    for start in range(0, RESAMPLES, block):
        size = min(block, RESAMPLES - start)
        drawn = rng.integers(0, n, (size, n)) + n * np.arange(size)[:, None]
        yield np.bincount(drawn.ravel(), minlength=size * n).reshape(size, n).astype(np.float64)
