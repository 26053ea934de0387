"""Curricula: the order in which finetuning reads its facts, decided before it begins."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from attnbalance.errors import DataError
from attnbalance.finetuning.splits import warn_of_ties

CURRICULA = ("shuffled", "popular-first", "obscure-first", "popular-last", "popular-share")
"""The kinds of curriculum; the last is followed by a share: "popular-share=0.8"."""

MOST_EXAMPLES = 100_000_000
"""Each takes 8 bytes, in pretraining the text of a statement."""

START, FULL = 0.2, 0.5
"""A growing pool begins with the share `START` of the facts and holds all after the share `FULL` of the steps."""

LATE, PATCH = 0.5, 0.5
"""popular-last: from the share `LATE` of the steps on, the share `PATCH` of each batch is from the popular half."""


def check_curriculum(text: str) -> tuple[str, float]:
    """The kind of a curriculum, and its share (NaN if it has none).

    Raises `DataError` for another kind and for a share outside (0, 1).

    >>> check_curriculum("popular-share=0.8")
    ('popular-share', 0.8)
    """
    match = re.fullmatch(r"(popular-share)=([0-9]*\.?[0-9]+)", text.strip())
    if match and 0 < float(match[2]) < 1:
        return match[1], float(match[2])
    if text in CURRICULA[:-1]:
        return text, float("nan")
    raise DataError(
        f"no curriculum {text!r}; there are {', '.join(CURRICULA[:-1])} and popular-share=SHARE, SHARE between 0 and 1"
    )


def check_examples(steps: int, batch_size: int) -> None:
    """Raise `DataError` for more examples than can be ordered before training begins."""
    if steps * batch_size > MOST_EXAMPLES:
        raise DataError(
            f"steps x batch_size must be at most {MOST_EXAMPLES:,} examples, got {steps:,} x {batch_size:,}; train for "
            "fewer steps"
        )


def changes_over_time(curriculum: str) -> bool:
    """Whether a curriculum offers other facts late than early.

    >>> changes_over_time("popular-first"), changes_over_time("shuffled")
    (True, False)
    """
    return check_curriculum(curriculum)[0] in ("popular-first", "obscure-first", "popular-last")


def order(ranks: Sequence[float], steps: int, batch_size: int, seed: int, curriculum: str = "shuffled") -> list[int]:
    """The indices of the facts to train on: `steps` batches of `batch_size`, concatenated.

    A pool of facts is read in one seeded shuffle after another, so that none of it comes twice in a round; a pool that
    grows is shuffled anew.

    - shuffled: all facts at any time.
    - popular-first: a pool that grows from the most popular `START` of the facts to all at `FULL` of the steps.
    - obscure-first: the reverse, as a control.
    - popular-last: all facts; from `LATE` of the steps on, `PATCH` of every batch is drawn from the more popular half
      ("known" examples patched in late; Ghosal et al. 2024 leave the question open).
    - popular-share=P: a share P of every batch from the more popular half, the rest from the other.

    Raises `DataError` for no facts, sizes below 1, and what `check_curriculum` refuses.

    Args:
        ranks: One for each fact, higher for facts that are more popular or known better (see `rank_facts`); ties are
            broken at random, with a warning if there are many.
        steps: The number of batches.
        batch_size: The number of facts in each.
        seed: Seed of all shuffles.
        curriculum: One of `CURRICULA`.

    >>> sorted(order([3.0, 1.0, 2.0], steps=1, batch_size=3, seed=0))
    [0, 1, 2]
    """
    kind, share = check_curriculum(curriculum)
    if not len(ranks) or steps < 1 or batch_size < 1:
        raise DataError(
            f"a curriculum needs at least 1 fact, step and batch_size, got {len(ranks)}, {steps} and {batch_size}"
        )
    shuffled = random.Random(seed + 1).sample(range(len(ranks)), len(ranks))  # noqa: S311
    by_rank = sorted(shuffled, key=lambda i: -ranks[i])
    everything, middle = list(range(len(ranks))), (len(ranks) + 1) // 2
    rng = random.Random(seed)  # noqa: S311
    if kind == "shuffled":
        return _Rounds(everything, rng).take(steps * batch_size)
    more, less = by_rank[:middle], by_rank[middle:]
    warn_of_ties(f"the popular half of curriculum {curriculum}", [ranks[i] for i in more], {ranks[i] for i in less})
    if kind.endswith("-first"):
        ranked = by_rank if kind == "popular-first" else by_rank[::-1]
        return _growing(ranked, steps, batch_size, rng)
    rest, share, start = (less or by_rank, share, 0) if kind == "popular-share" else (everything, PATCH, LATE * steps)
    return _mixed(more, rest, [share if step >= start else 0.0 for step in range(steps)], batch_size, rng)


def mixed_order(
    first: Sequence[int], rest: Sequence[int], share: float, steps: int, batch_size: int, seed: int
) -> list[int]:
    """The indices of the facts to train on, as `order`: a share of every batch from `first`, the others from `rest`.

    Each pool is read in one seeded shuffle after another. What rounding leaves over comes a batch later.

    >>> [i >= 0 for i in mixed_order([1, 2, 3], [-1, -2], 0.25, steps=2, batch_size=2, seed=0)].count(True)
    1
    """
    return _mixed(first, rest, [share] * steps, batch_size, random.Random(seed))  # noqa: S311


def _mixed(
    first: Sequence[int], rest: Sequence[int], shares: Sequence[float], batch_size: int, rng: random.Random
) -> list[int]:
    """Batches of which a share, given for each step, is from the first pool."""
    pools, result = (_Rounds(first, rng), _Rounds(rest, rng)), list[int]()
    for step, share in enumerate(shares):
        wanted = share * batch_size
        count = int(wanted * (step + 1) + 0.5) - int(wanted * step + 0.5)
        result += rng.sample(pools[0].take(count) + pools[1].take(batch_size - count), batch_size)
    return result


def _growing(ranked: Sequence[int], steps: int, batch_size: int, rng: random.Random) -> list[int]:
    """Batches from the first of the ranked facts; more and more of them are used."""
    result, size, pool = list[int](), 0, _Rounds(list(ranked), rng)
    for step in range(steps):
        grown = START + (1 - START) * min(1.0, step / max(1, FULL * steps))
        wanted = max(1, round(grown * len(ranked)))
        if wanted != size:
            size, pool = wanted, _Rounds(list(ranked[:wanted]), rng)
        result += pool.take(batch_size)
    return result


class _Rounds:
    """Facts in one shuffle after another."""

    def __init__(self, facts: Sequence[int], rng: random.Random) -> None:
        self.facts, self.rng = facts, rng
        self.left: list[int] = []

    def take(self, count: int) -> list[int]:
        """The next `count` facts."""
        while len(self.left) < count:
            self.left += self.rng.sample(self.facts, len(self.facts))
        taken, self.left = self.left[:count], self.left[count:]
        return taken
