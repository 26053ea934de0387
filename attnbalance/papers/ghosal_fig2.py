"""Ghosal et al. (2024), Figure 2: the choice of finetuning facts, on a small multi-layer transformer."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from attnbalance.papers.figure import Cell, CellResult, Claim, Panel, PaperFigure, Series, by_seed, over_seeds
from attnbalance.papers.two_tokens import Sizes, finetune, pretrain
from attnbalance.statistics.intervals import seed_interval
from attnbalance.theory.triples import SPLITS, make_triples

ALPHAS = (0.25, 0.5, 1.0, 1.5, 2.0)
STEPS = {"small": (250, 500, 1000, 2000), "paper": (2500, 5000, 10_000, 20_000)}
USUAL_STEPS = {"small": 500, "paper": 5000}
WORLD = {
    "small": {"subjects": 500, "relations": 6, "answers": 120},
    "paper": {"subjects": 10_000, "relations": 10, "answers": 1000},
}
SIZES = {"small": Sizes(), "paper": Sizes(layers=4, d_model=256, batch_size=512, finetuning_steps=4000)}
MARGIN = 0.01
"""The margin of "no worse": one percentage point."""


def _deep_cell(scale: str, seed: int, alpha: float, steps: int) -> Cell:
    """The cell of one pretraining run. The usual one is finetuned on all splits, so all figures share it."""
    usual = alpha == 1.0 and steps == USUAL_STEPS[scale]
    settings = {"seed": seed, "alpha": alpha, "steps": steps, "splits": list(SPLITS if usual else ("top", "bottom"))}
    name = f"two-tokens-{scale}-alpha-{alpha:g}-steps-{steps}-seed-{seed}"
    return Cell(name, settings | {"world": WORLD[scale], "sizes": asdict(SIZES[scale])})


def _run_deep(settings: Mapping[str, Any]) -> dict[str, Any]:
    seed, sizes = settings["seed"], Sizes(**settings["sizes"])
    world = make_triples([seed], alpha=settings["alpha"], **settings["world"])
    model = pretrain(world, settings["steps"], seed, sizes)
    return {split: finetune(copy.deepcopy(model), world, split, seed, sizes) for split in settings["splits"]}


def _accuracy(result: CellResult, split: str) -> float:
    """Held-out accuracy at the last step, averaged over the five popularity groups."""
    return float(np.mean(result.values[split]["accuracy"][-1]))


def _gap(result: CellResult) -> float:
    return _accuracy(result, "top") - _accuracy(result, "bottom")


def _panels_2a(results: Sequence[CellResult]) -> list[Panel]:
    fifths, steps = tuple(map(str, range(1, 6))), tuple(results[0].values["top"]["steps"])
    last, along, attention = [], [], []
    for split in SPLITS:
        cells = [result.values[split] for result in results]
        last.append(Series(f"FT-{split}", fifths, over_seeds([cell["accuracy"][-1] for cell in cells])))
        means = [[float(np.mean(row)) for row in cell["accuracy"]] for cell in cells]
        along.append(Series(f"FT-{split}", steps, over_seeds(means)))
        last_layer = [[row[-1] for row in cell["subject attention"]] for cell in cells]
        attention.append(Series(f"FT-{split}", steps, over_seeds(last_layer)))
    return [
        Panel("By popularity", "fifth of the subjects, most popular first", "held-out accuracy", tuple(last)),
        Panel("During finetuning", "step", "held-out accuracy", tuple(along)),
        Panel("Attention, last layer", "step", "attention on the subject", tuple(attention)),
    ]


def _claims_2a(results: Sequence[CellResult]) -> list[Claim]:
    def difference(a: str, b: str) -> tuple[float, ...]:
        return by_seed(results, lambda result: _accuracy(result, a) - _accuracy(result, b))

    measured = "difference in held-out accuracy"
    return [
        Claim("FT-top is no worse than FT-whole", measured, difference("top", "whole"), MARGIN),
        Claim("FT-whole is no worse than FT-random", measured, difference("whole", "random"), MARGIN),
        Claim("FT-random is better than FT-bottom", measured, difference("random", "bottom")),
        Claim("FT-top is better than FT-bottom", measured, difference("top", "bottom")),
    ]


def _gaps(results: Sequence[CellResult], name: str) -> dict[float, tuple[float, ...]]:
    """FT-top minus FT-bottom, by seed, for each value of a setting."""
    return {
        value: by_seed(results, _gap, **{name: value})
        for value in sorted({result.settings[name] for result in results})
    }


def _sweep_panels(results: Sequence[CellResult], *, name: str, x_label: str, log: bool) -> list[Panel]:
    """The gap between FT-top and FT-bottom, and their accuracies, against the setting `name`."""
    gaps = _gaps(results, name)
    gap = Series("FT-top minus FT-bottom", tuple(gaps), tuple(map(seed_interval, gaps.values())))

    def line(split: str) -> Series:
        rates = [by_seed(results, lambda result: _accuracy(result, split), **{name: value}) for value in gaps]
        return Series(f"FT-{split}", tuple(gaps), tuple(map(seed_interval, rates)))

    return [
        Panel("The gap", x_label, "FT-top minus FT-bottom", (gap,), log),
        Panel("Accuracy", x_label, "held-out accuracy", (line("top"), line("bottom")), log),
    ]


def _claims_2b(results: Sequence[CellResult]) -> list[Claim]:
    gaps = _gaps(results, "alpha")

    def rise(low: float, high: float) -> tuple[float, ...]:
        return tuple(b - a for a, b in zip(gaps[low], gaps[high], strict=True))

    measured = "change of the gap in accuracy"
    return [
        Claim("a longer tail widens the gap between FT-top and FT-bottom (alpha 0.25 to 1)", measured, rise(0.25, 1.0)),
        Claim("the gap widens further for still longer tails (alpha 1 to 2)", measured, rise(1.0, 2.0)),
    ]


def _claims_2c(results: Sequence[CellResult]) -> list[Claim]:
    gaps = list(_gaps(results, "steps").values())
    fall = tuple(b - a for a, b in zip(gaps[-1], gaps[1], strict=True))
    usual = "gap in accuracy"
    return [
        Claim("FT-top is better than FT-bottom at the usual number of steps", usual, gaps[1]),
        Claim("pretraining four times as long narrows the gap", f"fall of the {usual}", fall),
    ]


_DEEP = (
    "A simulation: a Llama of 2 layers (d_model 64, 4 heads) on prompts of two tokens, 500 subjects with Zipf "
    "popularity, 6 relations, 120 answers; AdamW, half of the subjects held out, accuracy after 800 steps of "
    "finetuning. The paper does not give its sizes."
)

FIG2A = PaperFigure(
    "ghosal-fig2a",
    "Ghosal et al. 2024, Figure 2(a)",
    f"The choice of finetuning facts decides how many other facts are answered. {_DEEP}",
    lambda scale, seeds, facts: [_deep_cell(scale, seed, 1.0, USUAL_STEPS[scale]) for seed in seeds],
    _run_deep,
    _panels_2a,
    _claims_2a,
)
FIG2B = PaperFigure(
    "ghosal-fig2b",
    "Ghosal et al. 2024, Figure 2(b)",
    "The choice matters more for a longer tail of popularities. At alpha 2 few facts are stored, which limits the gap. "
    f"{_DEEP}",
    lambda scale, seeds, facts: [_deep_cell(scale, s, alpha, USUAL_STEPS[scale]) for alpha in ALPHAS for s in seeds],
    _run_deep,
    partial(_sweep_panels, name="alpha", x_label="Zipf exponent alpha", log=False),
    _claims_2b,
)
FIG2C = PaperFigure(
    "ghosal-fig2c",
    "Ghosal et al. 2024, Figure 2(c)",
    f"The choice matters less after more pretraining. {_DEEP}",
    lambda scale, seeds, facts: [_deep_cell(scale, seed, 1.0, steps) for steps in STEPS[scale] for seed in seeds],
    _run_deep,
    partial(_sweep_panels, name="steps", x_label="pretraining steps", log=True),
    _claims_2c,
)

FIGURES = (FIG2A, FIG2B, FIG2C)
