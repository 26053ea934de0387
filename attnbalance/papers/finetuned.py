"""A language model finetuned on some facts and asked about others: the cell that recipes of language models share."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from attnbalance.data.forms import FEW_SHOT, in_form
from attnbalance.data.prompts import Prompt, make_prompts
from attnbalance.data.scoring import CONTAINMENT, is_match
from attnbalance.errors import DivergenceError, ModelError, OutputError
from attnbalance.files.processes import from_main_process, processes
from attnbalance.finetuning.finetune import finetune
from attnbalance.finetuning.settings import FinetuneSettings
from attnbalance.finetuning.splits import Split
from attnbalance.models.hooked import HookedModel
from attnbalance.models.load import load_model
from attnbalance.papers.figure import Cell, CellResult, Condition, Workload
from attnbalance.papers.sources import model_of
from attnbalance.readings.attention import read_subject_attention
from attnbalance.readings.recall import Recall, recall, score

BASE = "untrained"
"""The split of the cells of the untrained model."""

UNTRAINED = ("zero-shot", "few-shot", "constant answer")
"""Baselines: the untrained model, asked by the question alone or after four answered ones; and the validation facts'
most frequent answer to each relation."""

LOSS = "validation loss"


def grid_cells(
    name: str,
    scale: str,
    seeds: Sequence[int],
    splits: Sequence[str],
    configurations: Sequence[Mapping[str, Any]],
    training: Mapping[str, Any],
    known: Mapping[str, Any],
) -> list[Cell]:
    """For each seed, a cell of the untrained model (split `BASE`), and one for each split and configuration.

    Args:
        name: What the cells' names begin with.
        scale: The scale.
        seeds: The seeds.
        splits: What to train on.
        configurations: Settings of finetuning that are tried on each split.
        training: The settings that all have.
        known: What else the cells depend on.
    """
    cells = []
    for seed in seeds:
        for split, configuration in ((BASE, {}), *itertools.product(splits, configurations)):
            parts = [f"{key}-{value:g}" for key, value in configuration.items()]
            cell = "-".join([name, scale, split, *parts, f"seed-{seed}"]).replace("_", "-")
            own = {"seed": seed, "split": split, "scale": scale, "training": {**training, **configuration}}
            cells.append(Cell(cell, own | dict(known)))
    return cells


def finetuning_of(settings: Mapping[str, Any]) -> FinetuneSettings:
    """How a cell of a language model is finetuned, with its seed, and its precision if one is named (see `Sources`)."""
    named = {name: settings[name] for name in ("seed", "mixed_precision") if name in settings}
    return FinetuneSettings(**settings["training"], **named)


@contextmanager
def run_folder() -> Iterator[Path]:
    """A new folder for one run, in the system's folder for temporary files (TMPDIR), and removed at the end.

    All processes of `accelerate launch` have the same one; on several machines they must share TMPDIR. Raises
    `OutputError` in a process that cannot see it.
    """
    with ExitStack() as kept:
        folder = Path(from_main_process(lambda: kept.enter_context(TemporaryDirectory())))
        if not folder.is_dir():
            raise OutputError(
                f"the processes of one launch must share a folder for temporary files, but {folder} is not here: set "
                "TMPDIR to a folder that all machines see"
            )
        yield folder / "run"
        processes().wait_for_everyone()


def run_cell(make_split: Callable[[Mapping[str, Any]], Split], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a cell of `grid_cells` holds: the untrained model's answers, or those after finetuning on its split."""
    split = make_split(settings)
    return ask_untrained(settings, split) if settings["split"] == BASE else run_finetuning(settings, split)


def run_finetuning(settings: Mapping[str, Any], split: Split) -> dict[str, Any]:
    """Finetune the model of the settings on a split, and ask it about the tested facts.

    Checkpoints lie in `run_folder` meanwhile. If training diverges, the result says so and has no validation loss.
    """
    training = finetuning_of(settings)
    with run_folder() as folder:
        try:
            run = finetune(model_of(settings), split, folder, training)
        except DivergenceError as error:
            return {LOSS: None, "diverged": str(error)}
        asked = make_prompts(split.heldout, training.template)
        measured = ask(load_model(run.path), asked, run.shortcuts, settings["new tokens"])
    return measured | {
        LOSS: run.validation_loss[run.best_step],
        "losses": [[step, loss] for step, loss in run.validation_loss.items()],
        "best step": run.best_step,
        "trained on": len(split.train),
    }


def ask_untrained(settings: Mapping[str, Any], split: Split) -> dict[str, Any]:
    """What `UNTRAINED` answer to the tested facts, each by its name, and what the model is."""
    training = finetuning_of(settings)
    template = training.template
    prompts, shortcuts = make_prompts(split.heldout, template), split.train.most_frequent_answers()
    shots = in_form(FEW_SHOT, prompts, settings["seed"], make_prompts(split.validation, template))
    model, tokens = load_model(model_of(settings), dtype=training.compared_dtype), settings["new tokens"]
    usual = {relation: answers[0] for relation, answers in split.validation.most_frequent_answers().items()}
    constant = score(prompts, [usual[prompt.fact.relation] for prompt in prompts], shortcuts, CONTAINMENT)
    return {
        "zero-shot": ask(model, prompts, shortcuts, tokens),
        "few-shot": ask(model, shots, shortcuts, tokens),
        "constant answer": _scores(constant),
        "parameters": sum(weight.numel() for weight in model.model.parameters()),
        "chat": bool(model.tokenizer.chat_template),
    }


def ask(
    model: HookedModel, prompts: Sequence[Prompt], shortcuts: Mapping[str, Sequence[str]], new_tokens: int
) -> dict[str, Any]:
    """A model's outputs and their scores, the facts' popularity, and the mean subject attention of each layer."""
    with warnings.catch_warnings():  # papers that fix the number of tokens cut long aliases off
        warnings.filterwarnings("ignore", "[0-9,]+ of [0-9,]+ prompts accept an answer of more than")
        answers = recall(model, prompts, shortcuts, scoring=CONTAINMENT, max_new_tokens=new_tokens)
    attention = read_subject_attention(model, prompts)
    return _scores(answers) | {"outputs": list(answers.outputs), "attention": attention.values.mean((0, 2)).tolist()}


def _scores(answers: Recall) -> dict[str, Any]:
    """For each tested fact: whether it is right by each scoring, F1, and whether it is wrong and names the shortcut."""
    return {
        "right": {scoring: list(map(int, right)) for scoring, right in answers.right.items()},
        "f1": list(answers.f1),
        "shortcut": [None if given is None else int(given) for given in answers.shortcut],
        "popularity": list(answers.popularity),
    }


def cell_workload(make_split: Callable[[Mapping[str, Any]], Split], settings: Mapping[str, Any]) -> Workload:
    """What a cell of `run_cell` makes the model read; every answer is also a reading of attention."""
    split = make_split(settings)
    training, new = finetuning_of(settings), settings["new tokens"]
    asked, validation = (make_prompts(facts, training.template) for facts in (split.heldout, split.validation))
    texts = [prompt.text for prompt in asked]
    if settings["split"] == BASE:
        shots = [prompt.text for prompt in in_form(FEW_SHOT, asked, settings["seed"], validation)]
        return Workload(0, 0, (), [(texts, new, 1), (texts, 0, 1), (shots, new, 1), (shots, 0, 1)])
    trained, validated = (
        [f"{prompt.text} {prompt.fact.answer}" for prompt in prompts]
        for prompts in (make_prompts(split.train, training.template), validation)
    )
    checks = 1 + training.steps // training.checkpoint_every
    read = [(validated, 0, checks), (texts, new, 1), (texts, 0, 1)]
    return Workload(training.steps, training.batch_size, trained, read)


def accuracy(values: Mapping[str, Any]) -> float:
    """The share of right answers, by containment."""
    return float(np.mean(values["right"][CONTAINMENT]))


def guess_rate(values: Mapping[str, Any]) -> float:
    """The share of all answers that are wrong and name the relation's most frequent training answer."""
    return float(np.mean([given for given in values["shortcut"] if given is not None]))


def accuracy_of_top(values: Mapping[str, Any], percent: float) -> float:
    """Accuracy on the most popular `percent` of the tested facts, rounded up to whole facts.

    Of facts that are as popular as the last one, all count alike: this is the mean over all orders of ties.
    """
    columns = values["right"][CONTAINMENT], values["popularity"]
    right, popularity = (np.asarray(column, dtype=float) for column in columns)
    size = -int(-len(right) * percent // 100)
    last = np.sort(popularity)[::-1][size - 1]
    above, tied = right[popularity > last], right[popularity == last]
    return float((above.sum() + (size - len(above)) * tied.mean()) / size)


def tuned(results: Sequence[CellResult], split: str) -> dict[int, CellResult]:
    """By seed, the result on a split whose configuration has the lowest validation loss; of equal ones, the first.

    Raises `ModelError` if training diverged with each configuration of a seed.
    """
    fits = [result for result in results if result.settings["split"] == split]
    best: dict[int, CellResult] = {}
    for seed in sorted({result.settings["seed"] for result in fits}):
        whole = [result for result in fits if result.settings["seed"] == seed and result.values[LOSS] is not None]
        if not whole:
            raise ModelError(f"training on split {split!r} diverged with each configuration of seed {seed}")
        best[seed] = min(whole, key=lambda result: result.values[LOSS])
    return best


def by_tuned(
    results: Sequence[CellResult], split: str, value: Callable[[Mapping[str, Any]], float]
) -> tuple[float, ...]:
    """One number per seed, in order of seeds, from the tuned results on a split."""
    return tuple(value(result.values) for result in tuned(results, split).values())


def untrained(results: Sequence[CellResult], name: str) -> list[Mapping[str, Any]]:
    """What one of `UNTRAINED` answers, by seed, from the cells of the untrained model."""
    cells = [result for result in results if result.settings["split"] == BASE]
    return [result.values[name] for result in sorted(cells, key=lambda result: result.settings["seed"])]


def model_condition(results: Sequence[CellResult], says: str, least: float, most: float) -> Condition:
    """Whether the model is a base model, not a chat model, with `least` to `most` parameters; `says` so in words."""
    cell = next(result for result in results if result.settings["split"] == BASE)
    count, chat = cell.values["parameters"], cell.values["chat"]
    kind = "a chat model" if chat else "a base model"
    measured = f"{Path(cell.settings['model']).name}, {kind} of {count / 1e9:.2g} billion parameters"
    return Condition(says, measured, not chat and least <= count <= most)


def grid_condition(results: Sequence[CellResult], says: str) -> Condition:
    """Whether the configurations that are tried, and the facts tested, are the paper's: those of the scale "paper"."""
    scale = results[0].settings["scale"]
    return Condition(says, f"the {scale} scale", scale == "paper")


def with_tested(split: Split, settings: Mapping[str, Any]) -> Split:
    """The split with as many held-out facts as the settings say are tested (None: all), drawn by their seed."""
    if settings["tested"] is None:
        return split
    return replace(split, heldout=split.heldout.sample(settings["tested"], settings["seed"]))


def without_answers(split: Split, forms: Mapping[str, Sequence[str]]) -> Split:
    """The split without the held-out facts for which one of a relation's `forms` would count as right.

    "ca" is accepted for Canada, and by containment "United States of America" holds it.
    """
    kept = split.heldout.where(
        lambda fact: not any(is_match(form, fact.answers, CONTAINMENT) for form in forms[fact.relation])
    )
    return replace(split, heldout=kept, left_out=split.left_out + len(split.heldout) - len(kept))
