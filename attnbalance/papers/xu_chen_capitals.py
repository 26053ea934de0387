"""Xu & Chen (2025), section 7.1: a language model finetuned on PopQA's frequent or rare capitals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from attnbalance.data.scoring import EXACT_MATCH
from attnbalance.finetuning.splits import Split, split_facts
from attnbalance.papers.figure import (
    OURS,
    Cell,
    CellResult,
    Claim,
    Condition,
    Panel,
    PaperFigure,
    Series,
    minus,
    over_seeds,
)
from attnbalance.papers.finetuned import (
    BASE,
    UNTRAINED,
    by_tuned,
    cell_workload,
    grid_cells,
    grid_condition,
    model_condition,
    run_cell,
    untrained,
    with_tested,
)
from attnbalance.papers.sources import Sources, facts_of
from attnbalance.readings.recall import NEW_TOKENS

TEMPLATE = "Question: Where is the capital of {subject}? Answer:"
"""Appendix L."""

HALVES = ("top", "bottom")
RATES: dict[str, tuple[float, ...]] = {"tiny": (1e-3,), "small": (3e-5, 1e-4), "paper": (3e-6, 1e-5, 3e-5, 1e-4)}
"""Learning rates that are tried; the one with the lowest validation loss counts."""

TRAINING: dict[str, dict[str, Any]] = {
    "tiny": {"steps": 2, "batch_size": 4, "checkpoint_every": 1},
    "small": {"steps": 40, "batch_size": 16, "checkpoint_every": 5},
    "paper": {"steps": 40, "batch_size": 128, "checkpoint_every": 2},
}
"""Appendix J.4: all weights, batches of 128, weight decay 0.01, a constant rate."""

TESTED = {"tiny": 20, "small": None, "paper": None}
"""Tested facts, drawn anew for each seed; None: all that are held out."""

HELDOUT = 0.2
"""The share of the subjects that is tested. The paper's percentages fit 129 questions, a fifth of PopQA's 645 rows.
Rows of one name are merged here, which leaves 622 facts."""

LEAST = 0.01
"""The smallest difference in exact matches or F1 that counts: one percentage point."""

PARAMETERS = (1e9, 1.5e9)
"""What counts as a model of the paper's size."""


def _cells(scale: str, seeds: Sequence[int], sources: Sources) -> list[Cell]:
    known = {**sources.of_facts(), **sources.of_model(), "tested": TESTED[scale], "new tokens": NEW_TOKENS}
    configurations = [{"learning_rate": rate} for rate in RATES[scale]]
    training = TRAINING[scale] | {"template": TEMPLATE, "weight_decay": 0.01}
    return grid_cells("capitals", scale, seeds, HALVES, configurations, training, known)


def _split(settings: Mapping[str, Any]) -> Split:
    """A half of the training facts by popularity, and held-out facts, the same for both halves."""
    half = HALVES[0] if settings["split"] == BASE else settings["split"]
    split = split_facts(facts_of(settings, ["capital"]), half, heldout=HELDOUT, seed=settings["seed"])
    return with_tested(split, settings)


def exact_matches(values: Mapping[str, Any]) -> float:
    """The share of answers that are an accepted one, by SQuAD's rule."""
    return float(np.mean(values["right"][EXACT_MATCH]))


def mean_f1(values: Mapping[str, Any]) -> float:
    """The mean of SQuAD's F1."""
    return float(np.mean(values["f1"]))


MEASURES = {"exact matches": exact_matches, "F1": mean_f1}
PRINTED = {"exact matches": (26.36, 20.93), "F1": (28.68, 22.74)}
"""The paper's percent for the frequent and the rare half."""


def _panels(results: Sequence[CellResult]) -> list[Panel]:
    methods = (*UNTRAINED, *(f"FT-{half}" for half in HALVES))
    panels = []
    for name, measure in MEASURES.items():
        shares = [[measure(values) for values in untrained(results, method)] for method in UNTRAINED]
        shares += [list(by_tuned(results, half, measure)) for half in HALVES]
        points = Series(OURS, methods, over_seeds(list(zip(*shares, strict=True))))
        top, bottom = PRINTED[name]
        printed = Series.printed("Llama-3.2-1B", {"FT-top": top, "FT-bottom": bottom})
        panels.append(Panel(name, "", f"{name}, held-out capitals", (points, printed)))
    return panels


def _claims(results: Sequence[CellResult]) -> list[Claim]:
    setting: tuple[Condition, ...] = (
        model_condition(results, "a base model of 1 billion parameters", *PARAMETERS),
        grid_condition(results, "batches of 128"),
    )
    return [
        Claim(
            f"finetuning on frequent facts gives more {name} than on rare facts",
            f"difference in {name} on held-out facts",
            minus(*(by_tuned(results, half, measure) for half in HALVES)),
            place="Section 7.1, table",
            least=LEAST,
            printed="{}% against {}%".format(*PRINTED[name]),
            setting=setting,
        )
        for name, measure in MEASURES.items()
    ]


_ABOUT = (
    "All weights of a real language model (--model) are finetuned on the popular or on the obscure half of PopQA's "
    "capitals, asked as 'Question: Where is the capital of ...? Answer:'. A fifth of the subjects is held out and "
    "tested. The learning rate and the checkpoint of each half are those with the lowest validation loss (a tenth of "
    "the half). Answers have at most ten tokens; an exact match, and F1, are of their first line. Departures: the "
    "rates and at most 40 steps are ours, and training stops after three validations without improvement (the paper "
    "has one rate and a number of epochs); so is the split (129 tested questions fit the paper's percentages), and "
    "rows of one name are merged. At small scale the batches are of 16."
)

FIGURES = (
    PaperFigure(
        "xu-chen-capitals",
        "Xu & Chen 2025",
        "Section 7.1, table",
        _ABOUT,
        _cells,
        partial(run_cell, _split),
        _panels,
        _claims,
        needs=("model",),
        workload=partial(cell_workload, _split),
    ),
)
