"""Seeds in the range that every generator of random numbers here takes."""

from __future__ import annotations

from attnbalance.errors import DataError

LARGEST_SEED = 2**32 - 1
"""The largest seed of NumPy, and so of transformers' `set_seed`."""


def check_seed(seed: int) -> int:
    """The seed itself; raises `DataError` for anything but an integer from 0 to `LARGEST_SEED`.

    >>> check_seed(7)
    7
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise DataError(f"seed must be an integer from 0 to {LARGEST_SEED}, got {seed!r}; pass a Python int")
    if not 0 <= seed <= LARGEST_SEED:
        got = seed if abs(seed) < 10**100 else "a number of many digits"
        raise DataError(f"seed must be an integer from 0 to {LARGEST_SEED}, got {got}")
    return seed
