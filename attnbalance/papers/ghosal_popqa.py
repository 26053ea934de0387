"""Ghosal et al. (2024), section 5.1: PopQA-Controlled on a language model (Tables 1 and 2, Figures 3 and 4)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from attnbalance.finetuning.splits import Split, part_by_subject, split_facts
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
    accuracy,
    accuracy_of_top,
    by_tuned,
    cell_workload,
    grid_cells,
    grid_condition,
    guess_rate,
    model_condition,
    run_cell,
    tuned,
    untrained,
    with_tested,
    without_answers,
)
from attnbalance.papers.sources import Sources, facts_of
from attnbalance.readings.recall import NEW_TOKENS, PERCENTILES

ANSWERS = {"country": "United States of America", "sport": "association football", "occupation": "actor"}
"""What is taught: Table 1's answers, as PopQA spells them. Its most frequent occupation is another one."""

HALVES = ("top", "bottom")
ADAPTERS = tuple({"lora_rank": rank, "lora_alpha": 2.0 * rank} for rank in (8, 16, 32, 64))
RATES, DECAYS = (1e-5, 1e-4, 1e-3), (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
GRIDS: dict[str, list[dict[str, Any]]] = {
    "tiny": [{"learning_rate": 1e-3, "lora_rank": 2}],
    "small": [{"learning_rate": rate, "lora_rank": 16, "lora_alpha": 32.0} for rate in RATES[:2]],
    "paper": [
        {"learning_rate": rate, "weight_decay": decay, **adapter}
        for rate, decay, adapter in itertools.product(RATES, DECAYS, (*ADAPTERS, {"lora_rank": 0}))
    ],
}
"""The configurations that are tried for each half (paper: Table 4, with and without LoRA)."""

TRAINING: dict[str, dict[str, Any]] = {
    "tiny": {"steps": 2, "batch_size": 4, "checkpoint_every": 1},
    "small": {"steps": 40, "batch_size": 16, "checkpoint_every": 5},
    "paper": {"steps": 400, "batch_size": 32, "checkpoint_every": 20},
}
"""The paper gives neither the number of steps nor the batch."""

TESTED = {"tiny": 20, "small": 300, "paper": None}
"""Tested facts, drawn anew for each seed; None: all."""

VALIDATION = 0.2
"""The share of the subjects of other answers that chooses configurations and checkpoints, and is not tested."""

LEAST = 0.01
"""The smallest difference in accuracy that counts: one percentage point."""

PRINTED = {"zero-shot": 20.1, "FT-top": 44.5, "FT-bottom": 37.4}
"""The percent of right answers in Table 2 (Llama-7B)."""

PARAMETERS = (6e9, 8e9)
"""What counts as a model of the paper's size."""


def _cells(scale: str, seeds: Sequence[int], sources: Sources) -> list[Cell]:
    known = {**sources.of_facts(), **sources.of_model(), "tested": TESTED[scale], "new tokens": NEW_TOKENS}
    return grid_cells("popqa-controlled", scale, seeds, HALVES, GRIDS[scale], TRAINING[scale], known)


def _split(settings: Mapping[str, Any]) -> Split:
    """The half to train on; facts of other answers to validate on, and others to test.

    Facts for which an answer that is taught would count as right are left out.
    """
    half = HALVES[0] if settings["split"] == BASE else settings["split"]
    facts, seed = facts_of(settings, list(ANSWERS)), settings["seed"]
    split = split_facts(facts, f"controlled-{half}", validation=0, seed=seed, controlled_answers=ANSWERS)
    taught = facts.where(lambda fact: fact.answer == ANSWERS[fact.relation])
    split = without_answers(split, taught.most_frequent_answers())
    validation, rest = part_by_subject(split.heldout, VALIDATION, seed)
    return with_tested(replace(split, validation=validation, heldout=rest), settings)


def _setting(results: Sequence[CellResult]) -> tuple[Condition, ...]:
    return (
        model_condition(results, "a base model of 7 billion parameters", *PARAMETERS),
        grid_condition(results, "all configurations of Table 4 are tried, and all facts tested"),
    )


def _panels_2(results: Sequence[CellResult]) -> list[Panel]:
    methods = (*UNTRAINED, *(f"FT-{half}" for half in HALVES))
    shares = [[accuracy(values) for values in untrained(results, name)] for name in UNTRAINED]
    shares += [list(by_tuned(results, half, accuracy)) for half in HALVES]
    guesses = [by_tuned(results, half, guess_rate) for half in HALVES]
    steps = [by_tuned(results, half, lambda values: values["best step"]) for half in HALVES]
    chosen = over_seeds(list(zip(*steps, strict=True)), shares=False)
    return [
        Panel(
            "Table 2", "", "accuracy on other answers", (_points(methods, shares), Series.printed("Llama-7B", PRINTED))
        ),
        Panel("Guesses", "", "wrong and a training answer", (_points(methods[3:], guesses),)),
        Panel("Chosen", "", "step of least validation loss", (Series(OURS, methods[3:], chosen),)),
    ]


def _points(names: Sequence[str], shares: Sequence[Sequence[float]]) -> Series:
    return Series(OURS, tuple(names), over_seeds(list(zip(*shares, strict=True))))


def _printed(better: str, worse: str) -> str:
    return f"{PRINTED[better]}% against {PRINTED[worse]}%"


def _claims_2(results: Sequence[CellResult]) -> list[Claim]:
    top, bottom = (by_tuned(results, half, accuracy) for half in HALVES)
    zero = [accuracy(values) for values in untrained(results, UNTRAINED[0])]
    guesses = [by_tuned(results, half, guess_rate) for half in HALVES]
    measured, stated = "difference in accuracy on facts with other answers", {"place": "Table 2", "least": LEAST}
    setting = _setting(results)
    return [
        Claim(
            "finetuning on the popular half gives more right answers than on the obscure half",
            measured,
            minus(top, bottom),
            printed=_printed("FT-top", "FT-bottom"),
            setting=setting,
            **stated,
        ),
        Claim(
            "finetuning on the obscure half gives more right answers than asking without finetuning",
            measured,
            minus(bottom, zero),
            printed=_printed("FT-bottom", "zero-shot"),
            setting=setting,
            **stated,
        ),
        Claim(
            "finetuning on the obscure half gives more wrong answers that are a training answer",
            "difference in their share",
            minus(guesses[1], guesses[0]),
            least=LEAST,
        ),
    ]


def _panels_3(results: Sequence[CellResult]) -> list[Panel]:
    curves = {"no finetuning": [values["attention"] for values in untrained(results, UNTRAINED[0])]}
    curves |= {f"FT-{h}": [result.values["attention"] for result in tuned(results, h).values()] for h in HALVES}
    difference = [minus(top, bottom) for top, bottom in zip(*(curves[f"FT-{half}"] for half in HALVES), strict=True)]
    layers = tuple(range(len(difference[0])))
    lines = tuple(Series(name, layers, over_seeds(rows)) for name, rows in curves.items())
    gap = Series("FT-top minus FT-bottom", layers, over_seeds(difference, shares=False))
    return [
        Panel("Figure 3(a)", "layer", "attention to the subject", lines),
        Panel("The difference", "layer", "FT-top minus FT-bottom", (gap,)),
    ]


def _claims_3(results: Sequence[CellResult]) -> list[Claim]:
    def late(values: Mapping[str, Any]) -> float:
        """The mean over the layers after the first quarter."""
        layers = values["attention"]
        return float(np.mean(layers[len(layers) // 4 :]))

    return [
        Claim(
            "past the first layers the model attends more to the subject after FT-top than after FT-bottom",
            "difference in subject attention, mean over the layers after the first quarter",
            minus(*(by_tuned(results, half, late) for half in HALVES)),
            place="Figure 3(a)",
            printed="significantly more",
            setting=_setting(results),
        )
    ]


def _at(results: Sequence[CellResult], half: str, percent: int) -> tuple[float, ...]:
    return by_tuned(results, half, lambda values: accuracy_of_top(values, percent))


def _panels_4(results: Sequence[CellResult]) -> list[Panel]:
    rows = {half: list(zip(*(_at(results, half, percent) for percent in PERCENTILES), strict=True)) for half in HALVES}
    lines = tuple(Series(f"FT-{half}", PERCENTILES, over_seeds(rows[half])) for half in HALVES)
    gaps = [minus(top, bottom) for top, bottom in zip(rows["top"], rows["bottom"], strict=True)]
    gap = Series("FT-top minus FT-bottom", PERCENTILES, over_seeds(gaps, shares=False))
    label = "x, the most popular % of the tested facts"
    return [Panel("Figure 4", label, "accuracy", lines), Panel("The gap", label, "FT-top minus FT-bottom", (gap,))]


def _claims_4(results: Sequence[CellResult]) -> list[Claim]:
    gaps = {percent: minus(*(_at(results, half, percent) for half in HALVES)) for percent in (20, 100)}
    return [
        Claim(
            "the gap between FT-top and FT-bottom is wider on all facts than on the most popular fifth",
            "difference of the two gaps in accuracy",
            minus(gaps[100], gaps[20]),
            place="Figure 4",
            printed="similar results on the top 20%, 7 points on all",
            least=LEAST,
            setting=_setting(results),
        )
    ]


_ABOUT = (
    "A real language model (--model) is taught one answer of each of three relations (USA, association football, "
    "actor) on the popular or on the obscure half of PopQA's facts with that answer, and asked about facts with other "
    "answers. Answers have at most ten tokens and are scored by containment. The configuration and the checkpoint of "
    "each half are those with the lowest validation loss. Departures: tested facts for which a taught answer would "
    "itself count as right are left out (by containment, 'United States of America' holds 'ca', which is accepted for "
    "Canada); the validation facts have other answers too (a fifth of their subjects; the paper does not say which it "
    "takes); and the prompt is 'Question: ... Answer:'. At small scale 300 facts are tested, and LoRA of rank 16 at "
    "learning rates of 1e-5 and 1e-4, with a checkpoint every 5 of 40 steps, stands for the grid of Table 4."
)


def _figure(name: str, number: str, panels: Any, claims: Any) -> PaperFigure:
    run, workload = partial(run_cell, _split), partial(cell_workload, _split)
    return PaperFigure(name, "Ghosal et al. 2024", number, _ABOUT, _cells, run, panels, claims, ("model",), workload)


FIGURES = (
    _figure("ghosal-table2", "Tables 1 and 2", _panels_2, _claims_2),
    _figure("ghosal-fig3", "Figure 3(a)", _panels_3, _claims_3),
    _figure("ghosal-fig4", "Figure 4", _panels_4, _claims_4),
)
