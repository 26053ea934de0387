"""Progress: a bar on a terminal and in a notebook; elsewhere a plain line now and then, for logs of batch jobs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

EVERY = 30.0
"""Seconds between two lines, of all bars together; the first comes this long after the first bar began."""

LINE = "{desc}: {n_fmt} of {total_fmt}, {elapsed} elapsed, about {remaining} left"


class _Lines:
    """Takes what tqdm would draw, and writes it to stderr as whole lines, at most one every `EVERY` seconds."""

    def __init__(self) -> None:
        self._due: float | None = None

    def write(self, drawn: str) -> None:
        """Write a line if one is due; what tqdm draws to move the cursor or clear a bar is none."""
        line, now = drawn.replace("\x1b[A", "").strip(), time.monotonic()
        if not line:
            return
        if self._due is None:
            self._due = now + EVERY
        elif now >= self._due:
            self._due = now + EVERY
            print(line, file=sys.stderr, flush=True)

    def flush(self) -> None:
        """Nothing: lines are flushed as they are written."""


_LINES = _Lines()


def progress_bar(
    title: str,
    *,
    shown: bool,
    items: Iterable[Any] | None = None,
    total: int | None = None,
    unit: str = "it",
    initial: int = 0,
    leave: bool = False,
) -> tqdm:
    """A progress bar; where output is no terminal and no notebook, a line on stderr at most every `EVERY` seconds.

    Neither is shown if the environment sets TQDM_DISABLE=1, as with every bar of tqdm.

    title: what is done.
    shown: whether to show anything.
    items: what to iterate over; None: the caller counts with `update`.
    total: how many there are; by default as many as `items` holds.
    unit: what is counted.
    initial: how many are done already.
    leave: whether the bar stays when it is full; lines always do.
    """
    how: dict[str, Any] = {"desc": title, "total": total, "unit": unit, "initial": initial}
    if not shown:
        return tqdm(items, **how, disable=True)
    if sys.stderr.isatty() or "ipykernel" in sys.modules:
        return tqdm(items, **how, leave=leave, dynamic_ncols=True)
    return tqdm(items, **how, leave=False, file=_LINES, bar_format=LINE, mininterval=0, miniters=1)
