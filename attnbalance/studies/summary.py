"""The summary of a study: each method's means over seeds with intervals, and its gain over plain finetuning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import numpy as np
import numpy.typing as npt

from attnbalance.arguments import Kind
from attnbalance.statistics.intervals import Interval, ratio_intervals, seed_interval
from attnbalance.statistics.shares import gain_interval, share_interval

PLAIN, GAP = "plain", ("top", "bottom")
"""The method that others are compared with, and the two splits whose difference is the gap."""

FitResult = Mapping[str, Any]
"""One fit's `result.json`."""


FIELDS: dict[str, Kind] = {
    "world": str,
    "split": str,
    "method": str,
    "seed": int,
    "prompt_ids": [str],
    "subjects": [str],
    "correct": [bool],
    "stated": [bool],
    "accuracy_by_quintile": [float],
    "shortcut_rate": (float, NoneType),
    "subject_attention": [float],
    "new_facts": (float, NoneType),
    "kept_facts": (float, NoneType),
    "drift": float,
}
"""What the summary reads of one fit's `result.json`, by name."""


@dataclass(frozen=True)
class StudyRow:
    """One method on one split of one world; None where there is nothing to compare with, or no wrong answer.

    Intervals are over seeds. With a single seed, `kept`, `accuracy` and `gain` have intervals over facts, clustered by
    subject, and the others have none. Controls that train nothing have no `attention`, `new_facts`,
    `kept_facts` and `drift`. These and `shortcut_rate` are means over the seeds that have a value; their `n` is the
    number of those seeds.

    world: the world.
    method: the method, or a control.
    split: what it was trained on.
    seeds: number of seeds.
    extraction: the extraction ratio, right answers over facts that the base completes.
    kept: share of right answers among the held-out facts that the base completes.
    accuracy: share of right answers among all held-out facts.
    quintiles: accuracy on each fifth, from the most to the least popular.
    gain: accuracy minus that of plain finetuning on the same split and seeds.
    gap: share of the gap between the two splits of `GAP` that the method closes.
    shortcut_rate: share of wrong answers that are the shortcut, among those about relations that are trained.
    attention: subject attention, mean over layers.
    new_facts: share of right answers among the training facts that the base does not complete.
    kept_facts: share of right answers among the training facts that the base completes.
    drift: divergence from the base on statements of the world, nats per token.
    """

    world: str
    method: str
    split: str
    seeds: int
    extraction: Interval
    kept: Interval
    accuracy: Interval
    quintiles: tuple[Interval, ...]
    gain: Interval | None
    gap: Interval | None
    shortcut_rate: Interval | None
    attention: Interval | None
    new_facts: Interval | None
    kept_facts: Interval | None
    drift: Interval | None

    def as_dict(self) -> dict[str, Any]:
        """The row as JSON."""
        return _as_dict(self)


@dataclass(frozen=True)
class SplitContrast:
    """FT-Top minus FT-Bottom under one method: what it is worth to train on popular facts (Ghosal et al. 2024).

    The fits of each seed are paired by held-out question. Intervals are over seeds. With a single seed, `accuracy` has
    an interval over facts, clustered by subject, and the others have none.

    world: the world.
    method: the method, or a control.
    seeds: number of seeds that have both fits.
    accuracy: difference of the shares of right answers among all held-out facts.
    quintiles: the same on each fifth, from the most to the least popular.
    attention: difference in subject attention, mean over layers; None for controls, which train nothing.
    """

    world: str
    method: str
    seeds: int
    accuracy: Interval
    quintiles: tuple[Interval, ...]
    attention: Interval | None

    def as_dict(self) -> dict[str, Any]:
        """The contrast as JSON."""
        return _as_dict(self)


def _as_dict(row: StudyRow | SplitContrast) -> dict[str, Any]:
    def shown(value: Any) -> Any:
        if isinstance(value, tuple):
            return [shown(item) for item in value]
        return value.as_dict() if isinstance(value, Interval) else value

    return {name: shown(value) for name, value in vars(row).items()}


def study_rows(results: Sequence[FitResult]) -> list[StudyRow]:
    """One row for each world, split and method, in the order of the results."""
    groups = fits_by_row(results)
    return [_row(fits, groups) for fits in groups.values()]


def split_contrasts(results: Sequence[FitResult]) -> list[SplitContrast]:
    """One contrast for each world and method that has fits on both splits of `GAP`, in the order of the results.

    Controls that give the same answers on both are left out.
    """
    groups, contrasts = fits_by_row(results), list[SplitContrast]()
    for world, method in dict.fromkeys((world, method) for world, _, method in groups):
        pairs = _paired(*(groups.get((world, split, method), []) for split in GAP))
        if any(top["subject_attention"] or top["correct"] != bottom["correct"] for top, bottom in pairs):
            contrasts.append(_contrast(world, method, pairs))
    return contrasts


def _contrast(world: str, method: str, pairs: Sequence[tuple[FitResult, FitResult]]) -> SplitContrast:
    def difference(name: str, index: int | None = None) -> Interval:
        values = [[np.mean(fit[name] if index is None else fit[name][index]) for fit in pair] for pair in pairs]
        return seed_interval([float(top - bottom) for top, bottom in values]).within(-1.0, 1.0)

    fits = [fit for pair in pairs for fit in pair]
    return SplitContrast(
        world=world,
        method=method,
        seeds=len(pairs),
        accuracy=_over(pairs, _gain, -1.0),
        quintiles=tuple(difference("accuracy_by_quintile", fifth) for fifth in _shared_fifths(fits)),
        attention=None if any(fit["subject_attention"] is None for fit in fits) else difference("subject_attention"),
    )


def fits_by_row(results: Sequence[FitResult]) -> dict[tuple[str, str, str], list[FitResult]]:
    """The fits by world, split and method."""
    groups: dict[tuple[str, str, str], list[FitResult]] = {}
    for fit in results:
        groups.setdefault((fit["world"], fit["split"], fit["method"]), []).append(fit)
    return groups


def _shared_fifths(fits: Sequence[FitResult]) -> range:
    """The fifths; none where the popularity of fewer than five held-out facts is known in a seed."""
    counts = {len(fit["accuracy_by_quintile"]) for fit in fits}
    return range(5 if counts == {5} else 0)


def _row(fits: Sequence[FitResult], groups: Mapping[tuple[str, str, str], Sequence[FitResult]]) -> StudyRow:
    world, split, method = (fits[0][name] for name in ("world", "split", "method"))
    plain = [] if method == PLAIN else groups.get((world, split, PLAIN), [])
    ends = [] if method == PLAIN else [groups.get((world, half, PLAIN), []) for half in GAP]
    gaps = _paired(fits, *ends) if ends else []
    return StudyRow(
        world=world,
        method=method,
        split=split,
        seeds=len(fits),
        extraction=_over(fits, _extraction, highest=float("inf")),
        kept=_over(fits, _kept),
        accuracy=_over(fits, _accuracy),
        quintiles=tuple(
            seed_interval([fit["accuracy_by_quintile"][i] for fit in fits]).within(0.0, 1.0)
            for i in _shared_fifths(fits)
        ),
        gain=_over(pairs, _gain, -1.0) if (pairs := _paired(fits, plain)) else None,
        gap=_gap(gaps) if gaps else None,
        shortcut_rate=_optional(fits, "shortcut_rate"),
        attention=_optional([{"attention": _mean(fit["subject_attention"])} for fit in fits], "attention"),
        new_facts=_optional(fits, "new_facts"),
        kept_facts=_optional(fits, "kept_facts"),
        drift=_optional(fits, "drift", highest=float("inf")),
    )


def _over(
    fits: Sequence[Any], interval: Callable[[Any], Interval], lowest: float = 0.0, highest: float = 1.0
) -> Interval:
    """The interval over seeds, within the possible values; of a single seed, that over its facts."""
    intervals = [interval(fit) for fit in fits]
    if len(intervals) == 1:
        return intervals[0].within(lowest, highest)
    return seed_interval([each.mean for each in intervals]).within(lowest, highest)


def _optional(fits: Sequence[Mapping[str, Any]], name: str, highest: float = 1.0) -> Interval | None:
    values = [fit[name] for fit in fits if fit[name] is not None]
    return seed_interval(values).within(0.0, highest) if values else None


def _mean(values: Sequence[float] | None) -> float | None:
    return None if values is None else float(np.mean(values))


def _right(fit: FitResult, name: str = "correct") -> npt.NDArray[np.float64]:
    return np.asarray(fit[name], dtype=float)


def _accuracy(fit: FitResult) -> Interval:
    return share_interval(fit["correct"], fit["subjects"])


def _extraction(fit: FitResult) -> Interval:
    completed = int(_right(fit, "stated").sum())
    ratio = _right(fit).sum() / completed if completed else np.nan
    return Interval(float(ratio), np.nan, np.nan, len(fit["correct"]))


def _kept(fit: FitResult) -> Interval:
    stated = [i for i, completed in enumerate(fit["stated"]) if completed]
    if not stated:
        return Interval(np.nan, np.nan, np.nan, 0)
    return share_interval([fit["correct"][i] for i in stated], [fit["subjects"][i] for i in stated])


def _gain(pair: tuple[FitResult, FitResult]) -> Interval:
    fit, plain = pair
    return gain_interval((_right(fit) - _right(plain)).astype(int), fit["subjects"])


def _gap(paired: Sequence[tuple[FitResult, FitResult, FitResult]]) -> Interval:
    """The share of the gap in accuracy between plain finetuning on the bottom and on the top half that is closed.

    It is the ratio of the sums over seeds. `ratio_intervals` gives an interval for five seeds or more, if the gap
    itself differs from zero.
    """
    closed = [(_right(fit) - _right(bottom)).mean() for fit, _, bottom in paired]
    gap = [(_right(top) - _right(bottom)).mean() for _, top, bottom in paired]
    seeds = [str(fit["seed"]) for fit, _, _ in paired]
    return ratio_intervals([[part] for part in closed], gap, seeds)[0]


def _paired(*groups: Sequence[FitResult]) -> list[tuple[Any, ...]]:
    """Fits of the same seed, on the same questions, one of each group."""
    by_seed = [{fit["seed"]: fit for fit in group} for group in groups]
    shared = [seed for seed in by_seed[0] if all(seed in fits for fits in by_seed[1:])]
    joined = [tuple(fits[seed] for fits in by_seed) for seed in shared] if len(groups) > 1 else []
    return [fits for fits in joined if all(fit["prompt_ids"] == fits[0]["prompt_ids"] for fit in fits)]
