"""Curricula: the order in which finetuning meets its facts, step by step, decided before it begins."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from attnbalance.errors import DataError

CURRICULA = ("shuffled", "popular-first", "obscure-first", "popular-last", "popular-share")
"""The kinds of curriculum; the last is followed by a share: "popular-share=0.8"."""

START, FULL = 0.2, 0.5
"""A growing pool begins with this share of the facts and holds all after this share of the steps."""

LATE, PATCH = 0.5, 0.5
"""popular-last: from this share of the steps on, this share of each batch comes from the popular half."""


def check_curriculum(text: str) -> tuple[str, float]:
    """The kind of a curriculum, and the share that goes with it (NaN where none does).

    Raises `DataError` for another kind and for a share outside (0, 1).
    """
    match = re.fullmatch(r"(popular-share)=([0-9]*\.?[0-9]+)", text.strip())
    if match and 0 < float(match[2]) < 1:
        return match[1], float(match[2])
    if text in CURRICULA[:-1]:
        return text, float("nan")
    raise DataError(
        f"no curriculum {text!r}; there are {', '.join(CURRICULA[:-1])} and popular-share=SHARE, between 0 and 1"
    )


def changes_on_the_way(curriculum: str) -> bool:
    """Whether a curriculum offers other facts late than early."""
    return check_curriculum(curriculum)[0] in ("popular-first", "obscure-first", "popular-last")


def order(ranks: Sequence[float], steps: int, batch_size: int, seed: int, curriculum: str = "shuffled") -> list[int]:
    """The places of the facts to train on: `steps` batches of `batch_size`, one behind the other; the seed decides.

    `ranks`, one a fact, are higher for facts that are more popular, or known better (see `rank_facts`); ties are broken
    by place. A pool is gone through in one seeded shuffle after another, so that none of it comes up twice in a round;
    one that grows is shuffled anew.

    - shuffled: all facts at any time.
    - popular-first: a pool that grows from the most popular `START` of the facts to all at `FULL` of the steps.
    - obscure-first: the reverse, as a control.
    - popular-last: all facts; from `LATE` of the steps on, `PATCH` of every batch is drawn from the more popular half
      ("known" examples patched in late; Ghosal et al. 2024 leave the question open).
    - popular-share=P: a share P of every batch from the more popular half, the rest from the other.

    Raises `DataError` for no facts, sizes below 1, and what `check_curriculum` refuses.
    """
    kind, share = check_curriculum(curriculum)
    if not len(ranks) or steps < 1 or batch_size < 1:
        raise DataError(f"a curriculum needs facts, steps and a batch size; got {len(ranks)}, {steps} and {batch_size}")
    by_rank = sorted(range(len(ranks)), key=lambda i: -ranks[i])
    everything, middle = list(range(len(ranks))), (len(ranks) + 1) // 2
    rng = random.Random(seed)  # noqa: S311
    if kind == "shuffled":
        return _Rounds(everything, rng).take(steps * batch_size)
    if kind.endswith("-first"):
        ranked = by_rank if kind == "popular-first" else by_rank[::-1]
        return _growing(ranked, steps, batch_size, rng)
    top, bottom = _Rounds(by_rank[:middle], rng), _Rounds(by_rank[middle:] or by_rank, rng)
    whole, result = _Rounds(everything, rng), list[int]()
    for step in range(steps):
        wanted = (share if kind == "popular-share" else PATCH) * batch_size
        popular = int(wanted * (step + 1) + 0.5) - int(wanted * step + 0.5)  # what is rounded off comes a batch later
        if kind == "popular-share":
            batch = top.take(popular) + bottom.take(batch_size - popular)
        else:
            popular = popular if step >= LATE * steps else 0
            batch = top.take(popular) + whole.take(batch_size - popular)
        result += rng.sample(batch, batch_size)
    return result


def _growing(ranked: Sequence[int], steps: int, batch_size: int, rng: random.Random) -> list[int]:
    """Batches from the first of the ranked facts, of which more and more are used."""
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
