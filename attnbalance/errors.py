"""The few kinds of error raised on purpose; each message says what was expected, what came, what to do."""

from __future__ import annotations

from collections.abc import Sequence


class AttnBalanceError(Exception):
    """Anything that a user can put right; the command line prints its message and exits with code 2."""


class DataError(AttnBalanceError):
    """Facts, questions or templates that cannot be used as they are."""


class BadRowsError(DataError):
    """Some rows of an otherwise good set cannot be used; `indices` says which, so that a caller may drop them.

    The message gives the number of bad rows and the first three of them, counted from 1 among those that were used.
    """

    def __init__(self, what: str, bad: Sequence[tuple[int, str]], total: int, remedy: str) -> None:
        """`bad` holds (index into the set, what is wrong with that row) in order; `total` is the size of the set."""
        shown = "\n".join(f"  row {index + 1}: {problem}" for index, problem in bad[:3])
        super().__init__(f"{len(bad)} of {total} {what}:\n{shown}\n{remedy}")
        self.indices = tuple(index for index, _ in bad)
        self.what = what


class ModelError(AttnBalanceError):
    """A model, tokenizer or adapter that cannot be loaded, or whose attention cannot be read."""


class DivergenceError(AttnBalanceError):
    """Training whose loss left all bounds."""


class OutputError(AttnBalanceError):
    """A folder or file that cannot be written."""
