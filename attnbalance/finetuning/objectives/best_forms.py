"""The best form of each relation: the one of `FORMS` in which the base model completes most of its facts."""

from __future__ import annotations

import itertools
import random
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnbalance.data.forms import FORMS, in_form
from attnbalance.data.prompts import Prompt
from attnbalance.errors import BadRowsError, DataError
from attnbalance.finetuning.examples import IGNORED, Example, examples_of
from attnbalance.finetuning.labelled_logits import answer_logits
from attnbalance.finetuning.objectives.base_model import prompts_of
from attnbalance.models.hooked import HookedModel
from attnbalance.progress import progress_bar

TRIED = 50
"""The largest number of facts of a relation that the base is asked in each form."""

CHOSEN = "best form"
"""The name of the target that holds the index in `FORMS` of the form chosen for the example's relation."""


@dataclass(frozen=True)
class Rated:
    """The best form of a relation, and which of its facts the base completes in it."""

    form: str
    """One of `FORMS`."""
    asked: tuple[Prompt, ...]
    """The facts' own prompts: those of the facts that were drawn."""
    hits: tuple[bool, ...]
    """Whether the base completes each of them, asked in the form."""


def choose_forms(
    examples: Sequence[Example],
    base: HookedModel,
    batch_size: int,
    seed: int,
    progress: bool = False,
    *,
    warned: bool = True,
) -> dict[str, str]:
    """For each relation of some facts, the form in which the base completes most of them (see `rate_forms`).

    If `warned`, warns about relations of which the base completes less in that form than a constant answer gets right
    (see `least_share`).
    """
    best, weak = dict[str, str](), list[str]()
    for relation, rated in rate_forms(examples, base, batch_size, seed, progress).items():
        best[relation] = rated.form
        completed = sum(rated.hits) / len(rated.hits)
        constant = Counter(prompt.fact.answer for prompt in rated.asked).most_common(1)[0][1] / len(rated.asked)
        if completed < least_share(constant):
            rates = f"{100 * completed:.1f}% as {rated.form}, a constant answer {100 * constant:.1f}%"
            weak.append(f"{relation} ({rates})")
    if weak and warned:
        warnings.warn(
            f"In no form does the base complete as many facts as a constant answer gets right: {', '.join(weak)}. "
            "What it says of them is not worth keeping; train on ce alone, or replay facts that it knows",
            stacklevel=2,
        )
    return best


def least_share(constant: float) -> float:
    """The share of facts that a base must complete in a form that is worth teaching from.

    It is what a constant answer gets right; but half where that is all, since one answer for all facts is no measure of
    what the base knows.
    """
    return constant if constant < 1 else 0.5


def rate_forms(
    examples: Sequence[Example], base: HookedModel, batch_size: int, seed: int, progress: bool = False
) -> dict[str, Rated]:
    """For each relation, the form in which the base completes most of its facts.

    If it completes equally many in several forms (none, if all facts are new), the one with the highest mean
    log-probability of the right answers is chosen.

    At most `TRIED` facts of a relation are asked. A form takes part if it can ask about all facts of the relation: the
    few-shot forms need enough subjects, and each must fit the model's positions (a warning names the fact that does
    not). Raises `DataError` for a relation that no form can ask about.

    Args:
        examples: The facts' examples.
        base: The base model, with its adapters switched off.
        batch_size: Examples of one forward pass.
        seed: Seed that draws the facts and the few shots.
        progress: Whether to draw a progress bar.
    """
    prompts = list({prompt.prompt_id: prompt for prompt in prompts_of(examples)}.values())
    rated, relations = dict[str, Rated](), list(dict.fromkeys(prompt.fact.relation for prompt in prompts))
    tried = [(relation, form) for relation in relations for form in FORMS]
    bar = progress_bar("which forms the base knows", items=tried, unit="form", shown=progress)
    for relation, forms in itertools.groupby(bar, key=lambda pair: pair[0]):
        own = [prompt for prompt in prompts if prompt.fact.relation == relation]
        drawn = random.Random(seed).sample(range(len(own)), min(TRIED, len(own)))  # noqa: S311
        predicted = {form: _in_form(form, own, drawn, base, batch_size, seed) for _, form in forms}
        predicted = {form: hits for form, hits in predicted.items() if hits}
        if not predicted:
            raise DataError(f"no form can ask about the facts of relation {relation!r}: {', '.join(FORMS)} were tried")
        form = max(predicted, key=lambda form: [sum(column) for column in zip(*predicted[form], strict=True)])
        rated[relation] = Rated(form, tuple(own[i] for i in drawn), tuple(hit for hit, _ in predicted[form]))
    return rated


def _in_form(
    form: str, prompts: Sequence[Prompt], drawn: Sequence[int], base: HookedModel, batch_size: int, seed: int
) -> list[tuple[bool, float]]:
    """Whether the base completes each drawn fact of one relation in a form, and the answer's log-probability.

    Empty if the form cannot ask about all facts of the relation.
    """
    try:
        asked = examples_of(in_form(form, prompts, seed), base.tokenizer, end=False, max_positions=base.max_positions)
    except BadRowsError as error:
        warnings.warn(f"{prompts[0].fact.relation!r} is not asked as {form}: {error}", stacklevel=2)
        return []
    except DataError:  # too few subjects, or a chat after which no question can follow
        return []
    return _predicted([asked[i] for i in drawn], base, batch_size)


def completions(asked: Sequence[Example], base: HookedModel, batch_size: int) -> list[bool]:
    """Whether the base predicts each answer: each of its tokens is the most probable after the right ones before it."""
    return [hit for hit, _ in _predicted(asked, base, batch_size)]


def _predicted(asked: Sequence[Example], base: HookedModel, batch_size: int) -> list[tuple[bool, float]]:
    """Whether the base predicts each answer, and the answer's log-probability."""
    wanted = [torch.tensor([label for label in example.labels if label != IGNORED]) for example in asked]
    predicted = dict[int, tuple[bool, float]]()
    for i, logits in itertools.chain.from_iterable(answer_logits(base, asked, batch_size)):
        answer = wanted[i].to(logits.device)
        chances = logits.log_softmax(-1).gather(-1, answer[:, None])
        predicted[i] = bool((logits.argmax(-1) == answer).all()), float(chances.sum())
    return [predicted[i] for i in range(len(asked))]


def form_targets(examples: Sequence[Example], best: Mapping[str, str]) -> list[dict[str, Tensor]]:
    """The target `CHOSEN` of each example."""
    return [{CHOSEN: torch.tensor(FORMS.index(best[prompt.fact.relation]))} for prompt in prompts_of(examples)]


def chosen_forms(examples: Sequence[Example]) -> dict[str, str]:
    """The form of each relation, read from the targets of examples; empty if they have none."""
    return {
        prompt.fact.relation: FORMS[int(example.targets[CHOSEN])]
        for example, prompt in zip(examples, prompts_of(examples), strict=True)
        if CHOSEN in example.targets
    }
