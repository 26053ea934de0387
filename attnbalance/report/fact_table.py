"""What is in a set of facts, by relation: the first thing to look at before a model is asked about them."""

from __future__ import annotations

from collections import Counter

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


@expects(facts=FactSet)
def describe_facts(facts: FactSet) -> str:
    """A table in Markdown with a row for each relation, and the first fact's question and statement.

    Beside the most frequent first answer stands the share of facts that accept it: what a constant answer gets right.
    Where only some facts have a
    popularity, their number stands beside the quantiles. Raises `DataError` if a first fact's question does not hold
    its subject once.

    >>> from attnbalance import Fact
    >>> print(describe_facts(FactSet((Fact("France", "capital", ("Paris",), 9.0),))).splitlines()[-1])
    | capital | 1 | 1 | Paris (100.0%) | 9 / 9 / 9 | What is the capital of France? | The capital of France is |
    """
    rows = [_row(relation, facts.of_relations([relation])) for relation in facts.relations]
    return markdown([HEADER, *rows])


def _row(relation: str, facts: FactSet) -> tuple[str, ...]:
    answers = Counter(fact.answer for fact in facts)
    top, first = answers.most_common(1)[0][0], facts[0]
    right = sum(is_match(top, fact.answers) for fact in facts)
    return (
        relation,
        str(len(facts)),
        str(len(answers)),
        f"{top} ({percent(right / len(facts))})",
        _popularity(facts),
        question_of(first)[0],
        statement_prompts([first])[0].text,
    )


def _popularity(facts: FactSet) -> str:
    known = [fact.popularity for fact in facts if fact.popularity is not None]
    if not known:
        return "none"
    quantiles = " / ".join(popularity(float(value)) for value in np.quantile(known, (0.1, 0.5, 0.9)))
    return quantiles if len(known) == len(facts) else f"{quantiles} ({len(known)} facts)"
