"""Adds the base model's numbers to examples: what an objective compares with, computed once, before training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from attnbalance.data.forms import BEST
from attnbalance.errors import DataError
from attnbalance.finetuning.examples import IGNORED, POSITIONS, TOKENS, Example, about_facts
from attnbalance.finetuning.objectives.base_model import BaseModel, check_start, without_adapters
from attnbalance.finetuning.objectives.best_forms import choose_forms, chosen_forms, form_targets
from attnbalance.finetuning.objectives.mapped import collected
from attnbalance.finetuning.objectives.objective import Objective, Targets
from attnbalance.models.hooked import HookedModel
from attnbalance.progress import progress_bar
from attnbalance.seeds import check_seed


def add_targets(
    examples: Sequence[Example],
    objective: Objective,
    base: HookedModel,
    *,
    batch_size: int = 64,
    seed: int = 0,
    among: Sequence[Example] = (),
    folder: str | Path | None = None,
    progress: bool = False,
) -> list[Example]:
    """The examples with all numbers of the base model that the objective's terms need; unchanged if none does.

    Examples about no fact get ones as the terms' numbers: they have no loss that compares, and a weight of 1.

    Raises `DataError` if no example has a prompt and for relations with too few subjects for few shots,
    `BadRowsError` for labels that cannot follow another form, as they do not begin with an accepted answer,
    `ModelError` for adapters that changed the base (see `check_start`), `OutputError` if `folder` is full.

    Args:
        examples: What to add numbers to.
        objective: The objective whose terms say which numbers.
        base: The base model; its adapters are switched off meanwhile, so the model to be trained may be passed.
        batch_size: Examples of one forward pass.
        seed: Seed that draws the few shots, once for each relation.
        among: The training examples, with their targets, if `examples` are others: these then take their few shots
            and their relations' forms from them, `weighted-ce` compares their answers with theirs, and the ranks of
            `weighted-ce(salience)` are among theirs.
        folder: Where numbers that fill more than half a GiB are kept, in files that are removed with them; by default
            the system's folder for temporary files.
        progress: Whether to draw progress bars.
    """
    check_seed(seed)
    makers = [(term, make) for term in objective.terms if (make := term.kind.make_targets) is not None]
    if not makers:
        return list(examples)
    check_start(base.model, objective.text)
    asked, among = about_facts(examples), about_facts(among)
    if not asked and not among:
        raise DataError(
            f"objective {objective.text!r} needs examples about facts, but none of {len(examples)} has a prompt; make "
            "them with make_examples or as_examples"
        )
    result = asked
    with without_adapters(base.model):
        best = chosen_forms(among)
        if BEST in objective.forms and among and not best:
            raise DataError("`among` must have the targets that add_targets gave the training examples")
        if BEST in objective.forms and not among:
            best = choose_forms(asked, base, batch_size, seed, progress)
            result = _with(result, form_targets(asked, best))
        model = BaseModel(base, batch_size, seed, among, best)
        for term, make in makers if asked else ():
            title = f"the base's numbers for {term.key}"
            with progress_bar(title, total=len(asked), unit="fact", shown=progress) as bar:
                numbers = collected(_counting(make(term, asked, model), bar), folder)
            result = _with(result, [numbers[i] for i in range(len(asked))])
    keys = tuple(term.key for term, _ in makers)
    like = {name: target for name, target in (result or among)[0].targets.items() if name.startswith(keys)}
    with_numbers = iter(result)
    return [
        replace(example, targets=_blank(example, like)) if example.prompt is None else next(with_numbers)
        for example in examples
    ]


def _counting(numbers: Iterable[tuple[int, Targets]], bar: tqdm) -> Iterator[tuple[int, Targets]]:
    for pair in numbers:
        yield pair
        bar.update()


def _blank(example: Example, like: Targets) -> Targets:
    """Ones of the shapes that another example's targets would have for this one."""
    tokens = sum(label != IGNORED for label in example.labels[1:])
    shapes = {
        name: (tokens, *target.shape[1:]) if name.endswith(TOKENS) else target.shape for name, target in like.items()
    }
    shapes |= {name: (*shape[:-1], 1) for name, shape in shapes.items() if name.endswith(POSITIONS)}
    return {name: torch.ones(shape, dtype=like[name].dtype) for name, shape in shapes.items()}


def _with(examples: Sequence[Example], targets: Sequence[Targets]) -> list[Example]:
    """The examples with further targets."""
    pairs = zip(examples, targets, strict=True)
    return [replace(example, targets={**example.targets, **added}) for example, added in pairs]
