"""A language model finetuned on some facts and asked about others: the cell that recipes of language models share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from attnbalance.data.prompts import Prompt, make_prompts
from attnbalance.finetuning.finetune import finetune
from attnbalance.finetuning.settings import FinetuneSettings
from attnbalance.finetuning.splits import Split
from attnbalance.papers.figure import CellResult
from attnbalance.papers.sources import model_of

NEW_TOKENS = 10
"""Tokens of an answer (Ghosal et al. 2024, B.2)."""

PERCENTS = tuple(range(10, 101, 10))
"""The most popular x% of the tested facts."""

UNTRAINED = ("zero-shot", "few-shot", "constant answer")
"""What finetuned models are set against: the model as it comes, asked by the question alone or after four answered
ones, and the validation facts' most frequent answer to each relation."""


def run_finetuning(settings: Mapping[str, Any], split: Split) -> dict[str, Any]:
    """Finetune the model of the settings on a split, and ask it about the tested facts."""
    training = FinetuneSettings(**settings["training"], seed=settings["seed"])
    with TemporaryDirectory() as folder:
        run = finetune(model_of(settings), split, Path(folder) / "run", training)
        measured = _asked(run.path, make_prompts(split.heldout, training.template), run.shortcuts)
        return measured | {
            "validation loss": run.validation_loss[run.best_step],
            "best step": run.best_step,
            "trained on": len(split.train),
        }


def ask_untrained(settings: Mapping[str, Any], split: Split) -> dict[str, Any]:
    """What `UNTRAINED` answer to the tested facts, each by its name; and the model's number of parameters."""
    from attnbalance.data.forms import FEW_SHOT, in_form
    from attnbalance.data.scoring import CONTAINMENT
    from attnbalance.models.load import load_model
    from attnbalance.readings.recall import score

    template = FinetuneSettings(**settings["training"]).template
    prompts, shortcuts = make_prompts(split.heldout, template), split.train.most_frequent_answers()
    shots = in_form(FEW_SHOT, prompts, settings["seed"], make_prompts(split.validation, template))
    model = model_of(settings)
    usual = {relation: answers[0] for relation, answers in split.validation.most_frequent_answers().items()}
    constant = score(prompts, [usual[prompt.fact.relation] for prompt in prompts], shortcuts, CONTAINMENT)
    return {
        "zero-shot": _asked(model, prompts, shortcuts),
        "few-shot": _asked(model, shots, shortcuts),
        "constant answer": {"right": list(map(int, constant.correct))},
        "parameters": sum(weight.numel() for weight in load_model(model).model.parameters()),
    }


def _asked(model: str | Path, prompts: Sequence[Prompt], shortcuts: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Which answers are right, which name a training answer, the facts' popularity, subject attention by layer."""
    import warnings

    from attnbalance.data.scoring import CONTAINMENT
    from attnbalance.models.load import load_model
    from attnbalance.readings.attention import read_subject_attention
    from attnbalance.readings.recall import recall

    loaded = load_model(model)
    with warnings.catch_warnings():  # the paper's ten tokens cut long aliases off
        warnings.filterwarnings("ignore", "[0-9,]+ of [0-9,]+ prompts accept an answer of more than")
        answers = recall(loaded, prompts, shortcuts, scoring=CONTAINMENT, max_new_tokens=NEW_TOKENS)
    attention = read_subject_attention(loaded, prompts)
    return {
        "right": list(map(int, answers.correct)),
        "shortcut": [None if given is None else int(given) for given in answers.shortcut],
        "popularity": list(answers.popularity),
        "attention": attention.values.mean((0, 2)).tolist(),
    }


def accuracy(values: Mapping[str, Any]) -> float:
    """The share of right answers."""
    return float(np.mean(values["right"]))


def shortcut_rate(values: Mapping[str, Any]) -> float:
    """The share of the answers that are wrong and name the relation's most frequent training answer."""
    return float(np.mean([given for given in values["shortcut"] if given is not None]))


def accuracy_of_top(values: Mapping[str, Any], percent: float) -> float:
    """Accuracy on the most popular `percent` of the tested facts, at least one; ties in the facts' order."""
    order = np.argsort(-np.asarray(values["popularity"], dtype=float), kind="stable")
    chosen = order[: max(1, round(percent / 100 * len(order)))]
    return float(np.mean(np.asarray(values["right"], dtype=float)[chosen]))


def tuned(results: Sequence[CellResult], split: str) -> dict[int, CellResult]:
    """By seed, the result on a split whose configuration has the lowest validation loss; of equal ones, the first."""
    best: dict[int, CellResult] = {}
    for result in results:
        seed = result.settings["seed"]
        loss = result.values.get("validation loss")
        if result.settings["split"] == split and (seed not in best or loss < best[seed].values["validation loss"]):
            best[seed] = result
    return dict(sorted(best.items()))


def by_tuned(
    results: Sequence[CellResult], split: str, value: Callable[[Mapping[str, Any]], float]
) -> tuple[float, ...]:
    """One number per seed, in order of seeds, from the tuned results on a split."""
    return tuple(value(result.values) for result in tuned(results, split).values())
