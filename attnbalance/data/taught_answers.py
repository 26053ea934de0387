"""Which of a fact's accepted answers a text for training teaches."""

from __future__ import annotations

from attnbalance.data.facts import Fact


def taught_answer(label: str, fact: Fact) -> str | None:
    """The longest accepted answer that a label begins with, in any case; None for another label.

    The word must end there: no digit and no letter with capitals follows (Japanese, say, does not separate words).

    >>> fact = Fact("Ely", "country", ("United Kingdom", "U", "UK"))
    >>> taught_answer("UK, of course", fact), taught_answer("Ukraine", fact)
    ('UK', None)
    """
    begun = [answer for answer in fact.answers if label.casefold().startswith(answer.casefold())]
    return max((answer for answer in begun if not _goes_on(label[len(answer) :])), key=len, default=None)


def _goes_on(rest: str) -> bool:
    """Whether a text begins with a digit or with a letter that can be a capital."""
    return rest[:1].isdigit() or rest[:1].upper() != rest[:1].lower()
