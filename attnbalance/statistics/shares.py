"""Shares and paired gains with 95% score intervals over clusters of prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy import stats

from attnbalance.arguments import expects
from attnbalance.errors import DataError
from attnbalance.statistics.bootstrap import are_enough, check_table, cluster_ratios, effective_number
from attnbalance.statistics.intervals import Interval


@expects(clusters=[str])
def share_interval(hits: Sequence[bool], clusters: Sequence[str]) -> Interval:
    """The share of true values in `hits`, with Wilson's 95% score interval for the effective number of prompts.

    The effective number is the number of prompts over the design effect: the variance of the share over clusters,
    divided by the variance for equally many independent prompts, at least 1. The quantile is Student's for the clusters
    (Dean and Pagano 2015, "Evaluating confidence interval methods for binomial proportions in clustered surveys"). If
    all values are equal, clusters are counted instead of prompts, with the normal quantile; this needs two clusters.
    Mixed values need clusters that `are_enough`; otherwise there is no interval (NaN). Raises `DataError` for no
    prompts, unless each has a cluster, and for other values than true and false (or 1 and 0).

    Departures, for clusters of unequal size: they count as their `effective_number`, and the design effect is at least
    1 + (prompts / that number - 1) * correlation within clusters (Kish's), since a variance over clusters is too small
    where the few large ones happen to be alike.

    Coverage measured by benchmarks/intervals.py for shares of .02 to .5: the interval contains the truth in .91 or more
    of samples of 10 to 150 subjects with 1 or 4 prompts each (in .85 of samples of 5 subjects at a share of .02). Where
    half of the subjects have 10 prompts and half have 1, nine in ten of them alike within a subject, it does so in .85
    or more of samples of 10 to 150 subjects (without the departures in .67 or more). The 4 prompts of a subject are
    correlated by .3. If they are correlated by .9, coverage of small shares is lower: in other simulations, .88 to .91
    for shares of .02 to .05 and 30 to 100 subjects.

    >>> interval = share_interval([True] * 30 + [False] * 10, [f"subject {i}" for i in range(40)])
    >>> print(f"{interval.mean:.2f} [{interval.low:.2f}, {interval.high:.2f}]")
    0.75 [0.59, 0.86]
    """
    _check("hits", hits, (0, 1))
    n, table = len(hits), np.asarray(hits, dtype=float)[:, None]
    check_table(table, np.ones(n), clusters)
    sizes = list(Counter(clusters).values())
    if len(sizes) < 2 or (len(set(hits)) > 1 and not are_enough(sizes)):
        return Interval(float(np.mean(hits)), np.nan, np.nan, n)
    over_clusters, k = cluster_ratios(table, np.ones(n), clusters), effective_number(sizes)
    share, variance = float(over_clusters.ratio[0]), float(over_clusters.error[0]) ** 2
    if share in (0.0, 1.0):
        return Interval(share, *_wilson(share, k, float(stats.norm.ppf(0.975))), n)
    kish = 1 + (n / k - 1) * _alike(hits, clusters)
    design_effect = max(1.0, kish, variance / (share * (1 - share) / (n - 1)))
    quantile = float(stats.t.ppf(0.975, k - 1))
    return Interval(share, *_wilson(share, n / design_effect, quantile), n)


def _check(name: str, values: Sequence[float], expected: tuple[int, ...]) -> None:
    """Raise `DataError` for a value that is not one of those expected."""
    others = [value for value in values if value not in expected]
    if others:
        raise DataError(f"`{name}` must hold {', '.join(map(str, expected))}, got {others[0]!r}")


def _alike(hits: Sequence[bool], clusters: Sequence[str]) -> float:
    """The correlation within clusters: 1 - how often two prompts of a cluster differ, over how often any two would."""
    of = np.unique(clusters, return_inverse=True)[1]
    right, size, share = np.bincount(of, hits), np.bincount(of), float(np.mean(hits))
    pairs = float((size * (size - 1)).sum())
    return 1 - float((2 * right * (size - right)).sum()) / pairs / (2 * share * (1 - share)) if pairs else 0.0


@expects(clusters=[str])
def gain_interval(gained: npt.ArrayLike, clusters: Sequence[str]) -> Interval:
    """The mean of gains in {-1, 0, 1} with its 95% interval, within [-1, 1].

    The mean is the share of gains of 1 minus the share of gains of -1. Each end combines the two shares' intervals
    (`share_interval`) with the correlation of the shares over clusters. Newcombe's method 10 (1998, "Improved
    confidence intervals for the difference between binomial proportions based on paired data") does this for two
    accuracies. If one of the two shares has no interval, there is none (NaN).

    Coverage measured by benchmarks/intervals.py: the interval contains the truth in .94 or more of samples of 5 to 150
    subjects with 1 prompt each. With 5 prompts each, whose answers are 90% alike within a subject, coverage is lower
    where gains are rare and hit whole subjects: for accuracies of .05 and .02, .86 of samples of 50 subjects; for .9
    and .85, .89 of 30 and .91 of 50; for .5 and .3, .93 of 10. With more or fewer subjects it is .94 or more.
    """
    gained = np.asarray(gained)
    _check("gained", gained.ravel().tolist(), (-1, 0, 1))
    won, lost = (share_interval((gained == sign).tolist(), clusters) for sign in (1, -1))
    r = _correlation(gained, clusters)

    def distance(a: float, b: float) -> float:
        return float(np.sqrt(np.maximum(0.0, a * a + b * b - 2 * r * a * b)))

    mean = won.mean - lost.mean
    low = mean - distance(won.mean - won.low, lost.high - lost.mean)
    high = mean + distance(won.high - won.mean, lost.mean - lost.low)
    return Interval(mean, low, high, len(gained)).within(-1.0, 1.0)


def _correlation(gained: npt.NDArray[np.int_], clusters: Sequence[str]) -> float:
    """The correlation, over clusters, of the share of gains of 1 with the share of gains of -1."""
    both = np.stack([gained == 1, gained == -1], axis=1)
    if both.all(axis=0).any():
        return -1.0  # all gains are 1, or all are -1: any other gain would replace one of them
    won, lost = cluster_ratios(both, np.ones(len(both)), clusters).residuals.T
    size = np.sqrt((won @ won) * (lost @ lost))
    return float(won @ lost / size) if size else 0.0


def _wilson(share: float, n: float, quantile: float) -> tuple[float, float]:
    """Wilson's score interval (1927) for a share of `n` independent trials; `quantile` is that of 97.5%."""
    squared = quantile**2
    centre = (share + squared / (2 * n)) / (1 + squared / n)
    half = quantile / (1 + squared / n) * np.sqrt(share * (1 - share) / n + squared / (4 * n * n))
    # rounding must not put a share of 0 or 1 outside its interval
    return float(min(share, max(0.0, centre - half))), float(max(share, min(1.0, centre + half)))
