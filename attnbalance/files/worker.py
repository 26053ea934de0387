"""Which part of the work one of several processes or machines does."""

from __future__ import annotations

import os
import re

from attnbalance.errors import DataError


def parse_worker(text: str | None) -> tuple[int, int]:
    """Index and number of workers, from "I/N" or, for None, from Slurm's array index; by default (0, 1)."""
    if text is None:
        if "SLURM_ARRAY_TASK_ID" not in os.environ:
            return 0, 1
        values = [os.environ.get(f"SLURM_ARRAY_TASK_{name}", "1") for name in ("ID", "MIN", "STEP", "COUNT")]
        if not all(re.fullmatch(r"\d{1,9}", value, re.ASCII) for value in values):
            raise DataError(f"Slurm's array index must be whole numbers (ID, MIN, STEP, COUNT), got {values}")
        index, first, step, count = map(int, values)
        text = f"{(index - first) // max(1, step)}/{count}"
    parts = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII)
    if not parts or int(parts[1]) >= int(parts[2]):
        raise DataError(f"expected a worker as I/N with I from 0 to N - 1, got {text!r}")
    return int(parts[1]), int(parts[2])
