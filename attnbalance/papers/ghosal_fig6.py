"""Ghosal et al. (2024), Figure 6: finetuning of the theory's one-layer model in five regimes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from attnbalance.papers.figure import (
    Cell,
    CellResult,
    Claim,
    Condition,
    Panel,
    PaperFigure,
    Series,
    best_elsewhere,
    by_seed,
    minus,
    over_seeds,
)
from attnbalance.theory.attention_only import AttentionOnly, attention_only
from attnbalance.theory.dynamics import descend
from attnbalance.theory.triples import Examples, Triples, make_triples, split_subjects

ONE_RATE, SKEWED = "one rate", "skewed answers"
EVENLY: dict[str, Any] = {"batch_size": 128, "rate": 20.0, "steps": 2000, "rate_V": 20.0, "rate_KQ": 20.0}
REGIMES: dict[str, dict[str, Any]] = {
    ONE_RATE: EVENLY,
    SKEWED: EVENLY | {"answer_alpha": 1.0},
    "attention fast": {"batch_size": 8, "rate": 200.0, "steps": 600, "rate_V": 20.0, "rate_KQ": 40.0},
    "attention first": {"batch_size": 8, "rate": 200.0, "steps": 600, "rate_V": 5.0, "rate_KQ": 20.0},
    "values first": {"batch_size": 8, "rate": 200.0, "steps": 600, "rate_V": 20.0, "rate_KQ": 0.2},
}
"""Pretraining on sampled batches, and full-batch finetuning.

In the first two regimes both matrices are trained throughout, at one rate: many small steps store all facts, almost
equally. In the second one, a relation's answers have Zipf frequencies, so that there is a usual answer to fall back on.
In the others pretraining trains W_V alone, in a few large steps for each fact, and stores a subject's facts very
unequally.
"""
STORED = 0.99
"""The share of facts stored that counts as all."""
NEAR_1 = 0.9
LEAST = 0.01
"""The smallest difference in accuracy and attention that counts: one percentage point."""
ONE_LAYER = {
    "tiny": {"subjects": 30, "relations": 3, "answers": 10},
    "small": {"subjects": 200, "relations": 5, "answers": 50},
    "paper": {"subjects": 1000, "relations": 10, "answers": 200},
}
OBSERVED = (0, 1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 150, 200, 300)


def _one_layer_cell(scale: str, seed: int, regime: str) -> Cell:
    settings = {"seed": seed, "regime": regime, "world": ONE_LAYER[scale]} | REGIMES[regime]
    return Cell(f"one-layer-{scale}-{regime.replace(' ', '-')}-seed-{seed}", settings)


def _run_one_layer(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Pretrain one model, finetune it on FT-Top and on FT-Bottom, and observe held-out prompts during finetuning."""
    seed = settings["seed"]
    world = make_triples([seed], **settings["world"], answer_alpha=settings.get("answer_alpha", 0.0))
    model, generator = attention_only(world.tokens, [seed]), torch.Generator().manual_seed(seed)
    moves = settings["rate"] if settings["regime"] in (ONE_RATE, SKEWED) else 0.0

    def statements() -> Examples:
        return world.drawn(settings["batch_size"], [generator])

    descend(lambda _: model.step(statements(), settings["rate"], moves), dict, settings["steps"], ())
    stated = model.correct(world.examples()).double().mean()
    values = {split: _finetune_one_layer(model, world, split, settings) for split in ("top", "bottom")}
    return values | {"stated": float(stated)}


def _finetune_one_layer(
    model: AttentionOnly, world: Triples, split: str, settings: Mapping[str, Any]
) -> dict[str, Any]:
    tuned = model.copy()
    chosen = split_subjects(world, split, [settings["seed"]])
    train, heldout = world.of(chosen.trained), world.of(chosen.heldout)
    even, usual = torch.full_like(heldout.weight, 0.5), _usual_answers(train, heldout)

    def observe() -> dict[str, torch.Tensor]:
        attention, relevance = tuned.attention(heldout).mean(1), tuned.relevance(heldout)
        return {
            "accuracy": tuned.correct(heldout).double().mean(1),
            "usual answers": (tuned.predicted(heldout) == usual).double().mean(1),
            "accuracy at even attention": tuned.correct(heldout, even).double().mean(1),
            "subject attention": attention,
            "relation attention": 1 - attention,
            "s_rel - p_rel": (relevance.subject - relevance.prompt).mean(1),
            "salience": tuned.salience(heldout).mean(1),
        }

    rates = settings["rate_V"], settings["rate_KQ"]
    seen = descend(lambda _: tuned.step(train, *rates), observe, OBSERVED[-1], OBSERVED, lambda: tuned.loss(train))
    values = {name: values[:, 0].tolist() for name, values in seen.values.items()}
    constant = float((usual == heldout.answer).double().mean())
    return {"steps": list(seen.steps), "accuracy of the usual answers": constant} | values


def _usual_answers(train: Examples, heldout: Examples) -> Int[Tensor, "run example"]:
    """For each held-out prompt of one run, the commonest answer of the training prompts of its relation.

    Ties go to the lowest token.
    """
    usual = torch.empty_like(heldout.answer)
    for query in heldout.query.unique():
        usual[heldout.query == query] = train.answer[train.query == query].bincount().argmax()
    return usual


def _panels_6(results: Sequence[CellResult]) -> list[Panel]:
    panels = []
    for regime in REGIMES:
        for name in ("accuracy", "subject attention", "usual answers", "accuracy at even attention"):
            lines = []
            for split in ("top", "bottom"):
                runs = [result.values[split] for result in results if result.settings["regime"] == regime]
                lines.append(Series(f"FT-{split}", tuple(runs[0]["steps"]), over_seeds([run[name] for run in runs])))
            panels.append(Panel(regime, "finetuning step", name, tuple(lines), log=True))
    return panels


def _setting(results: Sequence[CellResult], regime: str) -> tuple[Condition, ...]:
    """What of the paper's setting a regime has; the learning rates, which decide what is seen, C.1 does not name."""
    rates = REGIMES[regime]
    stored = min(by_seed(results, lambda result: result.values["stated"], regime=regime))
    return (
        Condition(
            "the paper's learning rates",
            f"not named; here W_V {rates['rate_V']:g}, W_KQ {rates['rate_KQ']:g}",
            met=False,
        ),
        Condition("all facts are stored", f"{stored:.1%} of the facts or more", met=stored >= STORED),
    )


def _fall(results: Sequence[CellResult], regime: str) -> tuple[float, ...]:
    """By how much FT-bottom's accuracy falls from the step that is best on the other seeds to the end."""
    columns = [
        by_seed(results, lambda result, i=i: result.values["bottom"]["accuracy"][i], regime=regime)
        for i in range(len(OBSERVED))
    ]
    rows = list(zip(*columns, strict=True))
    return tuple(row[k] - row[-1] for row, k in zip(rows, best_elsewhere(rows), strict=True))


def _claims_6(results: Sequence[CellResult]) -> list[Claim]:
    """The paper's final state, in every regime; and its course, in the two regimes that show it."""

    def at(split: str, name: str, step: int, regime: str) -> tuple[float, ...]:
        index = OBSERVED.index(step)
        return by_seed(results, lambda result: result.values[split][name][index], regime=regime)

    def bottom(name: str, regime: str, before: int, after: int) -> tuple[float, ...]:
        return minus(at("bottom", name, before, regime), at("bottom", name, after, regime))

    end = OBSERVED[-1]
    gone = {regime: at("bottom", "relation attention", end, regime) for regime in REGIMES}
    rows = list(zip(*gone.values(), strict=True))
    claims = [
        Claim(
            "in some regime FT-bottom's relation attention ends near 1",
            "relation attention, in the regime that is best on the other seeds",
            tuple(row[k] for row, k in zip(rows, best_elsewhere(rows), strict=True)),
            least=NEAR_1,
            level=True,
        )
    ]
    for regime in REGIMES:
        attention = [at(split, "subject attention", end, regime) for split in ("top", "bottom")]
        right = [at(split, "accuracy", end, regime) for split in ("top", "bottom")]
        says, setting = f"{regime}: FT-top ends with more", _setting(results, regime)
        claims += [
            Claim(
                f"{regime}: FT-bottom's relation attention ends near 1",
                "relation attention",
                gone[regime],
                place="Appendix C.1",
                least=NEAR_1,
                level=True,
                printed="approaches 1",
                setting=setting,
            ),
            Claim(
                f"{regime}: FT-bottom's accuracy declines",
                "highest accuracy minus the end",
                _fall(results, regime),
                place="Appendix C.1",
                least=LEAST,
                printed="steeply declines",
                setting=setting,
            ),
            Claim(
                f"{says} attention on the subject",
                "top minus bottom",
                minus(*attention),
                least=LEAST,
            ),
            Claim(
                f"{says} right answers",
                "accuracy, top minus bottom",
                minus(*right),
                least=LEAST,
            ),
        ]
    before, *by_usual = [
        at(split, "usual answers", step, SKEWED) for split, step in (("bottom", 0), ("bottom", end), ("top", end))
    ]
    fast, first = "attention fast", "attention first"
    hidden = minus(at("bottom", "accuracy at even attention", end, fast), at("bottom", "accuracy", end, fast))
    return [
        *claims,
        Claim(
            f"{SKEWED}: FT-bottom comes to give the usual answer",
            "share of held-out prompts, the end minus before finetuning",
            minus(by_usual[0], before),
        ),
        Claim(
            f"{SKEWED}: FT-bottom ends by giving the usual answer more often than FT-top",
            "share of held-out prompts, bottom minus top",
            minus(*by_usual),
        ),
        Claim(f"{fast}: lost facts are hidden, not forgotten", "accuracy at even attention minus accuracy", hidden),
        Claim(f"{first}: FT-bottom's accuracy first rises", "step 1 minus step 0", bottom("accuracy", first, 1, 0)),
        Claim(
            f"{first}: FT-bottom's accuracy then falls steeply",
            "step 1 minus step 10",
            bottom("accuracy", first, 1, 10),
        ),
        Claim(f"{first}: FT-bottom's accuracy stays low", "step 1 minus the end", bottom("accuracy", first, 1, end)),
    ]


FIG6 = PaperFigure(
    "ghosal-fig6",
    "Ghosal et al. 2024",
    "Figure 6 and appendix C.1",
    "The theory's attention-only model, finetuned by full-batch gradient descent on the more or the less popular "
    "half, in five regimes. The paper does not give its learning rates, which determine what is seen. One rate: both "
    "matrices learn throughout; long pretraining in small steps stores all facts. Skewed answers: the same, but each "
    "relation's answers have Zipf frequencies. In the others, pretraining trains "
    "W_V alone, in a few large steps per fact. Attention fast: W_KQ learns twice as fast as W_V; the relation token "
    "soon gets all attention. Attention first: both learn more slowly, W_KQ four times as fast as W_V; accuracy rises, "
    "falls while the subject gets no attention, and recovers. Values first: W_KQ learns a hundred times more slowly "
    "than W_V. A simulation with 200 subjects, 5 relations and 50 answers.",
    lambda scale, seeds, sources: [_one_layer_cell(scale, seed, regime) for regime in REGIMES for seed in seeds],
    _run_one_layer,
    _panels_6,
    _claims_6,
)

FIGURES = (FIG6,)
