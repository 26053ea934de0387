"""What a study's fits say of every method: means over seeds with intervals, and beside plain finetuning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from attnbalance.readings.intervals import Interval, ratio_intervals, seed_interval, share_interval
from attnbalance.readings.recall import gain_interval

PLAIN, GAP = "plain", ("top", "bottom")
"""The method that the others are compared with, and the two splits whose difference under it is the gap."""

Result = Mapping[str, Any]
"""One fit's `result.json`."""


@dataclass(frozen=True)
class Row:
    """One method on one split of one world; None where there is nothing to compare with, or no wrong answer.

    `extraction` is the extraction ratio, `stored` the share of right answers among facts that the base completes; `gap`
    is the share of the gap closed, `gain` the accuracy minus plain's on the same split and seeds; `attention` is the
    mean over layers, `quintiles` the accuracy from the most to the least popular fifth. Intervals are over seeds; of a
    single seed the first three, `gain` and `gap` have theirs over facts, by subject, and the others have none.
    """

    world: str
    method: str
    split: str
    seeds: int
    extraction: Interval
    stored: Interval
    accuracy: Interval
    quintiles: tuple[Interval, ...]
    gain: Interval | None
    gap: Interval | None
    shortcut_rate: Interval | None
    attention: Interval
    new_facts: Interval | None
    kept_facts: Interval | None
    drift: Interval

    def as_dict(self) -> dict[str, Any]:
        """The row as JSON."""

        def shown(value: Any) -> Any:
            if isinstance(value, tuple):
                return [shown(one) for one in value]
            return value.as_dict() if isinstance(value, Interval) else value

        return {name: shown(value) for name, value in vars(self).items()}


def rows_of(results: Sequence[Result]) -> list[Row]:
    """One row for each world, split and method, in the order of the results; the same whatever worker made them."""
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for one in results:
        groups.setdefault((one["world"], one["split"], one["method"]), []).append(one)
    return [_row(found, groups) for found in groups.values()]


def _row(found: Sequence[Result], groups: Mapping[tuple[str, str, str], Sequence[Result]]) -> Row:
    world, split, method = (found[0][name] for name in ("world", "split", "method"))
    plain = [] if method == PLAIN else groups.get((world, split, PLAIN), [])
    ends = [] if method == PLAIN else [groups.get((world, half, PLAIN), []) for half in GAP]
    gaps = _paired(found, *ends) if ends else []
    return Row(
        world=world,
        method=method,
        split=split,
        seeds=len(found),
        extraction=_over(found, _extraction, highest=float("inf")),
        stored=_over(found, _stored),
        accuracy=_over(found, _accuracy),
        quintiles=tuple(
            seed_interval([one["accuracy_by_quintile"][i] for one in found]).within(0.0, 1.0)
            for i in range(len(found[0]["accuracy_by_quintile"]))
        ),
        gain=_over(pairs, _gain, -1.0) if (pairs := _paired(found, plain)) else None,
        gap=_gap(gaps) if gaps else None,
        shortcut_rate=_optional(found, "shortcut_rate"),
        attention=seed_interval([float(np.mean(one["subject_attention"])) for one in found]).within(0.0, 1.0),
        new_facts=_optional(found, "new_facts"),
        kept_facts=_optional(found, "kept_facts"),
        drift=seed_interval([one["drift"] for one in found]).within(0.0, float("inf")),
    )


def _over(
    found: Sequence[Any], number: Callable[[Any], Interval], lowest: float = 0.0, highest: float = 1.0
) -> Interval:
    """Over seeds, without what lies outside the values that are possible; over the facts of the only seed."""
    each = [number(one) for one in found]
    return each[0] if len(each) == 1 else seed_interval([one.mean for one in each]).within(lowest, highest)


def _optional(found: Sequence[Result], name: str) -> Interval | None:
    values = [one[name] for one in found if one[name] is not None]
    return seed_interval(values).within(0.0, 1.0) if values else None


def _right(one: Result, name: str = "correct") -> npt.NDArray[np.float64]:
    return np.asarray(one[name], dtype=float)


def _accuracy(one: Result) -> Interval:
    return share_interval(one["correct"], one["subjects"])


def _extraction(one: Result) -> Interval:
    return ratio_intervals(_right(one)[:, None], _right(one, "stated"), one["subjects"])[0]


def _stored(one: Result) -> Interval:
    both = _right(one) * _right(one, "stated")
    return ratio_intervals(both[:, None], _right(one, "stated"), one["subjects"])[0]


def _gain(pair: tuple[Result, Result]) -> Interval:
    one, plain = pair
    return gain_interval((_right(one) - _right(plain)).astype(int), one["subjects"], 0)


def _gap(found: Sequence[tuple[Result, Result, Result]]) -> Interval:
    """The share of the accuracy between plain finetuning on the bottom and on the top half that is made up for.

    The ratio of the sums over seeds (over the facts of a single one), with the interval of `ratio_intervals`, which
    there is for five seeds or more, and only where the gap itself is sure.
    """
    made_up = [_right(one) - _right(bottom) for one, _, bottom in found]
    gap = [_right(top) - _right(bottom) for _, top, bottom in found]
    if len(found) == 1:
        return ratio_intervals(made_up[0][:, None], gap[0], found[0][0]["subjects"])[0]
    seeds = [str(one["seed"]) for one, _, _ in found]
    return ratio_intervals([[part.mean()] for part in made_up], [part.mean() for part in gap], seeds)[0]


def _paired(*groups: Sequence[Result]) -> list[tuple[Any, ...]]:
    """Fits of the same seed, on the same questions, one of each group."""
    by_seed = [{one["seed"]: one for one in group} for group in groups]
    shared = [seed for seed in by_seed[0] if all(seed in known for known in by_seed[1:])]
    found = [tuple(known[seed] for known in by_seed) for seed in shared] if len(groups) > 1 else []
    return [same for same in found if all(one["prompt_ids"] == same[0]["prompt_ids"] for one in same)]
