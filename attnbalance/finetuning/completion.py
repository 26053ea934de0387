"""What the base knows before training: the share of the training facts that it completes, by form of the question."""

from __future__ import annotations

import random
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from attnbalance.data.facts import Fact
from attnbalance.data.forms import BEST, FORMS
from attnbalance.errors import BadRowsError
from attnbalance.finetuning.examples import Example, about_facts, examples_of
from attnbalance.finetuning.objectives.base_model import BaseModel, has_replay, prompts_of, without_adapters
from attnbalance.finetuning.objectives.best_forms import chosen_forms, completions, least_share
from attnbalance.finetuning.objectives.objective import Objective
from attnbalance.models.hooked import HookedModel
from attnbalance.statistics.shares import share_interval

ASKED = 500
"""The largest number of training examples that the base is asked."""

ABOUT = " about "
"""Stands between a form and a relation in which it is weak, as in "statement about capital"."""

CONSTANT = "constant answer"
"""The share of facts whose answer is their relation's most frequent one: what a model without knowledge gets right."""


def completion_rates(
    examples: Sequence[Example], objective: Objective, base: HookedModel, *, batch_size: int = 64, seed: int = 0
) -> dict[str, float]:
    """The share of facts whose answer the base predicts, by form, among at most `ASKED` examples drawn by the seed.

    The forms are those that the objective teaches from, and "question"; `CONSTANT` is added to them. An answer is
    predicted if each of its tokens is the most probable one after the right ones before it. The result is empty if the
    objective teaches from no form, or holds replayed facts alone; a form whose prompts merge with the answer is left
    out. Of `BEST` there is also the share of each relation, named with its form; of the other forms that are taught
    from, that of each relation in which the form is weak (see `warn_of_weak_forms`).

    Args:
        examples: The training examples.
        objective: The objective that says which forms.
        base: The base model; its adapters are switched off meanwhile.
        batch_size: Examples of one forward pass.
        seed: Seed that draws the examples and their few shots.
    """
    different = list({id(example): example for example in about_facts(examples)}.values())
    if not objective.forms or not different or has_replay(different):
        return {}
    drawn = sorted(random.Random(seed).sample(range(len(different)), min(ASKED, len(different))))  # noqa: S311
    model = BaseModel(base, batch_size, seed, best=chosen_forms(different))
    facts = [prompt.fact for prompt in prompts_of([different[i] for i in drawn])]
    rates, hits_by_form = dict[str, float](), dict[str, list[bool]]()
    with without_adapters(base.model):
        for form in dict.fromkeys([*objective.forms, "question"]):
            asked = model.ask(form, different)  # few-shot draws its answered questions from all
            try:
                hits = completions(examples_of([asked[i] for i in drawn], base.tokenizer, end=False), base, batch_size)
            except BadRowsError:
                continue
            rates[form] = sum(hits) / len(hits)
            if form == BEST:
                rates |= _by_relation([fact.relation for fact in facts], hits, model.best)
            elif form in FORMS:
                hits_by_form[form] = list(hits)
    usual = _most_frequent(different)
    rates |= _weak_relations(facts, hits_by_form, usual, objective.forms)
    return {**rates, CONSTANT: sum(count for count, _ in usual.values()) / len(different)}


def _weak_relations(
    facts: Sequence[Fact], hits: Mapping[str, list[bool]], usual: Mapping[str, tuple[int, int]], taught: Sequence[str]
) -> dict[str, float]:
    """The rates of the taught forms in relations where their whole interval is below a constant answer or the question.

    See `least_share` for relations whose facts all have the same answer.
    """
    weak = dict[str, float]()
    for relation in dict.fromkeys(fact.relation for fact in facts):
        own = [k for k, fact in enumerate(facts) if fact.relation == relation]
        subjects, (count, total) = [facts[k].composed_subject for k in own], usual[relation]
        rates = {form: share_interval([column[k] for k in own], subjects) for form, column in hits.items()}
        least = max(least_share(count / total), rates["question"].mean if "question" in rates else 0.0)
        weak |= {
            f"{form}{ABOUT}{relation}": rate.mean
            for form, rate in rates.items()
            if form in taught and rate.high < least
        }
    return weak


def _by_relation(relations: Sequence[str], hits: Sequence[bool], best: Mapping[str, str]) -> dict[str, float]:
    """The share of hits of each relation, named with its form: "few-shot for capital"."""
    by_relation: dict[str, list[bool]] = defaultdict(list)
    for relation, hit in zip(relations, hits, strict=True):
        by_relation[relation].append(hit)
    return {f"{best[relation]} for {relation}": sum(own) / len(own) for relation, own in by_relation.items()}


def describe(rates: Mapping[str, float], objective: Objective) -> str:
    """The rates, if any, in a sentence, and one more if the given answers are not learned; empty if neither applies."""
    sentences = []
    if rates:
        forms = [f"{100 * rate:.1f}% as {form}" for form, rate in rates.items() if form != CONSTANT]
        known, constant = ", ".join(forms), f"a {CONSTANT} gets {100 * rates[CONSTANT]:.1f}%"
        sentences.append(f"The base completes of the training facts {known}; {constant}.")
    if not objective.learns_answers:
        teaches = "what the base says" if objective.forms else "no answers"
        sentences.append(f"{objective.text} teaches {teaches}; the answers given are not learned.")
    return " ".join(sentences)


def warn_of_weak_forms(rates: Mapping[str, float], objective: Objective) -> None:
    """Warn the caller of a trainer if the objective teaches from a form in which the base knows little.

    A form is weak if the base completes less in it than a constant answer, or the question, gets right. In one relation
    it is weak if the upper end of its 95% interval is below that. `least_share` says what counts where all facts have
    the same answer.
    """
    weak, pairs = weak_forms(rates, objective), [name.partition(ABOUT) for name in rates]
    relations = [(form, relation) for form, about, relation in pairs if about and form in objective.forms]
    if weak:
        excluded = {form for form, _ in relations}
        better = [form for form in FORMS if form not in excluded and rates.get(form, 1.0) >= _least(rates)]
        others = [form if form in rates else f"{form}, not measured" for form in better]
        advice = f"try another form ({'; '.join(others)}), or recommended" if others else "use recommended, or ce alone"
        warnings.warn(
            f"{describe(rates, objective)} Teaching from {' and '.join(weak)} would lose what it knows; {advice}",
            stacklevel=4,
        )
    elif relations:
        named = [f"{form} for {relation}" for form, relation in relations]
        warnings.warn(
            f"{describe(rates, objective)} Teaching from {' and '.join(named)} would lose what it knows; use "
            "recommended, which chooses a form for each relation",
            stacklevel=4,
        )


def weak_forms(rates: Mapping[str, float], objective: Objective) -> list[str]:
    """The forms taught from in which the base completes less than a constant answer, or the question, gets right.

    `BEST` is none of them: `choose_forms` has compared it, relation by relation. `least_share` says what counts where
    all facts of each relation have the same answer.
    """
    return [form for form in objective.forms if form in FORMS and form in rates and rates[form] < _least(rates)]


def _least(rates: Mapping[str, float]) -> float:
    """The least share of facts that a form worth teaching from completes."""
    return max(least_share(rates.get(CONSTANT, 0.0)), rates.get("question", 0.0))


def _most_frequent(examples: Sequence[Example]) -> dict[str, tuple[int, int]]:
    """For each relation, how many facts have its most frequent answer, and how many facts there are."""
    answers: dict[str, Counter[str]] = defaultdict(Counter)
    for prompt in prompts_of(examples):
        answers[prompt.fact.relation][prompt.fact.answer] += 1
    return {relation: (counts.most_common(1)[0][1], counts.total()) for relation, counts in answers.items()}
