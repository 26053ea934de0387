"""Conflicts: questions whose context gives another answer than the one that a model may remember."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from attnbalance.data.facts import Fact, check_text
from attnbalance.data.scoring import folded, is_match
from attnbalance.errors import DataError


class NoConflictError(DataError):
    """A fact that is no conflict.

    reason: why, in words that are the same for all facts of that kind.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


PLAIN = re.compile(r"[ -/:-~]*")
"""Texts that have one spelling: of ASCII characters without digits."""


@dataclass(frozen=True)
class Conflict(Fact):
    """A fact whose `answers` are given by a context, while a model may remember other answers.

    If the subject is not named separately, it may be the whole question. Raises `DataError` for a missing question and
    for what `Fact` refuses. Raises `NoConflictError` if the context holds no accepted answer, or if the question holds
    an answer of either kind, which outputs may repeat (both by whole words, see `says`). Raises it as well if one of
    `answers` contains a remembered one letter by letter, or the reverse, since scoring could not tell them apart;
    spellings that `is_match` equates count as one.

    context: the text that gives the answer.
    memory_answers: the accepted answers without the context.

    >>> Conflict("France", "capital", ("Lyon",), question="What is France's capital?", context="It moved to Lyon.",
    ...     memory_answers=("Paris",)).remembered.answers
    ('Paris',)
    """

    context: str = ""
    memory_answers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what is no conflict."""
        super().__post_init__()
        check_text("context", self.context)
        remembered = Fact(self.subject, self.relation, self.memory_answers).answers  # with the checks of answers
        object.__setattr__(self, "memory_answers", remembered)
        if self.question is None:
            raise DataError("a conflict needs a question")
        if pair := overlap(self.answers, remembered):
            raise NoConflictError("the two answers contain each other", " and ".join(map(repr, pair)))
        if not says(self.context, self.answers):
            raise NoConflictError(
                "the context holds no accepted answer", f"{', '.join(self.answers)} in {self.context[:60]!r}"
            )
        if says(self.question, (*self.answers, *remembered)):
            raise NoConflictError("the question holds an answer", self.question)

    @property
    def remembered(self) -> Fact:
        """The same question with the answers that are right without the context."""
        return Fact(
            self.subject,
            self.relation,
            self.memory_answers,
            self.popularity,
            self.question,
            self.subject_start,
            self.statement,
        )

    def as_dict(self) -> dict[str, object]:
        """The conflict as a JSON object, without the fields that are None."""
        return super().as_dict() | {"context": self.context, "memory_answers": list(self.memory_answers)}


def says(text: str, answers: Sequence[str]) -> bool:
    """Whether a text, of any number of lines, holds one of some answers as whole words (see `is_match`)."""
    return is_match(" ".join(text.split()), answers)


def overlap(answers: Sequence[str], others: Sequence[str]) -> tuple[str, str] | None:
    """The first two answers of which one contains the other, ignoring case, or which `is_match` equates."""
    return next(((answer, other) for answer in answers for other in others if _overlap(answer, other)), None)


def _overlap(answer: str, other: str) -> bool:
    a, b = (" ".join(unicodedata.normalize("NFC", text.casefold()).split()) for text in (answer, other))
    if a in b or b in a:
        return True
    one_spelling = PLAIN.fullmatch(a) is not None and PLAIN.fullmatch(b) is not None
    return not one_spelling and folded(answer) == folded(other) != ""
