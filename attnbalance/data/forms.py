"""Forms: the ways in which a model is asked for a fact."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from attnbalance.data.facts import Fact
from attnbalance.data.prompts import Prompt
from attnbalance.data.statements import statement_prompts
from attnbalance.errors import DataError

FEW_SHOT, FEW_SHOT_STATEMENT = "few-shot", "few-shot-statement"

FORMS = ("statement", "question", FEW_SHOT, FEW_SHOT_STATEMENT)
"""Prompts that ask for a fact: a statement of it up to its answer, the question itself, and either after a few answered
ones of its relation."""

BEST = "best"
"""For each relation, the one of `FORMS` in which a model completes most of its training facts (of 50, if more)."""

SHOTS = 4
"""Answered prompts before the one asked, in the few-shot forms."""


def in_form(
    form: str, prompts: Sequence[Prompt], seed: int = 0, shots_from: Sequence[Prompt] | None = None
) -> list[Prompt]:
    """Ask for the prompts' facts in another of `FORMS`, up to the answer.

    Few-shot puts `SHOTS` answered questions before each question, drawn once for each relation from `shots_from` (by
    default from the prompts themselves). They are about different subjects, none of them the one asked about: the same
    fact in other words would give its answer away. One generator draws for all relations, in the order of the prompts.
    Few-shot-statement does the same with statements. Raises `DataError`
    for a relation with too few subjects.
    """
    if form in ("statement", FEW_SHOT_STATEMENT):
        stated, pool = (_stated(of) for of in (prompts, shots_from or prompts))
        return stated if form == "statement" else _few_shot(stated, seed, pool)
    return list(prompts) if form == "question" else _few_shot(prompts, seed, shots_from or prompts)


def too_few_subjects(facts: Iterable[Fact]) -> dict[str, int]:
    """The relations with too few subjects for a few-shot form, and their number of subjects."""
    subjects = defaultdict[str, set[str]](set)
    for fact in facts:
        subjects[fact.relation].add(fact.composed_subject)
    return {relation: len(names) for relation, names in subjects.items() if len(names) <= SHOTS}


def _stated(prompts: Sequence[Prompt]) -> list[Prompt]:
    return list(statement_prompts([prompt.fact for prompt in prompts]))


def _few_shot(prompts: Sequence[Prompt], seed: int, shots_from: Sequence[Prompt]) -> list[Prompt]:
    if any(prompt.has_special_tokens for prompt in (*prompts, *shots_from)):
        raise DataError("few-shot puts answered questions before the prompt; a rendered chat does not allow that")
    rng, shots = random.Random(seed), dict[str, list[Prompt]]()  # noqa: S311
    for relation in dict.fromkeys(prompt.fact.relation for prompt in prompts):
        by_subject = {prompt.fact.composed_subject: prompt for prompt in shots_from if prompt.fact.relation == relation}
        if len(by_subject) <= SHOTS:
            raise DataError(
                f"few-shot needs more than {SHOTS} subjects of each relation; {relation!r} has {len(by_subject)}"
            )
        shots[relation] = rng.sample(list(by_subject.values()), SHOTS + 1)
    return [_after_shots(prompt, shots[prompt.fact.relation]) for prompt in prompts]


def _after_shots(prompt: Prompt, shots: Sequence[Prompt]) -> Prompt:
    """A prompt after answered ones; those about its own subject are left out."""
    used = [shot for shot in shots if shot.fact.composed_subject != prompt.fact.composed_subject][:SHOTS]
    prefix = "".join(f"{shot.with_answer}\n\n" for shot in used)
    spans = {role: (start + len(prefix), end + len(prefix)) for role, (start, end) in prompt.spans.items()}
    return replace(prompt, text=prefix + prompt.text, spans=spans)
