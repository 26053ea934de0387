"""What is in a set of facts, by relation: the first thing to look at before a model is asked about them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from attnbalance.arguments import expects
from attnbalance.data.facts import FactSet
from attnbalance.data.prompts import question_of
from attnbalance.data.scoring import is_match
from attnbalance.data.statements import statement_prompts
from attnbalance.report.wording import markdown, percent, popularity

HEADER = (
    "relation",
    "facts",
    "answers",
    "most frequent answer",
    "popularity: 10% / median / 90%",
    "question",
    "statement",
)


@dataclass(frozen=True)
class RelationRow:
    """What is in the facts of one relation.

    Attributes:
        relation: Its name.
        facts: Their number.
        answers: The number of different first answers.
        most_frequent: The most frequent first answer.
        accepted: The share of the facts that accept it, from 0 to 1: what a constant answer gets right.
        popularity: The 10%, 50% and 90% quantiles of popularity; None if no fact has one.
        with_popularity: The number of facts that have one.
        question: The first fact's question.
        statement: The first fact's statement.
    """

    relation: str
    facts: int
    answers: int
    most_frequent: str
    accepted: float
    popularity: tuple[float, ...] | None
    with_popularity: int
    question: str
    statement: str


def relation_rows(facts: FactSet) -> list[RelationRow]:
    """A row for each relation; raises `DataError` if a first fact's question does not hold its subject once."""
    return [_row(relation, facts.of_relations([relation])) for relation in facts.relations]


@expects(facts=FactSet)
def describe_facts(facts: FactSet) -> str:
    """A table in Markdown with a row for each relation, and the first fact's question and statement.

    After the most frequent first answer, the table gives the share of facts that accept it: what a constant answer gets
    right. If only some facts have a popularity, their number follows the quantiles. Raises `DataError` if a first
    fact's question does not hold its subject once.

    >>> from attnbalance import Fact
    >>> print(describe_facts(FactSet((Fact("France", "capital", ("Paris",), 9.0),))).splitlines()[-1])
    | capital | 1 | 1 | Paris (100.0%) | 9 / 9 / 9 | What is the capital of France? | The capital of France is |
    """
    return markdown([HEADER, *map(_cells, relation_rows(facts))])


def _row(relation: str, facts: FactSet) -> RelationRow:
    answers = Counter(fact.answer for fact in facts)
    top, first = answers.most_common(1)[0][0], facts[0]
    known = [fact.popularity for fact in facts if fact.popularity is not None]
    return RelationRow(
        relation=relation,
        facts=len(facts),
        answers=len(answers),
        most_frequent=top,
        accepted=sum(is_match(top, fact.answers) for fact in facts) / len(facts),
        popularity=tuple(np.quantile(known, (0.1, 0.5, 0.9)).tolist()) if known else None,
        with_popularity=len(known),
        question=question_of(first)[0],
        statement=statement_prompts([first])[0].text,
    )


def _cells(row: RelationRow) -> tuple[str, ...]:
    most_frequent = f"{row.most_frequent} ({percent(row.accepted)})"
    return (
        row.relation,
        str(row.facts),
        str(row.answers),
        most_frequent,
        _popularity(row),
        row.question,
        row.statement,
    )


def _popularity(row: RelationRow) -> str:
    if row.popularity is None:
        return "none"
    quantiles = " / ".join(map(popularity, row.popularity))
    return quantiles if row.with_popularity == row.facts else f"{quantiles} ({row.with_popularity} facts)"
