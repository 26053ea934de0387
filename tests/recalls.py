"""Recalls of made-up answers."""

from __future__ import annotations

from attnbalance.data.scoring import SCORINGS
from attnbalance.readings.recall import Recall


def a_recall(correct, *, popularity=None, subjects=None, shortcut=None):
    n = len(correct)
    ids = tuple(f"p{i}" for i in range(n))
    return Recall(
        ids,
        tuple(subjects or ids),
        tuple(popularity or [None] * n),
        ("x",) * n,
        dict.fromkeys(SCORINGS, tuple(correct)),
        tuple(map(float, correct)),
        tuple(shortcut or [False] * n),
    )
