"""Controls of a study: the base without training, a constant answer, and training on other labels."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from attnbalance.data.facts import Fact, FactSet
from attnbalance.data.prompts import Prompt
from attnbalance.finetuning.splits import Split
from attnbalance.readings.recall import Recall, score

LABELS = ("facts", "base", "shuffled")
"""Where a method's training answers come from: the facts, what the base continues their statements with, or other facts
of their relation, at random."""

CONSTANT = "constant answer"
"""The control that gives every question its relation's most frequent training answer (see `constant`)."""


def untrained(form: str) -> str:
    """The name of the control that asks the untrained base in a form.

    >>> untrained("question")
    'no training: question'
    """
    return f"no training: {form}"


def relabelled(split: Split, labels: str, base_answer: Callable[[Fact], str], seed: int) -> Split:
    """A split whose training and validation facts have the answers of another of `LABELS`.

    `base_answer` gives what the base continues a fact's statement with, of which the text before the first full stop is
    the answer ("Washington, D" of "Washington, D.C."); facts that it continues with nothing are left out.
    "shuffled" permutes the answers, in all their accepted forms, among the facts of a relation.
    """
    if labels == "facts":
        return split
    change = _answered_by_base(base_answer) if labels == "base" else _shuffled(seed)
    parts = {name: change(getattr(split, name)) for name in ("train", "validation")}
    return replace(split, name=f"{split.name}, answers of {'the base' if labels == 'base' else 'other facts'}", **parts)


def _answered_by_base(base_answer: Callable[[Fact], str]) -> Callable[[FactSet], FactSet]:
    def change(facts: FactSet) -> FactSet:
        first_lines = (base_answer(fact).strip().splitlines() for fact in facts)
        answers = [lines[0].partition(".")[0].strip() if lines else "" for lines in first_lines]
        pairs = zip(facts, answers, strict=True)
        return replace(facts, facts=tuple(replace(fact, answers=(answer,)) for fact, answer in pairs if answer))

    return change


def _shuffled(seed: int) -> Callable[[FactSet], FactSet]:
    def change(facts: FactSet) -> FactSet:
        rng, answers = random.Random(seed), dict[str, list[tuple[str, ...]]]()  # noqa: S311
        for fact in facts:
            answers.setdefault(fact.relation, []).append(fact.answers)
        for permuted in answers.values():
            rng.shuffle(permuted)
        return replace(facts, facts=tuple(replace(fact, answers=answers[fact.relation].pop()) for fact in facts))

    return change


def constant(prompts: Sequence[Prompt], shortcuts: Mapping[str, Sequence[str]]) -> Recall:
    """The recall of the control `CONSTANT`.

    `shortcuts` holds the most frequent training answer of each relation that has one. The questions of other relations
    get the most frequent answer among their own facts.
    """
    asked = FactSet(tuple(prompt.fact for prompt in prompts)).most_frequent_answers()
    answers = {**asked, **shortcuts}
    return score(prompts, [answers[prompt.fact.relation][0] for prompt in prompts], shortcuts)


def scored(answers: Recall, stated: Mapping[str, bool], trained: Recall | None = None) -> dict[str, Any]:
    """The scores in a `result.json`.

    answers: to the held-out questions.
    stated: by prompt id, whether the base completes the fact's statement.
    trained: answers to the questions about training facts, if any.
    """
    rate = answers.shortcut_rate()
    fifths = answers.quintiles() if answers.has_popular_fifth else []  # ties are no fifths
    scores: dict[str, Any] = {
        "prompt_ids": list(answers.prompt_ids),
        "subjects": list(answers.subjects),
        "correct": list(answers.correct),
        "stated": [stated[name] for name in answers.prompt_ids],
        "accuracy_by_quintile": [_mean([answers.correct[i] for i in part]) for part in fifths],
        "shortcut_rate": None if rate is None else rate.mean,
        "subject_attention": None,
        "new_facts": None,
        "kept_facts": None,
        "drift": None,
    }
    if trained is not None:
        pairs = [(right, stated[name]) for right, name in zip(trained.correct, trained.prompt_ids, strict=True)]
        scores["new_facts"] = _mean([right for right, known in pairs if not known])
        scores["kept_facts"] = _mean([right for right, known in pairs if known])
    return scores


def _mean(values: Sequence[bool]) -> float | None:
    return sum(values) / len(values) if values else None
