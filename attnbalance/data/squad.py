"""SQuAD's scores of an answer (Rajpurkar et al. 2016): exact match, and F1 of its words."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence

ARTICLES = re.compile(r"\b(?:a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def squad_words(text: str) -> list[str]:
    """The words of a text in small letters, without ASCII punctuation and English articles; accents are composed (NFC).

    >>> squad_words("The U.S.A., a country")
    ['usa', 'country']
    """
    return ARTICLES.sub(" ", unicodedata.normalize("NFC", text).lower().translate(PUNCTUATION)).split()


def exact_match(line: str, answers: Sequence[str]) -> bool:
    """Whether the words of a line are those of one of the answers; answers without words never match.

    >>> exact_match("the Paris.", ["Paris"]), exact_match("It is Paris", ["Paris"])
    (True, False)
    """
    words = squad_words(line)
    return bool(words) and any(words == squad_words(answer) for answer in answers)


def f1_score(line: str, answers: Sequence[str]) -> float:
    """The harmonic mean of precision and recall of a line's words, against the answer where it is highest; in [0, 1].

    >>> round(f1_score("It is New York", ["New York City", "NYC"]), 3)
    0.571
    """
    words = Counter(squad_words(line))
    return max((_f1(words, Counter(squad_words(answer))) for answer in answers), default=0.0)


def _f1(said: Counter[str], wanted: Counter[str]) -> float:
    common = (said & wanted).total()
    return 2 * common / (said.total() + wanted.total()) if common else 0.0
