"""Adds the base model's numbers to examples: what an objective compares with, computed once, before training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from attnbalance.data.forms import BEST
from attnbalance.errors import BadRowsError, DataError
from attnbalance.finetuning.examples import IGNORED, POSITIONS, REPLAYED, TOKENS, Example, about_facts
from attnbalance.finetuning.objectives.base_model import (
    BaseModel,
    check_start,
    has_replay,
    held_to_base,
    without_adapters,
)
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

    Where facts are replayed, here or among others, the base is asked these alone: terms compare no others with it.
    Examples that are not compared, and those about no fact, get ones as the terms' numbers.

    Raises `DataError` if no example has a prompt, for relations with too few subjects for few shots, and if no
    replayed fact is among the examples of a run with replay;
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
    facts, among = about_facts(examples), about_facts(among)
    if not facts and not among:
        raise DataError(
            f"objective {objective.text!r} needs examples about facts, but none of {len(examples)} has a prompt; make "
            "them with make_examples or as_examples"
        )
    held, replays = held_to_base(facts, among), has_replay((*facts, *among))
    if not held and not among:
        raise DataError("the steps read none of the replayed facts; train for more steps, or replay nothing")
    numbers: dict[int, dict[str, Tensor]] = {id(example): {} for example in examples}
    with without_adapters(base.model):
        best = chosen_forms(among)
        if BEST in objective.forms and among and not best:
            raise DataError("`among` must have the targets that add_targets gave the training examples")
        if BEST in objective.forms and not among:
            needed = not (replays and objective.keeps_answers)  # else what the base says takes no label's place
            best = choose_forms(held, base, batch_size, seed, progress, warned=needed)
            _add(numbers, held, form_targets(held, best))
        model = BaseModel(base, batch_size, seed, among, best)
        for term, make in makers:
            asked = facts if term.kind.learns_answers else held
            title = f"the base's numbers for {term.key}"
            with progress_bar(title, total=len(asked), unit="fact", shown=progress and bool(asked)) as bar:
                try:
                    made = collected(_counting(make(term, asked, model), bar), folder) if asked else {}
                except BadRowsError:
                    raise
                except DataError as error:
                    about = "of the replayed facts, which alone are held to the base: " if replays else ""
                    raise DataError(f"{about}{error}") from error
            _add(numbers, asked, [made[i] for i in range(len(asked))])
    keys = tuple(term.key for term, _ in makers)
    known = [*(example.targets for example in among[:1]), *(numbers[id(each)] for each in (*facts[:1], *held[:1]))]
    like = {name: target for targets in known for name, target in targets.items() if name.startswith(keys)}
    marked = {REPLAYED: torch.tensor(False)} if replays else {}
    return [
        replace(example, targets={**_blank(example, like), **marked, **example.targets, **numbers[id(example)]})
        for example in examples
    ]


def _counting(numbers: Iterable[tuple[int, Targets]], bar: tqdm) -> Iterator[tuple[int, Targets]]:
    for pair in numbers:
        yield pair
        bar.update()


def _blank(example: Example, like: Targets) -> Targets:
    """Ones of the shapes that another example's targets would have for this one; they take no memory."""
    tokens = sum(label != IGNORED for label in example.labels[1:])
    shapes = {
        name: (tokens, *target.shape[1:]) if name.endswith(TOKENS) else target.shape for name, target in like.items()
    }
    shapes |= {name: (*shape[:-1], 1) for name, shape in shapes.items() if name.endswith(POSITIONS)}
    return {name: torch.ones((), dtype=like[name].dtype).expand(shape) for name, shape in shapes.items()}


def _add(numbers: dict[int, dict[str, Tensor]], examples: Sequence[Example], targets: Sequence[Targets]) -> None:
    """Add targets of examples to the numbers of each, which are known by the example's identity."""
    for example, added in zip(examples, targets, strict=True):
        numbers[id(example)] |= added
