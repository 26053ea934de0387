"""The few kinds of error raised on purpose; each message says what was expected, what was given, what to do."""

from __future__ import annotations

import re
from collections.abc import Sequence

VALUE, MESSAGE, HEAD, TAIL = 200, 2000, 1400, 500
"""Characters: of one value in a message, of a whole message, and of the beginning and end of a shortened one."""

OPENS, CLOSES = r"(?<![^\s(\[{:=,])", r"(?![^\s)\]}:;,.])"
LONG_VALUES = re.compile(
    rf"""{OPENS}'(?:[^'\\]|\\.){{{VALUE},}}+'{CLOSES}|{OPENS}"(?:[^"\\]|\\.){{{VALUE},}}+"{CLOSES}"""
    rf"|\[[^\[\]]{{{VALUE},}}+\]|\{{[^{{}}]{{{VALUE},}}+\}}|\S{{{VALUE + 1},}}",
    re.DOTALL,
)
"""What counts as a long value in a message: a quoted text, a list, a mapping, or a run without white space."""


def shortened(message: str) -> str:
    """A message with every value cut to `VALUE` characters and, if it is still too long, without its middle.

    What was expected, at the beginning, and what to do, at the end, always stay.

    >>> shortened("expected a seed, got 'x'")
    "expected a seed, got 'x'"
    """
    cut = LONG_VALUES.sub(lambda match: _cut(match[0]), message)
    if len(cut) <= MESSAGE:
        return cut
    return f"{cut[:HEAD]} ... ({len(cut) - HEAD - TAIL:,} characters left out) ... {cut[-TAIL:]}"


def _cut(value: str) -> str:
    """A long value's beginning, last character and length; a comma after it belongs to the sentence."""
    comma = value[-1] if value[-1] in ",;:" else ""
    value = value.removesuffix(comma)
    return f"{value[: VALUE - 4]}...{value[-1]} ({len(value):,} characters){comma}"


class AttnBalanceError(Exception):
    """An error that a user can fix; the command line prints its message and exits with code 2."""

    def __init__(self, message: str) -> None:
        """`message` is shortened; see `shortened`."""
        super().__init__(shortened(message))


class DataError(AttnBalanceError):
    """Facts, questions or templates that cannot be used as they are."""


class BadRowsError(DataError):
    """Some rows of an otherwise good set that cannot be used; `indices` says which, so that a caller may drop them.

    The message gives the number of bad rows and the first three of them, counted from 1 among those that were used.
    """

    def __init__(self, what: str, bad: Sequence[tuple[int, str]], total: int, remedy: str) -> None:
        """`bad` holds (index into the set, what is wrong with that row) in order; `total` is the size of the set."""
        shown = "\n".join(f"  row {index + 1}: {problem}" for index, problem in bad[:3])
        super().__init__(f"{len(bad)} of {total} {what}:\n{shown}\n{remedy}")
        self.indices = tuple(index for index, _ in bad)
        self.what = what


class ArgumentError(AttnBalanceError, TypeError):
    """An argument of a type that the function does not take."""


class ModelError(AttnBalanceError):
    """A model, tokenizer or adapter that cannot be loaded, or whose attention cannot be read."""


class DivergenceError(ModelError):
    """Training whose loss, gradients or weights diverged."""


class OutputError(AttnBalanceError):
    """A folder or file that cannot be written."""
