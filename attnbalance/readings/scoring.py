"""Scoring: whether an output contains an accepted answer, as whole words of its first line or anywhere."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence

from attnbalance.errors import DataError

WHOLE_WORDS, CONTAINMENT = SCORINGS = ("whole-words", "containment")
"""Ways to score an output; the first is the default."""

WITHOUT_SPACES = ("CJK", "HIRAGANA", "KATAKANA", "HANGUL", "THAI", "LAO", "KHMER", "MYANMAR")
"""First words of the Unicode names of letters that are written without spaces between words (in Korean, particles)."""

CODE_LENGTH = 2
"""Longest answer in capitals that is a code ("US", "IT"). A code matches only in capitals."""


def check_scoring(scoring: str) -> None:
    """Raise `DataError` for a scoring that is not one of `SCORINGS`."""
    if scoring not in SCORINGS:
        raise DataError(f"scoring must be one of {', '.join(SCORINGS)}, got {scoring!r}")


def is_match(output: str, answers: Sequence[str], scoring: str = WHOLE_WORDS) -> bool:
    """Whether an output contains one of the answers; empty answers never match.

    "whole-words": the output's first non-empty line contains an answer as whole words, ignoring case. A word is a run
    of letters, digits and marks (Unicode). Chinese, Japanese, Korean, Thai, Lao, Khmer and Burmese do not separate
    words, so they match anywhere. Codes of one or two capitals ("US", "IT") match only in capitals, or every "it" would
    be Italy.

    "containment": the output contains an answer anywhere, both lower-cased and stripped (Ghosal et al. 2024, B.2). The
    paper's text says that both are normalised; its code lower-cases only the output. Short answers match inside longer
    words ("pol" in "Apollo", "it" in "United").

    Raises `DataError` for another scoring.

    >>> is_match("Paris, the capital of France", ["Paris"]), is_match("Parisian", ["Paris"])
    (True, False)
    >>> is_match("Parisian", ["Paris"], "containment")
    True
    """
    check_scoring(scoring)
    if scoring == CONTAINMENT:
        given = output.lower().strip()
        return any(wanted in given for wanted in (answer.lower().strip() for answer in answers) if wanted)
    line = next((line for line in output.splitlines() if line.strip()), "")
    return any(_holds(line, answer) for answer in answers if answer.strip())


def _holds(line: str, answer: str) -> bool:
    code = len(answer.strip()) <= CODE_LENGTH and answer.strip().isupper()
    given, wanted = _normalised(line, code), _normalised(answer, code)
    return any(
        _ends_word(given[:start], given[start:])
        and _ends_word(given[: start + len(wanted)], given[start + len(wanted) :])
        for start in _starts(given, wanted)
    )


def _starts(text: str, part: str) -> Iterator[int]:
    start = text.find(part)
    while start >= 0:
        yield start
        start = text.find(part, start + 1)


def _ends_word(left: str, right: str) -> bool:
    """Whether a word can end between two adjacent texts."""
    if not left or not right:
        return True
    before, after = left[-1], right[0]
    if _in_number(left, right) or _in_number(left[:-1], left[-1:] + right):
        return False
    if unicodedata.category(after)[0] == "M":
        return False  # a mark belongs to the letter before it
    if not (_in_word(before) and _in_word(after)):
        return True
    return _runs_on(before) or _runs_on(after)


def _in_number(left: str, right: str) -> bool:
    """Whether the texts split a number at its point or comma: "3" and ".14"."""
    return bool(left[-1:].isdigit() and right[:1] in ".," and right[1:2].isdigit())


def _in_word(character: str) -> bool:
    return unicodedata.category(character)[0] in "LMN"


def _runs_on(character: str) -> bool:
    return unicodedata.name(character, "").startswith(WITHOUT_SPACES)


def _normalised(text: str, keep_case: bool) -> str:
    composed = unicodedata.normalize("NFKC", text)
    folded = composed if keep_case else unicodedata.normalize("NFKC", composed.casefold())
    return " ".join(folded.split())
