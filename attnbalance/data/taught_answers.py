"""Which of a fact's accepted answers a text for training teaches."""

from __future__ import annotations

import unicodedata

from attnbalance.data.facts import Fact


def taught_answer(label: str, fact: Fact) -> str | None:
    """The longest accepted answer that a label begins with, in any case; None for another label.

    The answer must end with a word of the label: no digit, combining mark or cased letter follows (scripts without
    case, such as Japanese, need no separator), and no sign continues a number or abbreviation ("5.2", "1/5", "U.S.").

    >>> fact = Fact("Ely", "country", ("United Kingdom", "U", "UK"))
    >>> taught_answer("UK, of course", fact), taught_answer("Ukraine", fact)
    ('UK', None)
    """
    text = _folded(label)
    begun = {answer: _folded(answer) for answer in fact.answers if text.startswith(_folded(answer))}
    return max((answer for answer, own in begun.items() if not _goes_on(own, text[len(own) :])), key=len, default=None)


def _folded(text: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).casefold())


def _goes_on(answer: str, rest: str) -> bool:
    """Whether the answer's last word goes on in what follows it."""
    if rest[:1] in tuple(".,/-") and answer:
        abbreviated = len(answer.split()[-1]) == 1 and rest[1:2].isalpha()
        return abbreviated or (answer[-1].isdigit() and rest[1:2].isdigit())
    return rest[:1].isdigit() or unicodedata.category(rest[:1] or " ")[0] == "M" or rest[:1].upper() != rest[:1].lower()
