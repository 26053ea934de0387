"""How often intervals hold the truth: `python benchmarks/intervals.py [--trials 400] [--readings PATH]`.

Samples are drawn from populations whose means are known, and each is given to the library. For means of 30 layers:
`one layer` is the share of a layer's own intervals that hold its mean (wanted: .95), `any missed` the share of samples
in which some simultaneous interval does not (wanted: .05), `widths` the median full width of both kinds, in standard
errors. Below: shares, gains, ratios and rank correlations; and how long 2,000 prompts take.

`--readings` adds populations of real prompts: each model of a `readings.parquet` that `attnbalance curve` wrote
(prompts.jsonl lies beside), and the paired difference of its first two. Subjects are drawn with replacement, with all
their prompts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import stats

from attnbalance.files.outputs import provenance
from attnbalance.statistics.intervals import Interval, mean_intervals, rank_correlations, ratio_intervals
from attnbalance.statistics.shares import gain_interval, share_interval

Array = npt.NDArray[np.float64]
SUBJECTS = (5, 10, 20, 30, 50, 150)
LAYERS = 30


@dataclass(frozen=True)
class Population:
    """`draw(subjects, rng)` gives values [prompt, layer] and each prompt's subject; `mean` [layer] is the truth."""

    name: str
    draw: Callable[[int, np.random.Generator], tuple[Array, list[str]]]
    mean: Array


def simulated(
    name: str, values: Callable[[Array], Array], mean: float, shared: float = 0.0, prompts: int = 1, third: bool = False
) -> Population:
    """Layers of one distribution, `values` of normal scores; `shared` is the correlation of two layers' scores.

    Of `prompts` a subject on average (geometric), two share half of their scores' variance. With `third`, the first
    subject has a third of all prompts, all of one value.
    """

    def draw(subjects: int, rng: np.random.Generator) -> tuple[Array, list[str]]:
        counts = rng.geometric(1 / prompts, subjects)
        if third:
            counts[0] = counts[1:].sum() // 2
        of = np.repeat(np.arange(subjects), counts)

        def scores(n: int) -> Array:
            return np.sqrt(1 - shared) * rng.normal(size=(n, LAYERS)) + np.sqrt(shared) * rng.normal(size=(n, 1))

        own = scores(subjects)[of]
        z = own if prompts == 1 else (scores(len(of)) + own) / np.sqrt(2)
        return values(z), [str(i) for i in of]

    return Population(name, draw, np.full(LAYERS, mean))


def real(path: Path) -> Iterator[Population]:
    table = pd.read_parquet(path)
    prompts = pd.read_json(path.parent / "prompts.jsonl", lines=True)
    subject = {one["prompt_id"]: one["subject"] for one in prompts.to_dict("records")}
    means = table.pivot_table("value", ["label", "prompt_id"], "layer", observed=True)
    labels = list(dict.fromkeys(table["label"]))
    tables = {label: means.loc[label] for label in labels}
    if len(labels) > 1:
        a, b = labels[:2]
        tables[f"{a} - {b}"] = tables[a] - tables[b].loc[tables[a].index]
    for label, one in tables.items():
        groups = [group.to_numpy() for _, group in one.groupby([subject[i] for i in one.index])]

        def draw(subjects: int, rng: np.random.Generator, groups: Sequence[Array] = groups) -> tuple[Array, list[str]]:
            drawn = [groups[i] for i in rng.integers(0, len(groups), subjects)]
            return np.concatenate(drawn), [str(i) for i, group in enumerate(drawn) for _ in group]

        yield Population(label, draw, one.to_numpy().mean(axis=0))


def misses(intervals: Sequence[Interval], truth: Array) -> Array:
    return np.array([not one.low <= mean <= one.high for one, mean in zip(intervals, truth, strict=True)])


def widths(intervals: Sequence[Interval], values: Array, of: Sequence[str]) -> float:
    """The median width in standard errors over subjects, counted as if each had as many prompts."""
    _, inverse = np.unique(of, return_inverse=True)
    n = int(inverse.max()) + 1
    residuals = np.stack([np.bincount(inverse, column, n) for column in (values - values.mean(axis=0)).T], axis=1)
    errors = np.sqrt(n / (n - 1) * (residuals**2).sum(axis=0)) / len(values)
    return float(np.median([one.high - one.low for one in intervals] / errors))


def print_means(populations: Sequence[Population], trials: int) -> None:
    print("\nmeans                              subjects  one layer  any missed  widths")
    for population in populations:
        for subjects in SUBJECTS:
            rng, told = np.random.default_rng(subjects), []
            for seed in range(trials):
                values, of = population.draw(subjects, rng)
                alone = mean_intervals(values, of, seed=seed)
                together = mean_intervals(values, of, simultaneous=True, seed=seed)
                told.append(
                    (
                        1 - misses(alone, population.mean).mean(),
                        misses(together, population.mean).any(),
                        widths(alone, values, of),
                        widths(together, values, of),
                    )
                )
            one, any_missed, narrow, wide = np.mean(told, axis=0)
            print(
                f"{population.name:34} {subjects:8} {one:10.3f} {any_missed:11.3f}  {narrow:5.1f} {wide:5.1f}",
                flush=True,
            )


def print_shares(trials: int) -> None:
    """Shares, with 1 prompt a subject, 4 that go together (correlation .3), 10 or 1 (.9); gains, with 1 and 5 (.9)."""
    print("\nshares and gains                   subjects  covered")
    for prompts in (1, 4):
        for truth in (0.02, 0.1, 0.5):
            for subjects in SUBJECTS:
                rng, held = np.random.default_rng(subjects), []
                of = [str(i // prompts) for i in range(prompts * subjects)]
                for _ in range(trials):
                    rate = truth if prompts == 1 else rng.beta(truth * 7 / 3, (1 - truth) * 7 / 3, subjects)
                    hits = rng.random((prompts, subjects)).T.ravel() < np.repeat(rate, prompts if prompts > 1 else 1)
                    held.append(not misses([share_interval(hits.tolist(), of)], np.array([truth]))[0])
                print(f"{f'share {truth:g}, {prompts} a subject':34} {subjects:8} {np.mean(held):8.3f}", flush=True)
    for truth in (0.05, 0.3):
        for subjects in SUBJECTS[1:]:  # 5 are two large ones and three small, which have no interval
            rng, held, of = (
                np.random.default_rng(subjects),
                [],
                np.repeat(np.arange(subjects), [10, 1] * (subjects // 2)),
            )
            for _ in range(trials):
                alike = (rng.random(subjects) < truth)[of]
                hits = np.where(rng.random(len(of)) < 0.9, alike, rng.random(len(of)) < truth)
                held.append(not misses([share_interval(hits.tolist(), [str(i) for i in of])], np.array([truth]))[0])
            print(f"{f'share {truth:g}, 10 or 1 a subject':34} {subjects:8} {np.mean(held):8.3f}", flush=True)
    for won, lost in ((0.02, 0.0), (0.1, 0.02), (0.3, 0.05), (0.3, 0.3)):
        for subjects in SUBJECTS:
            rng, held = np.random.default_rng(subjects), []
            for _ in range(trials):
                gained = rng.choice([1, -1, 0], p=[won, lost, 1 - won - lost], size=subjects)
                interval = gain_interval(gained, [str(i) for i in range(subjects)])
                held.append(interval.low - 1e-12 <= won - lost <= interval.high + 1e-12)
            print(f"{f'gain {won:g} - {lost:g}':34} {subjects:8} {np.mean(held):8.3f}", flush=True)
    for high, low in ((0.05, 0.02), (0.9, 0.85), (0.5, 0.3)):
        for subjects in SUBJECTS:
            rng, held, of = np.random.default_rng(subjects), [], np.repeat(np.arange(subjects), 5)
            for _ in range(trials):
                a = np.where(rng.random(len(of)) < 0.9, rng.random(subjects)[of], rng.random(len(of)))
                b = np.where(rng.random(len(of)) < 0.9, a, rng.random(len(of)))
                interval = gain_interval((a < high).astype(int) - (b < low), [str(i) for i in of])
                held += [] if np.isnan(interval.low) else [interval.low <= high - low <= interval.high]
            print(f"{f'gain {high:g} - {low:g}, 5 a subject':34} {subjects:8} {np.mean(held):8.3f}", flush=True)


def print_ratios(trials: int) -> None:
    """Shares of a total; two shares of right answers (half of all facts are stated, .6 of these answered)."""
    print("\nratios (where the total is sure)   subjects  covered    given")
    for name in ("skewed part of a total", "extraction ratio"):
        for subjects in SUBJECTS:
            rng, held = np.random.default_rng(subjects), []
            for seed in range(trials):
                if name == "extraction ratio":
                    total = (rng.random(subjects) < 0.5).astype(float)
                    part, truth = (rng.random(subjects) < np.where(total, 0.6, 0.1)).astype(float), 0.7
                else:
                    total = rng.lognormal(size=subjects)
                    part, truth = 0.7 * total + rng.exponential(size=subjects) - 1, 0.7
                (share,) = ratio_intervals(part[:, None], total, [str(i) for i in range(subjects)], seed=seed)
                held += [share.low <= truth <= share.high] if not np.isnan(share.low) else []
            print(f"{name:34} {subjects:8} {np.mean(held or [np.nan]):8.3f} {len(held) / trials:8.2f}", flush=True)


def print_correlations(trials: int) -> None:
    print("\nrank correlations                  subjects  one layer  any missed")
    for rho in (0.0, 0.6):
        truth = np.full(LAYERS, 6 / np.pi * np.arcsin(rho / 2))
        for subjects in SUBJECTS[1:]:  # 5 have no interval
            rng, told = np.random.default_rng(subjects), []
            for seed in range(trials):
                y = rng.normal(size=subjects)
                x = rho * y[:, None] + np.sqrt(1 - rho**2) * rng.normal(size=(subjects, LAYERS))
                of = [str(i) for i in range(subjects)]
                alone = rank_correlations(x, y, of, seed=seed)
                together = rank_correlations(x, y, of, simultaneous=True, seed=seed)
                told.append((1 - misses(alone, truth).mean(), misses(together, truth).any()))
            one, any_missed = np.mean(told, axis=0)
            print(f"{f'Spearman, normal scores {rho:g}':34} {subjects:8} {one:10.3f} {any_missed:11.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trials", type=int, default=400)
    parser.add_argument("--readings", type=Path)
    chosen = parser.parse_args()

    def beta(z: Array) -> Array:
        return stats.beta.ppf(stats.norm.cdf(z), 0.5, 8)

    populations = [
        simulated("normal", lambda z: z, 0.0),
        simulated("Beta(.5, 8)", beta, 0.5 / 8.5),
        simulated("Beta(.5, 8), layers correlated .7", beta, 0.5 / 8.5, shared=0.7),
        simulated("Beta(.5, 8), 3 prompts a subject", beta, 0.5 / 8.5, prompts=3),
        simulated("Beta(.5, 8), a subject with a third", beta, 0.5 / 8.5, third=True),
        simulated("lognormal", np.exp, float(np.exp(0.5))),
        simulated("lognormal, a subject with a third", np.exp, float(np.exp(0.5)), third=True),
        simulated("lognormal, layers correlated .7", np.exp, float(np.exp(0.5)), shared=0.7),
        *(real(chosen.readings) if chosen.readings else ()),
    ]
    print("versions:", provenance()["versions"])
    values = np.random.default_rng(0).normal(size=(2000, LAYERS))
    began = time.perf_counter()
    mean_intervals(values, [str(i) for i in range(2000)], simultaneous=True)
    print(f"2,000 prompts x {LAYERS} layers: {time.perf_counter() - began:.2f} s")
    print(
        f"{chosen.trials} samples a line; the standard error of a share of .05 is {np.sqrt(0.0475 / chosen.trials):.3f}"
    )
    print_means(populations, chosen.trials)
    print_shares(chosen.trials)
    print_ratios(chosen.trials)
    print_correlations(chosen.trials)


if __name__ == "__main__":
    main()
