"""Facts: what a language model is asked about; plain data, without torch."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from attnbalance.errors import DataError


@dataclass(frozen=True)
class Fact:
    """A (subject, relation, answers) triple, with its popularity where known.

    `answers` are all accepted answers; the first one, `answer`, is the one that a model is trained to give.
    `popularity` is any number that grows with how often the subject is met in text (PopQA: monthly page views); None
    where unknown. `question` is the question as finished text, `subject_start` the character at which the subject
    stands in it; None where the question came from elsewhere, so that the subject must occur in it exactly once.
    """

    subject: str
    relation: str
    answers: tuple[str, ...]
    popularity: float | None = None
    question: str | None = None
    subject_start: int | None = None

    def __post_init__(self) -> None:
        """Refuse a fact that nobody could be asked about."""
        if not self.subject.strip() or not self.relation.strip() or not any(a.strip() for a in self.answers):
            raise DataError(f"a fact needs a subject, a relation and an answer; got {self.as_dict()}")

    @property
    def answer(self) -> str:
        """The first accepted answer: the one that finetuning trains."""
        return self.answers[0]

    def as_dict(self) -> dict[str, object]:
        """The fact as the JSON object that a facts file holds; fields that are not known are left out."""
        record = {"subject": self.subject, "relation": self.relation, "answers": list(self.answers)}
        optional = {
            "popularity": self.popularity,
            "question": self.question,
            "subject_start": self.subject_start,
        }
        return record | {name: value for name, value in optional.items() if value is not None}


@dataclass(frozen=True)
class FactSet:
    """Facts from one source, in a fixed order, with the number of rows that loading dropped, by reason."""

    facts: tuple[Fact, ...]
    name: str = "facts"
    dropped: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        """Number of facts."""
        return len(self.facts)

    def __iter__(self) -> Iterator[Fact]:
        """The facts in order."""
        return iter(self.facts)

    def __getitem__(self, index: int) -> Fact:
        """The fact at one place."""
        return self.facts[index]

    @property
    def sha256(self) -> str:
        """SHA-256 of the facts themselves, in order: tells whether something was computed from these."""
        return hashlib.sha256(json.dumps([fact.as_dict() for fact in self.facts]).encode()).hexdigest()

    @property
    def relations(self) -> tuple[str, ...]:
        """The relations that occur, in order of first occurrence."""
        return tuple(dict.fromkeys(fact.relation for fact in self.facts))

    def where(self, keep: Callable[[Fact], bool]) -> FactSet:
        """The facts for which `keep` is true; may be empty."""
        return replace(self, facts=tuple(filter(keep, self.facts)))

    def of_relations(self, relations: Collection[str]) -> FactSet:
        """The facts of the named relations; raises `DataError` for a relation that does not occur."""
        unknown = sorted(set(relations) - set(self.relations))
        if unknown:
            raise DataError(
                f"no facts of relation {', '.join(map(repr, unknown))} in {self.name}; "
                f"it has: {', '.join(sorted(self.relations))}"
            )
        return self.where(lambda fact: fact.relation in relations)

    def sample(self, size: int, seed: int = 0) -> FactSet:
        """At most `size` facts drawn without replacement, seeded, in their old order."""
        if size < 1:
            raise DataError(f"a limit must be at least 1, got {size}")
        if size >= len(self):
            return self
        chosen = sorted(random.Random(seed).sample(range(len(self)), size))  # noqa: S311
        return replace(self, facts=tuple(self.facts[i] for i in chosen))

    def most_frequent_answers(self) -> dict[str, tuple[str, ...]]:
        """For each relation, the accepted answers of the fact whose first answer is that relation's most frequent one.

        Ties go to the answer that comes first in the set.
        """
        result: dict[str, tuple[str, ...]] = {}
        for relation in self.relations:
            here = [fact for fact in self.facts if fact.relation == relation]
            top = Counter(fact.answer for fact in here).most_common(1)[0][0]
            result[relation] = next(fact.answers for fact in here if fact.answer == top)
        return result

    def merged(self) -> FactSet:
        """One fact for each (subject, relation, question), with all answers in order; popularity is the largest known.

        Two entities of the same name cannot be told apart by a question, so either's answers are accepted.
        """
        groups: dict[tuple[str, str, str | None], list[Fact]] = {}
        for fact in self.facts:
            groups.setdefault((fact.subject, fact.relation, fact.question), []).append(fact)
        return replace(self, facts=tuple(map(_merge, groups.values())))


def _merge(same: list[Fact]) -> Fact:
    known = [fact.popularity for fact in same if fact.popularity is not None]
    answers: Iterable[str] = dict.fromkeys(answer for fact in same for answer in fact.answers)
    return replace(same[0], answers=tuple(answers), popularity=max(known, default=None))
