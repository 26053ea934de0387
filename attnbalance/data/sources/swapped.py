"""Knowledge conflicts made from facts: each stated with the answer of another one."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from attnbalance.arguments import expects
from attnbalance.data.conflicts import Conflict, NoConflictError, overlap
from attnbalance.data.facts import Fact, FactSet
from attnbalance.data.prompts import question_of
from attnbalance.data.statements import statement
from attnbalance.seeds import check_seed


@expects(facts=FactSet)
def make_conflicts(facts: FactSet, seed: int = 0) -> FactSet:
    """For each fact, a conflict: its statement with the answer of another fact of its relation as the context.

    The other answer is drawn among the relation's first answers that neither contain an accepted one nor are contained
    in one, nor stand in the question. Facts for which there is none are dropped and counted, as are those that are no
    conflict for another reason (see `Conflict`).

    >>> facts = FactSet((Fact("France", "capital", ("Paris",)), Fact("Spain", "capital", ("Madrid",))))
    >>> make_conflicts(facts)[0].context
    'The capital of France is Madrid.'
    """
    rng, conflicts, dropped = random.Random(check_seed(seed)), list[Fact](), Counter(facts.dropped)  # noqa: S311
    answers = {
        relation: list(dict.fromkeys(fact.answer for fact in facts if fact.relation == relation))
        for relation in facts.relations
    }
    for fact in facts:
        question = question_of(fact)[0].casefold()
        others = [
            answer
            for answer in answers[fact.relation]
            if answer.casefold() not in question and not overlap((answer,), fact.answers)
        ]
        try:
            if not others:
                raise NoConflictError("no other answer of the relation", fact.relation)
            conflicts.append(_with_answer(fact, rng.choice(others)))
        except NoConflictError as error:
            dropped[error.reason] += 1
    return replace(facts, facts=tuple(conflicts), name=f"conflicts of {facts.name}", dropped=dict(dropped))


def _with_answer(fact: Fact, answer: str) -> Conflict:
    """The fact with a context that states another answer."""
    question, (start, _) = question_of(fact)
    context = statement(replace(fact, answers=(answer,)))
    return Conflict(
        fact.subject,
        fact.relation,
        (answer,),
        fact.popularity,
        question,
        start,
        fact.statement,
        context=context,
        memory_answers=fact.answers,
    )
