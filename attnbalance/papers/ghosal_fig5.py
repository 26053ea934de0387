"""Ghosal et al. (2024), section 5.2: popular, obscure, random and all facts to finetune a language model on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from attnbalance.data.facts import FactSet
from attnbalance.finetuning.splits import Split, split_facts
from attnbalance.papers.figure import (
    Cell,
    CellResult,
    Claim,
    Panel,
    PaperFigure,
    Series,
    best_elsewhere,
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
    model_condition,
    run_cell,
    untrained,
    with_tested,
)
from attnbalance.papers.ghosal_popqa import GRIDS, LEAST, PARAMETERS, TESTED, TRAINING
from attnbalance.papers.sources import Sources, facts_of
from attnbalance.readings.recall import NEW_TOKENS, PERCENTILES

SUBSETS: dict[str, tuple[str, float]] = {
    "top-30": ("top", 0.3),
    "top": ("top", 0.5),
    "top-70": ("top", 0.7),
    "random": ("random", 0.5),
    "bottom": ("bottom", 0.5),
    "whole": ("whole", 0.5),
}
"""What is trained on: a kind of split, and the share of the training subjects that it takes ("whole" takes all)."""

POPULAR = ("top-30", "top", "top-70")
"""The subsets of which the best stands against all facts."""

LIMIT = {"tiny": 200, "small": 2000, "paper": None}
"""Facts, drawn anew for each seed; None: all."""

FEWEST = 20
"""A relation with fewer facts is left out: too few would be left for examples before the untrained model's question."""

SLIGHT = 0.02
"""How much worse the random half may be to be "only slightly worse"."""


def _cells(scale: str, seeds: Sequence[int], sources: Sources) -> list[Cell]:
    known = {**sources.of_facts(), **sources.of_model(), "new tokens": NEW_TOKENS}
    known |= {"limit": LIMIT[scale], "tested": TESTED[scale]}
    return grid_cells("real-facts", scale, seeds, tuple(SUBSETS), GRIDS[scale], TRAINING[scale], known)


def common_relations(facts: FactSet) -> FactSet:
    """The facts of relations with at least `FEWEST` of them."""
    counts = Counter(fact.relation for fact in facts)
    return facts.of_relations([relation for relation, count in counts.items() if count >= FEWEST])


def _split(settings: Mapping[str, Any]) -> Split:
    """A subset of the training facts, and held-out facts, the same for all subsets.

    Of the untrained model, the examples before a question come from all training facts, as does the constant answer.
    """
    seed, limit = settings["seed"], settings["limit"]
    facts = facts_of(settings)
    facts = common_relations(facts if limit is None else facts.sample(limit, seed))
    untuned = settings["split"] == BASE
    kind, share = SUBSETS["whole" if untuned else settings["split"]]
    split = split_facts(facts, kind, seed=seed, share=share, validation=0 if untuned else 0.1)
    return with_tested(split, settings)


def _at(results: Sequence[CellResult], subset: str, percent: int) -> tuple[float, ...]:
    return by_tuned(results, subset, lambda values: accuracy_of_top(values, percent))


def _panels(results: Sequence[CellResult]) -> list[Panel]:
    lines = []
    for subset in SUBSETS:
        rows = list(zip(*(_at(results, subset, percent) for percent in PERCENTILES), strict=True))
        lines.append(Series(f"FT-{subset}", PERCENTILES, over_seeds(rows)))
    methods = (*UNTRAINED, *(f"FT-{subset}" for subset in SUBSETS))
    shares = [[accuracy(values) for values in untrained(results, name)] for name in UNTRAINED]
    shares += [list(by_tuned(results, subset, accuracy)) for subset in SUBSETS]
    points = Series("all tested facts", methods, over_seeds(list(zip(*shares, strict=True))))
    label = "x, the most popular % of the tested facts"
    return [Panel("Figure 5", label, "accuracy", tuple(lines)), Panel("All", "", "accuracy", (points,))]


def best_popular(results: Sequence[CellResult]) -> tuple[float, ...]:
    """For each seed, accuracy after the popular subset that is best on the other seeds."""
    rows = list(zip(*(by_tuned(results, subset, accuracy) for subset in POPULAR), strict=True))
    return tuple(row[index] for row, index in zip(rows, best_elsewhere(rows), strict=True))


def _claims(results: Sequence[CellResult]) -> list[Claim]:
    setting = (
        model_condition(results, "a base model of 7 billion parameters", *PARAMETERS),
        grid_condition(results, "all configurations of Table 4 are tried, and all facts tested"),
    )
    rates = {subset: by_tuned(results, subset, accuracy) for subset in SUBSETS}
    gaps = [minus(_at(results, "top", percent), _at(results, "bottom", percent)) for percent in (100, 10)]
    measured = "difference in accuracy on held-out facts"

    def claim(says: str, values: tuple[float, ...], printed: str, least: float = LEAST) -> Claim:
        return Claim(says, measured, values, place="Figure 5", least=least, printed=printed, setting=setting)

    return [
        claim(
            "finetuning on the popular half gives more right answers than on the obscure half",
            minus(rates["top"], rates["bottom"]),
            "6 points on PopQA, 4 on EntityQuestions",
        ),
        claim(
            "finetuning on a random half gives more right answers than on the obscure half",
            minus(rates["random"], rates["bottom"]),
            "significantly more",
        ),
        claim(
            "finetuning on a random half is at most slightly worse than on the popular half",
            minus(rates["random"], rates["top"]),
            "only slightly worse",
            -SLIGHT,
        ),
        claim(
            "finetuning on the best popular subset is as good as on all facts, or better",
            minus(best_popular(results), rates["whole"]),
            "comparably or better",
            -LEAST,
        ),
        claim(
            "the gap between popular and obscure half is wider on all facts than on the most popular tenth",
            minus(*gaps),
            "widens away from the most popular 10%",
        ),
    ]


_ABOUT = (
    "A real language model (--model) is finetuned on parts of the facts of --facts (PopQA; a file of your own with "
    "popularity for EntityQuestions): the most popular 30, 50 and 70% of the training subjects, a random half, the "
    "least popular half, and all. Half of the subjects are held out and tested, the same for all parts. Answers have "
    "at most ten tokens and are scored by containment. The configuration and the checkpoint of each part are those "
    "with the lowest loss on a tenth of its subjects. The best popular part is chosen on the other seeds. Departures: "
    "relations with fewer than 20 facts are left out, the prompt is 'Question: ... Answer:', and the paper prints no "
    "split. At small scale, 2,000 facts are drawn for each seed and 300 tested, with ghosal-table2's small grid."
)

FIGURES = (
    PaperFigure(
        "ghosal-fig5",
        "Ghosal et al. 2024",
        "Figure 5",
        _ABOUT,
        _cells,
        partial(run_cell, _split),
        _panels,
        _claims,
        needs=("model",),
        workload=partial(cell_workload, _split),
    ),
)
