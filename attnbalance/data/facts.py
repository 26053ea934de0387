"""Facts: what a language model is asked about, as plain data without torch."""

from __future__ import annotations

import hashlib
import json
import math
import numbers
import random
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from attnbalance.arguments import expects, fits
from attnbalance.data.lines import is_blank
from attnbalance.errors import ArgumentError, DataError
from attnbalance.seeds import check_seed


@dataclass(frozen=True)
class Fact:
    """A (subject, relation, answers) triple.

    Subject, relation and answers are single lines without white space around them. Popularity is kept as a float.

    subject: what the fact is about.
    relation: what is asked about it; its accents are composed (NFC).
    answers: all accepted answers; a model is trained to give the first one, `answer`.
    popularity: a number of at least 0 that grows with how often text mentions the subject (PopQA: monthly page views),
        if known.
    question: the question as finished text; None to make one from a template.
    subject_start: index of the subject's first character in `question`; None if the subject occurs exactly once.
    statement: a sentence of the fact up to its answer, with {subject} in the place of the subject: "{subject} was born
        in". None: a form of the relation, mostly "The {relation} of {subject} is".

    >>> Fact("France", "capital", ("Paris",)).answer
    'Paris'
    """

    subject: str
    relation: str
    answers: tuple[str, ...]
    popularity: float | None = None
    question: str | None = None
    subject_start: int | None = None
    statement: str | None = None

    def __post_init__(self) -> None:
        """Raise `DataError` for a field of another type, and for a fact that cannot be asked about."""
        _check_line("subject", self.subject)
        _check_line("relation", self.relation)
        if not isinstance(self.answers, tuple | list) or not self.answers:
            raise DataError(f"answers must be a tuple of one or more texts, got {self.answers!r}")
        for answer in self.answers:
            _check_line("an answer", answer)
        if self.question is not None:
            check_text("question", self.question)
        elif self.subject_start is not None:
            raise DataError(f"subject_start must come with a question, got {self.subject_start!r} without one")
        if self.statement is not None:
            _check_statement(self.statement)
        object.__setattr__(self, "relation", unicodedata.normalize("NFC", self.relation))
        object.__setattr__(self, "answers", tuple(self.answers))
        object.__setattr__(self, "popularity", _popularity(self.popularity))
        object.__setattr__(self, "subject_start", _start(self.subject_start))

    @property
    def answer(self) -> str:
        """The first accepted answer: the one that finetuning trains."""
        return self.answers[0]

    @cached_property
    def folded_answers(self) -> tuple[str, ...]:
        """The accepted answers without case, composed (NFC), with single spaces: whether two facts share one."""
        folded = (unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).casefold()) for text in self.answers)
        return tuple(" ".join(text.split()) for text in folded)

    @property
    def composed_subject(self) -> str:
        """The subject with its accents composed (NFC): one name, however it was typed."""
        return unicodedata.normalize("NFC", self.subject)

    def as_dict(self) -> dict[str, object]:
        """The fact as the JSON object of a facts file, without the fields that are None."""
        record = {"subject": self.subject, "relation": self.relation, "answers": list(self.answers)}
        optional = {
            "popularity": self.popularity,
            "question": self.question,
            "subject_start": self.subject_start,
            "statement": self.statement,
        }
        return record | {name: value for name, value in optional.items() if value is not None}


def check_text(name: str, text: object) -> None:
    """Raise `DataError` for what is not text, and for text that shows nothing or is not UTF-8."""
    if not isinstance(text, str):
        raise DataError(f"{name} must be text, got {text!r}")
    if is_blank(text):
        raise DataError(f"{name} must not be empty, got {text!r}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{text!r} holds half a character (a lone surrogate); save it as UTF-8") from error


def _check_line(name: str, text: str) -> None:
    """Raise `DataError` for what is not one line of text without white space around it."""
    check_text(name, text)
    if text != text.strip() or len(text.splitlines()) > 1:
        raise DataError(f"{name} must be one line without white space around it, got {text!r}")


def _check_statement(text: str) -> None:
    """Raise `DataError` for what is not one line in which {subject} stands once, and no other field."""
    _check_line("statement", text)
    try:
        fields = [part for part in string.Formatter().parse(text) if part[1] is not None]
    except ValueError as error:
        raise DataError(f"statement {text!r} is not a format string: {error}") from error
    if [(name, spec, conversion) for _, name, spec, conversion in fields] != [("subject", "", None)]:
        raise DataError(
            "statement must hold {subject} once, no other field, and end before the answer, "
            f"as in '{{subject}} was born in'; got {text!r}"
        )


def _popularity(value: object) -> float | None:
    """A popularity as a float; NumPy's and other real numbers pass."""
    if value is None:
        return None
    try:
        number = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not 0 <= number < math.inf:
        raise DataError(f"popularity must be a number of at least 0, got {value!r}")
    return number


def _start(value: object) -> int | None:
    """An index of a character as an int; NumPy's integers pass."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 0:
        raise DataError(f"subject_start must be a whole number of at least 0, got {value!r}")
    return int(value)


@dataclass(frozen=True)
class FactSet:
    """Facts from one source, in a fixed order.

    facts: the facts.
    name: the source's name, for messages and result files.
    dropped: number of rows that loading and `--skip-bad` dropped, by reason.
    """

    facts: tuple[Fact, ...]
    name: str = "facts"
    dropped: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse anything that is no collection of facts."""
        if not fits(self.facts, [Fact]):
            raise ArgumentError(f"FactSet: facts must be a collection of Fact, got {self.facts!r:.100}")

    def __repr__(self) -> str:
        return f"FactSet({self.name!r}, {len(self)} facts of {len(self.relations)} relations)"

    def __len__(self) -> int:
        """Number of facts."""
        return len(self.facts)

    def __iter__(self) -> Iterator[Fact]:
        """The facts in order."""
        return iter(self.facts)

    def __getitem__(self, index: int) -> Fact:
        """The fact at an index."""
        return self.facts[index]

    @property
    def sha256(self) -> str:
        """SHA-256 of the facts, in order: shows whether results were computed from these facts."""
        return hashlib.sha256(json.dumps([fact.as_dict() for fact in self.facts]).encode()).hexdigest()

    @property
    def relations(self) -> tuple[str, ...]:
        """The relations, in order of first occurrence."""
        return tuple(dict.fromkeys(fact.relation for fact in self.facts))

    def where(self, keep: Callable[[Fact], bool]) -> FactSet:
        """The facts for which `keep` is true; may be empty."""
        return replace(self, facts=tuple(filter(keep, self.facts)))

    @expects(relations=[str])
    def of_relations(self, relations: Collection[str]) -> FactSet:
        """The facts of the named relations; raises `DataError` for a relation that does not occur."""
        wanted = {unicodedata.normalize("NFC", relation) for relation in relations}
        unknown = sorted(wanted - set(self.relations))
        if unknown:
            raise DataError(
                f"no facts of relation {', '.join(map(repr, unknown))} in {self.name}; "
                f"it has: {', '.join(sorted(self.relations))}"
            )
        return self.where(lambda fact: fact.relation in wanted)

    def sample(self, size: int, seed: int = 0) -> FactSet:
        """At most `size` facts, drawn without replacement by the seed, in their old order."""
        if size < 1:
            raise DataError(f"limit must be at least 1, got {size}")
        if size >= len(self):
            return self
        chosen = sorted(random.Random(check_seed(seed)).sample(range(len(self)), size))  # noqa: S311
        return replace(self, facts=tuple(self.facts[i] for i in chosen))

    def most_frequent_answers(self) -> dict[str, tuple[str, ...]]:
        """For each relation, all accepted forms of its most frequent first answer.

        Of equally frequent ones it is the first in the alphabet (see `tied_relations`). The forms are the answers that
        all facts with that first answer accept, in the order of the first such fact: a merged fact (see `merged`) also
        accepts answers of other entities.
        """
        result: dict[str, tuple[str, ...]] = {}
        for relation in self.relations:
            facts = [fact for fact in self.facts if fact.relation == relation]
            top = _most_frequent(facts)[0]
            accepted = [fact.answers for fact in facts if fact.answer == top]
            shared = set(accepted[0]).intersection(*accepted)
            result[relation] = tuple(answer for answer in accepted[0] if answer in shared)
        return result

    def tied_relations(self) -> tuple[str, ...]:
        """The relations of which several first answers are most frequent, such as those whose answers all differ."""
        return tuple(
            relation
            for relation in self.relations
            if len(_most_frequent([fact for fact in self.facts if fact.relation == relation])) > 1
        )

    def merged(self) -> FactSet:
        """One fact for each (subject, relation, question), with all answers in order and the largest known popularity.

        Subjects and questions are the same however their accents are typed (NFC); the first spelling is kept.

        A question cannot distinguish two entities of the same name, so the answers of both are accepted. Raises
        `DataError` for one question with two values of `subject_start`, or two of `statement`.
        """
        groups: dict[tuple[str, str, str | None], list[Fact]] = {}
        for fact in self.facts:
            question = fact.question and unicodedata.normalize("NFC", fact.question)
            groups.setdefault((fact.composed_subject, fact.relation, question), []).append(fact)
        return replace(self, facts=tuple(map(_merge, groups.values())))


def _most_frequent(facts: Iterable[Fact]) -> list[str]:
    """The first answers that are given most often, in the order of the alphabet."""
    counts = Counter(fact.answer for fact in facts)
    most = max(counts.values())
    return sorted(answer for answer, count in counts.items() if count == most)


def _merge(same: list[Fact]) -> Fact:
    known = [fact.popularity for fact in same if fact.popularity is not None]
    answers: Iterable[str] = dict.fromkeys(answer for fact in same for answer in fact.answers)
    starts = sorted({fact.subject_start for fact in same if fact.subject_start is not None})
    if len(starts) > 1:
        raise DataError(
            f"question {same[0].question!r} must have one subject_start for {same[0].subject!r}, got "
            f"{' and '.join(map(str, starts))}; keep one, or word the questions differently"
        )
    statements = sorted({fact.statement for fact in same if fact.statement is not None})
    if len(statements) > 1:
        raise DataError(
            f"facts of {same[0].subject!r} ({same[0].relation}) that share a question must share their statement, got "
            f"{' and '.join(map(repr, statements))}; keep one, or give each its own question"
        )
    return replace(
        same[0],
        answers=tuple(answers),
        popularity=max(known, default=None),
        subject_start=starts[0] if starts else None,
        statement=statements[0] if statements else None,
    )
