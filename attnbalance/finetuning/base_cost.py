"""What it costs to ask the base model before training: how many prompts, and about how long they take."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence

from tqdm import tqdm

from attnbalance.data.forms import BEST, FORMS
from attnbalance.finetuning.completion import ASKED
from attnbalance.finetuning.examples import Example, about_facts
from attnbalance.finetuning.labelled_logits import answer_logits
from attnbalance.finetuning.objectives.base_model import has_replay, held_to_base, prompts_of, without_adapters
from attnbalance.finetuning.objectives.best_forms import TRIED
from attnbalance.finetuning.objectives.objective import Objective
from attnbalance.models.hooked import HookedModel


def prompts_asked(train: Sequence[Example], evaluated: Sequence[Example], objective: Objective) -> int:
    """The number of prompts that the base reads for an objective: forms to choose from, completion rates, targets."""
    facts, tested = ({id(example): example for example in about_facts(part)} for part in (train, evaluated))
    every = {**facts, **tested}.values()
    held = held_to_base(facts.values())
    count = 0
    if BEST in objective.forms:
        prompts = {prompt.prompt_id: prompt.fact.relation for prompt in prompts_of(held)}
        count += len(FORMS) * sum(min(TRIED, own) for own in Counter(prompts.values()).values())
    if objective.forms and not has_replay(held):
        count += len({*objective.forms, "question"}) * min(ASKED, len(facts))
    kinds = [term.kind for term in objective.terms if term.kind.make_targets is not None]
    return count + sum(len(every if kind.learns_answers else held_to_base(every, held)) for kind in kinds)


def announce(
    examples: Sequence[Example], evaluated: int, objective: Objective, base: HookedModel, batch_size: int
) -> None:
    """Write to stderr how many prompts the base will be asked, and the time that follows from a first batch of them.

    The last `evaluated` examples are those of evaluations.
    """
    facts = list({id(example): example for example in about_facts(examples)}.values())
    if not facts:
        return
    with without_adapters(base.model):
        started = time.perf_counter()
        first = facts[:batch_size]
        for _ in answer_logits(base, first, batch_size):
            pass
    trained = len(examples) - evaluated
    count = prompts_asked(examples[:trained], examples[trained:], objective)
    seconds = (time.perf_counter() - started) / len(first) * count
    duration = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    each = f"{count / len(facts):.1f} for each fact"
    tqdm.write(f"Before training, the base is asked {count:,} prompts ({each}), about {duration}.", file=sys.stderr)
