"""Lines of an output: the one that holds its answer, and what of a text can be seen."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Sequence

TAGS = "".join(map(chr, range(0xE0020, 0xE0080)))
"""Invisible characters that say which flag a black flag is (England, Scotland)."""

JOINER = "\u200d"
"""Joins signs to one (a family of three faces); between letters it only formats."""

VARIANTS = "".join(map(chr, (*range(0x180B, 0x180E), 0x180F, *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))))
"""Invisible characters that say which shape the character before them takes."""

FENCE = re.compile(r"`{3,}\s*\w*")
"""The first or last line of a block of code."""

COLONS = (":", "：")  # noqa: RUF001
AFTER_COLON = "*_` \t"
"""What may follow a colon at a line's end: signs of bold type and code."""


def first_line(output: str) -> str:
    r"""The first line of an output that shows more than punctuation, else the first that shows any; empty if none does.

    The line after one that ends in a colon belongs to it.

    >>> first_line("The capital is:\n\n**Vaduz**\nIt is small.")
    'The capital is: **Vaduz**'
    """
    shown = [line for line in output.splitlines() if any(map(_has_shape, visible(line)))]
    worded = [line for line in shown if not FENCE.fullmatch(line.strip()) and any(map(_is_no_punctuation, line))]
    announcing = itertools.takewhile(lambda line: line.rstrip(AFTER_COLON).endswith(COLONS), worded)
    return " ".join(worded[: len(list(announcing)) + 1] or shown[:1])


def visible(text: str) -> str:
    """The text without characters that only format it; what joins two signs to one stays."""
    shown = re.sub(f"{JOINER}+", JOINER, "".join(c for c in text if c == JOINER or not _only_formats(c)))
    return "".join(character for i, character in enumerate(shown) if character != JOINER or _joins(shown, i))


def is_blank(text: str) -> bool:
    """Whether a text shows nothing: white space and characters that only format it."""
    return all(character.isspace() or _only_formats(character) for character in text)


def _only_formats(character: str) -> bool:
    return character in VARIANTS or (unicodedata.category(character) == "Cf" and character not in TAGS)


def _joins(characters: Sequence[str], index: int) -> bool:
    """Whether there is a sign on both sides of `index`."""
    sides = [*characters[max(index - 1, 0) : index], *characters[index + 1 : index + 2]]
    return len(sides) == 2 and all(unicodedata.category(side)[0] == "S" for side in sides)


def _has_shape(character: str) -> bool:
    """Whether a character can be seen by itself: spaces cannot, nor marks without a letter."""
    return not character.isspace() and unicodedata.category(character)[0] != "M" and character not in TAGS


def _is_no_punctuation(character: str) -> bool:
    """Whether a character is a letter, digit or sign; a backtick is none."""
    return unicodedata.category(character)[0] in "LNS" and character != "`"
