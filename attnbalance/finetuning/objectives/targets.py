"""Adds the base model's numbers to examples: what an objective compares with, computed once, before training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from attnbalance.data.forms import BEST
from attnbalance.finetuning.examples import Example
from attnbalance.finetuning.objectives.base_model import BaseModel, check_start, without_adapters
from attnbalance.finetuning.objectives.best_forms import choose_forms, chosen_forms, form_targets
from attnbalance.finetuning.objectives.mapped import collected
from attnbalance.finetuning.objectives.objective import Objective, Targets
from attnbalance.models.hooked import HookedModel


def add_targets(
    examples: Sequence[Example],
    objective: Objective,
    base: HookedModel,
    *,
    batch_size: int = 64,
    seed: int = 0,
    among: Sequence[Example] = (),
    folder: str | Path | None = None,
) -> list[Example]:
    """The examples with all numbers of the base model that the objective's terms need; unchanged if none does.

    Raises `DataError` for examples without prompts and for relations with too few subjects for few shots,
    `BadRowsError` for labels that cannot follow another form, as they do not begin with an accepted answer,
    `ModelError` for adapters that changed the base (see `check_start`), `OutputError` if `folder` is full.

    Args:
        examples: What to add numbers to; examples must have prompts.
        objective: The objective whose terms say which numbers.
        base: The base model; its adapters are switched off meanwhile, so the model to be trained may be passed.
        batch_size: Examples of one forward pass.
        seed: Seed that draws the few shots, once for each relation.
        among: The training examples, with their targets, if `examples` are others: these then take their few shots
            and their relations' forms from them, and the ranks of `weighted-ce(salience)` are among theirs.
        folder: Where numbers that fill more than half a GiB are kept, in files that are removed with them; by default
            the system's folder for temporary files.
    """
    makers = [(term, make) for term in objective.terms if (make := term.kind.make_targets) is not None]
    if not makers:
        return list(examples)
    check_start(base.model, objective.text)
    result = list(examples)
    with without_adapters(base.model):
        best = chosen_forms(among)
        if BEST in objective.forms and not among:
            best = choose_forms(examples, base, batch_size, seed)
            result = _with(result, form_targets(examples, best))
        asked = BaseModel(base, batch_size, seed, among, best)
        for term, make in makers:
            numbers = collected(make(term, examples, asked), folder)
            result = _with(result, [numbers[i] for i in range(len(examples))])
    return result


def _with(examples: Sequence[Example], targets: Sequence[Targets]) -> list[Example]:
    """The examples with further targets."""
    pairs = zip(examples, targets, strict=True)
    return [replace(example, targets={**example.targets, **added}) for example, added in pairs]
