"""Ghosal et al. (2024), section 5.2: familiar and unfamiliar multiple-choice questions to finetune on (Table 3)."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from attnbalance.data.choices import Choice
from attnbalance.data.instructions import InstructionSet
from attnbalance.errors import DataError, DivergenceError
from attnbalance.files.processes import from_main_process
from attnbalance.finetuning.choice_answers import read_choices
from attnbalance.finetuning.instruct import instruct
from attnbalance.models.hooked import HookedModel
from attnbalance.models.load import load_limits, load_model
from attnbalance.papers.figure import (
    OURS,
    Cell,
    CellResult,
    Claim,
    Condition,
    Panel,
    PaperFigure,
    Series,
    Workload,
    minus,
    over_seeds,
)
from attnbalance.papers.finetuned import (
    BASE,
    LOSS,
    by_tuned,
    finetuning_of,
    grid_cells,
    grid_condition,
    model_condition,
    run_folder,
    untrained,
)
from attnbalance.papers.ghosal_popqa import GRIDS, LEAST, PARAMETERS, TRAINING
from attnbalance.papers.sources import Sources, choices_of, model_of
from attnbalance.report.wording import listed

PARTS = ("top", "bottom", "whole")
"""The half of the training questions whose right letter the base finds most probable, the other half, and all."""

PRINTED = {
    "Llama-7B": {"FT-top": 61.4, "FT-bottom": 55.6, "FT-whole": 58.8},
    "Mistral-7B": {"FT-top": 68.7, "FT-bottom": 59.4, "FT-whole": 67.4},
}
"""The paper's percent of right answers."""

UNTRAINED = ("zero-shot", "constant letter")

TESTED = {"tiny": 10, "small": None, "paper": None}
"""Tested questions; None: all that are held out."""

LONGEST = {"tiny": None, "small": 160, "paper": None}
"""Tokens of a question with its answer, at most; longer ones are left out. None: what the model reads. Half of MMLU's
questions in topics such as history have a passage of some 300 tokens."""

TRAINED_ON = {"tiny": 40, "small": None, "paper": None}
"""Questions to choose from for training; None: all that are not held out."""

CHANGES: dict[str, dict[str, Any]] = {
    "tiny": {},
    "small": {"steps": 20, "batch_size": 8, "accumulate": 4},
    "paper": {"accumulate": 16},
}
"""Settings of training other than in `TRAINING`: at the scale small all fits take an hour of two CPU cores. A batch is
read in parts, since questions with a passage are long."""

VALIDATION = 0.1
"""The share of a part's questions that chooses configuration and checkpoint."""


def _cells(scale: str, seeds: Sequence[int], sources: Sources) -> list[Cell]:
    known = {**sources.of_model(), **sources.of_choices()}
    known |= {"tested": TESTED[scale], "training questions": TRAINED_ON[scale], "longest": LONGEST[scale]}
    return grid_cells("choices", scale, seeds, PARTS, GRIDS[scale], TRAINING[scale] | CHANGES[scale], known)


def halves(settings: Mapping[str, Any]) -> tuple[InstructionSet, InstructionSet]:
    """The questions to train on and those that are tested, drawn by the seed."""
    questions = choices_of(settings)
    rows = list(questions.rows)
    random.Random(settings["seed"]).shuffle(rows)  # noqa: S311
    middle = len(rows) // 2
    tested, trained = rows[:middle][: settings["tested"]], rows[middle:][: settings["training questions"]]
    if not tested or len(trained) < 4:
        raise DataError(f"at least 8 questions are needed, {questions.source} holds {len(rows)}")
    return questions.without({}, trained), questions.without({}, tested)


def _usable_halves(
    settings: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, limit: int | None
) -> list[InstructionSet]:
    """The questions of `halves` that are short enough for the model and the scale."""
    longest = min(filter(None, (settings["longest"], limit)), default=None)
    return [part.usable(tokenizer, longest) for part in halves(settings)]


def part_of(name: str, questions: InstructionSet, model: HookedModel) -> InstructionSet:
    """A part of the training questions by the base's loss on the right letter (Kang et al. 2024), lowest first."""
    if name == "whole":
        return questions
    loss = read_choices(model, questions).loss
    order = sorted(range(len(loss)), key=loss.__getitem__)
    chosen = set(order[: len(order) // 2] if name == "top" else order[len(order) // 2 :])
    return questions.without({}, [row for i, row in enumerate(questions.rows) if i in chosen])


def _run(settings: Mapping[str, Any]) -> dict[str, Any]:
    training = finetuning_of(settings)
    model = load_model(model_of(settings), dtype=training.compared_dtype)
    trained, tested = _usable_halves(settings, model.tokenizer, model.max_positions)
    if settings["split"] == BASE:
        return _ask_untrained(model, trained, tested)
    part = from_main_process(lambda: part_of(settings["split"], trained, model))
    validation = max(1, round(VALIDATION * len(part)))
    with run_folder() as folder:
        try:
            run = instruct(model_of(settings), part, folder, training, validation=validation)
        except DivergenceError as error:
            return {LOSS: None, "diverged": str(error)}
        answers = read_choices(load_model(run.path), tested)
    return {
        "right": list(map(int, answers.right)),
        LOSS: run.validation_loss[run.best_step],
        "losses": [[step, loss] for step, loss in run.validation_loss.items()],
        "best step": run.best_step,
        "trained on": len(part) - validation,
    }


def _workload(settings: Mapping[str, Any]) -> Workload:
    """What a cell makes the model read. A question is read once for all of its letters."""
    trained, tested = _usable_halves(settings, *load_limits(model_of(settings)))
    learned, asked = ([row.prompt + row.output for row in part.rows] for part in (trained, tested))
    if settings["split"] == BASE:
        return Workload(0, 0, (), [(asked, 0, 1)])
    training = finetuning_of(settings)
    part = learned if settings["split"] == "whole" else learned[: len(learned) // 2]
    validated = part[: max(1, round(VALIDATION * len(part)))]
    read = [(validated, 0, 1 + training.steps // training.checkpoint_every), (asked, 0, 1)]
    ranked = [] if settings["split"] == "whole" else [(learned, 0, 1)]
    return Workload(training.steps, training.batch_size, part, read + ranked)


def _ask_untrained(model: HookedModel, trained: InstructionSet, tested: InstructionSet) -> dict[str, Any]:
    """What the model takes before training, and the training questions' most frequent letter."""
    answers = read_choices(model, tested)
    numbers = {len(row.choices) for row in (*trained.rows, *tested.rows) if isinstance(row, Choice)}
    letters = Counter(row.answer for row in trained.rows if isinstance(row, Choice))
    usual = max(sorted(letters), key=letters.__getitem__)
    return {
        "zero-shot": {"right": list(map(int, answers.right))},
        "constant letter": {"right": [int(row.answer == usual) for row in answers.questions]},
        "choices": sorted(numbers),
        "parameters": sum(weight.numel() for weight in model.model.parameters()),
        "chat": bool(model.tokenizer.chat_template),
    }


def accuracy(values: Mapping[str, Any]) -> float:
    """The share of tested questions whose right letter is the most probable one."""
    return float(np.mean(values["right"]))


def _panels(results: Sequence[CellResult]) -> list[Panel]:
    shares = [[accuracy(values) for values in untrained(results, name)] for name in UNTRAINED]
    shares += [list(by_tuned(results, part, accuracy)) for part in PARTS]
    methods = (*UNTRAINED, *(f"FT-{part}" for part in PARTS))
    points = Series(OURS, methods, over_seeds(list(zip(*shares, strict=True))))
    printed = (Series.printed(*row) for row in PRINTED.items())
    return [Panel("Table 3", "", "accuracy, held-out questions", (points, *printed))]


def _four_choices(results: Sequence[CellResult]) -> Condition:
    numbers = {
        number for result in results if result.settings["split"] == BASE for number in result.values.get("choices", ())
    }
    return Condition(
        "every question has four choices", listed(list(map(str, sorted(numbers)))) or "not recorded", numbers == {4}
    )


def _claims(results: Sequence[CellResult]) -> list[Claim]:
    setting = (
        model_condition(results, "a base model of 7 billion parameters", *PARAMETERS),
        grid_condition(results, "all configurations of Table 4 are tried, and all questions tested"),
        _four_choices(results),
    )
    rates = {part: by_tuned(results, part, accuracy) for part in PARTS}

    def claim(better: str, worse: str) -> Claim:
        printed = [f"{row[f'FT-{better}']}% against {row[f'FT-{worse}']}% ({name})" for name, row in PRINTED.items()]
        return Claim(
            f"FT-{better} answers more held-out questions than FT-{worse}",
            "difference in accuracy",
            minus(rates[better], rates[worse]),
            place="Table 3",
            least=LEAST,
            printed=", ".join(printed),
            setting=setting,
        )

    return [claim("top", "bottom"), claim("whole", "bottom"), claim("top", "whole")]


_ABOUT = (
    "A real language model (--model) is finetuned on multiple-choice questions (--choices, such as MMLU's history "
    "files): on the half whose right letter it finds most probable before, on the other half, and on all. Half of the "
    "questions, drawn for each seed, are held out and tested: the most probable letter is the answer. The text is "
    "MMLU's, without examples. The configuration and the checkpoint of each part are those with the lowest loss on a "
    "tenth of it. Departures: the paper does not print its split of MMLU; here all questions of the files are pooled, "
    "and those too long for the model left out. At small scale, questions of more than 160 tokens are left out (most "
    "of those with a passage), and training is 20 steps of 8, with ghosal-table2's small grid."
)

FIGURES = (
    PaperFigure(
        "ghosal-table3",
        "Ghosal et al. 2024",
        "Table 3",
        _ABOUT,
        _cells,
        _run,
        _panels,
        _claims,
        needs=("model", "choices"),
        workload=_workload,
    ),
)
