"""Ghosal et al. (2024), Figure 2: the choice of finetuning facts, on a small multi-layer transformer."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np

from attnbalance.papers.figure import (
    Cell,
    CellResult,
    Claim,
    Condition,
    Panel,
    PaperFigure,
    Series,
    by_seed,
    minus,
    over_seeds,
)
from attnbalance.papers.two_tokens import TOP, Sizes, finetune, pretrain, read
from attnbalance.statistics.intervals import seed_interval
from attnbalance.theory.triples import SPLITS, make_triples

ALPHAS = (0.25, 0.5, 0.75, 1.0, 1.25)
STEPS = {"tiny": (10, 20, 40, 80), "small": (500, 1000, 2000, 8000), "paper": (5000, 10_000, 20_000, 80_000)}
USUAL_STEPS = {"tiny": 40, "small": 2000, "paper": 20_000}
"""Enough to store 99% of the facts at alpha up to 1; the paper stores all (section 3.2)."""
WORLD = {
    "tiny": {"subjects": 50, "relations": 3, "answers": 15},
    "small": {"subjects": 500, "relations": 6, "answers": 120},
    "paper": {"subjects": 10_000, "relations": 10, "answers": 1000},
}
RATES = (3e-4, 3e-3)
"""Finetuning rates of Figure 2(a): the paper gives none. Only the second one costs part of what is stored."""
SIZES = {
    "tiny": Sizes(layers=1, d_model=16, batch_size=32, finetuning_steps=16),
    "small": Sizes(),
    "paper": Sizes(layers=4, d_model=256, batch_size=512, finetuning_steps=4000),
}
LEAST = 0.01
"""The smallest difference in accuracy that counts: one percentage point."""
STORED = 0.99
"""The share of facts stored that counts as all."""
CEILING = 0.97
"""Where FT-bottom answers more of the held-out facts, no gap as large as the paper's is possible."""


def _deep_cell(scale: str, seed: int, alpha: float, steps: int, rate: float = RATES[0]) -> Cell:
    """The cell of one pretraining run. The usual one is finetuned on all splits, so all figures share it."""
    usual = alpha == 1.0 and steps == USUAL_STEPS[scale]
    sizes = asdict(replace(SIZES[scale], finetuning_rate=rate))
    settings = {"seed": seed, "alpha": alpha, "steps": steps, "splits": list(SPLITS if usual else ("top", "bottom"))}
    finetuned = "" if rate == RATES[0] else f"-rate-{rate:g}"
    name = f"two-tokens-{scale}-alpha-{alpha:g}-steps-{steps}{finetuned}-seed-{seed}"
    return Cell(name, settings | {"world": WORLD[scale], "sizes": sizes})


def _run_deep(settings: Mapping[str, Any]) -> dict[str, Any]:
    seed, sizes = settings["seed"], Sizes(**settings["sizes"])
    world = make_triples([seed], alpha=settings["alpha"], **settings["world"])
    model = pretrain(world, settings["steps"], seed, sizes)
    stored = float(read(model, world.examples())[0].double().mean())
    fits = {split: finetune(copy.deepcopy(model), world, split, seed, sizes) for split in settings["splits"]}
    return {"stored": stored, **fits}


def _accuracy(result: CellResult, split: str) -> float:
    """Held-out accuracy at the last step, averaged over the five popularity groups."""
    return float(np.mean(result.values[split]["accuracy"][-1]))


def _gap(result: CellResult) -> float:
    return _accuracy(result, "top") - _accuracy(result, "bottom")


def _stored(results: Sequence[CellResult]) -> Condition:
    """Whether all facts can be extracted as (s, r) before finetuning, in every run."""
    least = min(result.values["stored"] for result in results)
    says = "all facts are stored: each (s, r) gives its answer"
    return Condition(says, f"{least:.1%} of the facts or more", met=least >= STORED)


def _room(results: Sequence[CellResult]) -> Condition:
    """Whether finetuning on the obscure half loses some of the held-out facts."""
    mean = float(np.mean([_accuracy(result, "bottom") for result in results]))
    says = (
        f"finetuning on the obscure half loses held-out facts, so that there is room for a gap ({CEILING:.0%} or less)"
    )
    return Condition(says, f"{mean:.1%} answered", met=mean <= CEILING)


def _at_rate(results: Sequence[CellResult], rate: float) -> list[CellResult]:
    return [result for result in results if result.settings["sizes"]["finetuning_rate"] == rate]


def _panels_2a(results: Sequence[CellResult]) -> list[Panel]:
    """All panels at each rate."""
    return [panel for rate in RATES for panel in _panels_at(_at_rate(results, rate), f"rate {rate:g}: ")]


def _panels_at(results: Sequence[CellResult], at: str) -> list[Panel]:
    fifths, steps = tuple(map(str, range(1, 6))), tuple(results[0].values["top"]["steps"])
    percents = tuple(100 * share for share in TOP)
    last, most, along, attention = [], [], [], []
    for split in SPLITS:
        cells = [result.values[split] for result in results]
        last.append(Series(f"FT-{split}", fifths, over_seeds([cell["accuracy"][-1] for cell in cells])))
        most.append(Series(f"FT-{split}", percents, over_seeds([cell["accuracy of top"][-1] for cell in cells])))
        means = [[float(np.mean(row)) for row in cell["accuracy"]] for cell in cells]
        along.append(Series(f"FT-{split}", steps, over_seeds(means)))
        last_layer = [[row[-1] for row in cell["subject attention"]] for cell in cells]
        attention.append(Series(f"FT-{split}", steps, over_seeds(last_layer)))
    return [
        Panel(f"{at}popular x%", "most popular % of subjects", "held-out accuracy", tuple(most)),
        Panel(f"{at}by fifth", "fifth, most popular first", "held-out accuracy", tuple(last)),
        Panel(f"{at}course", "step", "held-out accuracy", tuple(along)),
        Panel(f"{at}last layer", "step", "attention on the subject", tuple(attention)),
    ]


def _claims_2a(results: Sequence[CellResult]) -> list[Claim]:
    """The same claims at each rate."""
    return [claim for rate in RATES for claim in _claims_at(_at_rate(results, rate), f"rate {rate:g}: ")]


def _claims_at(results: Sequence[CellResult], at: str) -> list[Claim]:
    def difference(a: str, b: str) -> tuple[float, ...]:
        return by_seed(results, lambda result: _accuracy(result, a) - _accuracy(result, b))

    def gap(share: float) -> tuple[float, ...]:
        k = TOP.index(share)
        top, bottom = (
            by_seed(results, lambda result, split=split: result.values[split]["accuracy of top"][-1][k])
            for split in ("top", "bottom")
        )
        return minus(top, bottom)

    measured = "difference in held-out accuracy"
    stated = {"setting": (_stored(results), _room(results)), "least": LEAST}
    return [
        Claim(
            f"{at}FT-top is better than FT-bottom",
            measured,
            difference("top", "bottom"),
            place="Figure 2(a)",
            printed="10%",
            **stated,
        ),
        Claim(
            f"{at}the gap grows from the top 5% of the test subjects to the top 10%",
            "FT-top minus FT-bottom, top 10% minus top 5%",
            minus(gap(0.1), gap(0.05)),
            place="Section 3.2",
            printed="doubles",
            **stated,
        ),
        Claim(f"{at}FT-top is no worse than FT-whole", measured, difference("top", "whole"), least=-LEAST),
        Claim(f"{at}FT-whole is no worse than FT-random", measured, difference("whole", "random"), least=-LEAST),
        Claim(f"{at}FT-random is better than FT-bottom", measured, difference("random", "bottom"), least=LEAST),
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

    def widens(low: float, high: float) -> Claim:
        compared = [result for result in results if result.settings["alpha"] in (low, high)]
        return Claim(
            f"a longer tail widens the gap between FT-top and FT-bottom (alpha {low:g} to {high:g})",
            "change of the gap in accuracy",
            minus(gaps[high], gaps[low]),
            place="Figure 2(b)",
            least=LEAST,
            setting=(_stored(compared), _room(compared)),
        )

    return [widens(ALPHAS[0], 1.0), widens(1.0, ALPHAS[-1])]


def _claims_2c(results: Sequence[CellResult]) -> list[Claim]:
    gaps = _gaps(results, "steps")
    shortest, *_, usual, longest = gaps
    last = [result for result in results if result.settings["steps"] == longest]
    measured = "fall of the gap in accuracy"
    return [
        Claim(
            f"pretraining {longest / shortest:g} times as long narrows the gap ({shortest:,} to {longest:,} steps)",
            measured,
            minus(gaps[shortest], gaps[longest]),
            place="Figure 2(c)",
            least=LEAST,
            setting=(_stored(last),),
        ),
        Claim(
            f"it still does after {usual:,} steps",
            measured,
            minus(gaps[usual], gaps[longest]),
            least=LEAST,
        ),
    ]


_DEEP = (
    "A simulation: at small scale a Llama of 2 layers (d_model 64, 4 heads) on prompts of two tokens, 500 subjects "
    "with Zipf popularity, 6 relations, 120 answers; AdamW, half of the subjects held out, accuracy after 800 steps of "
    "finetuning. The paper does not give its sizes."
)

FIG2A = PaperFigure(
    "ghosal-fig2a",
    "Ghosal et al. 2024",
    "Figure 2(a)",
    "The choice of finetuning facts decides how many other facts are answered, at two learning rates of finetuning. "
    "Where nearly all held-out facts are answered whatever is chosen, there is no room for a gap, and nothing is "
    f"scored. Figures 2(b) and 2(c) are run at the first rate alone. {_DEEP}",
    lambda scale, seeds, sources: [
        _deep_cell(scale, seed, 1.0, USUAL_STEPS[scale], rate) for rate in RATES for seed in seeds
    ],
    _run_deep,
    _panels_2a,
    _claims_2a,
)
FIG2B = PaperFigure(
    "ghosal-fig2b",
    "Ghosal et al. 2024",
    "Figure 2(b)",
    f"The choice matters more for a longer tail of popularities. {_DEEP}",
    lambda scale, seeds, sources: [_deep_cell(scale, s, alpha, USUAL_STEPS[scale]) for alpha in ALPHAS for s in seeds],
    _run_deep,
    partial(_sweep_panels, name="alpha", x_label="Zipf exponent alpha", log=False),
    _claims_2b,
)
FIG2C = PaperFigure(
    "ghosal-fig2c",
    "Ghosal et al. 2024",
    "Figure 2(c)",
    f"The choice matters less after more pretraining. {_DEEP}",
    lambda scale, seeds, sources: [_deep_cell(scale, seed, 1.0, steps) for steps in STEPS[scale] for seed in seeds],
    _run_deep,
    partial(_sweep_panels, name="steps", x_label="pretraining steps", log=True),
    _claims_2c,
)

FIGURES = (FIG2A, FIG2B, FIG2C)
