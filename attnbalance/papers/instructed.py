"""A language model tuned on instructions and asked about knowledge conflicts on the way (Goyal et al. 2024)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from attnbalance.data.batches import check_lengths
from attnbalance.data.conflicts import Conflict, says
from attnbalance.data.facts import Fact, FactSet
from attnbalance.data.instructions import Instruction, InstructionSet
from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.prompts import make_prompts
from attnbalance.data.scoring import folded
from attnbalance.data.sources.swapped import make_conflicts
from attnbalance.data.usable_facts import without_bad
from attnbalance.errors import DataError, DivergenceError
from attnbalance.files.processes import from_main_process
from attnbalance.finetuning.instruct import instruct
from attnbalance.finetuning.output_loss import least_foreseen, read_output_loss, usable_with_input
from attnbalance.models.hooked import HookedModel
from attnbalance.models.load import load_limits, load_model
from attnbalance.papers.figure import Cell, Workload
from attnbalance.papers.finetuned import BASE, LOSS, finetuning_of, grid_cells, run_folder
from attnbalance.papers.sources import Sources, conflicts_of, facts_of, instructions_of, model_of
from attnbalance.readings.read_reliance import NEW_TOKENS, read_reliance, reliance_budgets

WHOLE, UNNAMED, WITH_INPUT = "all", "not-naming", "with-input"
CRITICAL, SWAPPED, QK = "critical", "counterfactuals", "qk"
ASKED_AS = ("alpaca-context", "alpaca")
"""The templates of conflicts, with the context and without it: those in which instructions are learned."""

ARMS = (WHOLE, UNNAMED, WITH_INPUT, CRITICAL, SWAPPED, QK)
"""What is trained on, or what is trained."""

KEPT = 0.75
"""The share of the instructions with an input that are context-critical (section 3.4)."""

ADDED = 0.1
"""Counterfactual rows for each instruction (section 5)."""

RATES: dict[str, tuple[float, ...]] = {"tiny": (1e-3,), "small": (1e-3,), "paper": (1e-5, 1e-4)}
"""Learning rates that are tried; the one with the lowest validation loss counts. A short run needs a higher one."""

TRAINING: dict[str, dict[str, Any]] = {
    "tiny": {"steps": 3, "batch_size": 2, "checkpoint_every": 1, "patience": None},
    "small": {"steps": 24, "batch_size": 8, "accumulate": 2, "checkpoint_every": 8, "lora_rank": 16, "patience": None},
    "paper": {
        "steps": 800,
        "batch_size": 128,
        "accumulate": 16,
        "checkpoint_every": 50,
        "lora_rank": 128,
        "patience": None,
    },
}
"""The paper: LoRA of rank 128, up to 2 epochs (Alpaca: 52,002 rows), evaluated every 50 steps; it prints no batch. At
the scale small, a fit takes some four minutes of two CPU cores (SmolLM2-135M), and a figure has 3 to 12."""

EPOCHS = 2
"""How often an instruction is read at most (the paper: up to 2 epochs): an arm with fewer of them has fewer steps."""

ASKED = {"tiny": 4, "small": 40, "paper": None}
"""Conflicts, drawn anew for each seed; None: all."""

ROWS = {"tiny": 40, "small": 1000, "paper": None}
"""Instructions, drawn anew for each seed, before an arm chooses among them; None: all."""

LONGEST = {"tiny": None, "small": 160, "paper": None}
"""Tokens of an instruction with its output, at most; longer ones are left out. None: what the model reads."""

VALIDATED = {"tiny": 2, "small": 40, "paper": 500}
"""Instructions that choose the learning rate."""


def instructed_cells(
    arms: Sequence[str], scale: str, seeds: Sequence[int], sources: Sources, trained_on: str = "instructions"
) -> list[Cell]:
    """For each seed, a cell of the model before training, and one for each arm and learning rate.

    `trained_on` is the source of what is trained on, "instructions" or "squad".
    """
    name = "instructed" if trained_on == "instructions" else trained_on
    known = {
        **sources.of_model(),
        **sources.of_file(trained_on),
        **sources.of_file("conflicts"),
        "asked": ASKED[scale],
        "rows": ROWS[scale],
        "longest": LONGEST[scale],
        "validated": VALIDATED[scale],
    }
    rates = [{"learning_rate": rate} for rate in RATES[scale]]
    cells = grid_cells(name, scale, seeds, (), rates, TRAINING[scale], known)
    for arm in arms:
        own = known | (sources.of_facts() if arm == SWAPPED else {})
        training = TRAINING[scale] | ({"train": "qk"} if arm == QK else {})
        made = grid_cells(name, scale, seeds, (arm,), rates, training, own)
        cells += [cell for cell in made if cell.settings["split"] == arm]
    return cells


def run_instructed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a cell holds: the answers to the conflicts of the untrained model, or of each checkpoint."""
    conflicts = _asked(settings)
    if settings["split"] == BASE:
        model = load_model(model_of(settings), dtype=finetuning_of(settings).compared_dtype)
        return {
            "start": _ask(model, conflicts),
            "parameters": sum(weight.numel() for weight in model.model.parameters()),
            "chat": bool(model.tokenizer.chat_template),
        }
    rows = from_main_process(lambda: _rows(settings, conflicts))
    training = finetuning_of({**settings, "training": _within_epochs(settings["training"], len(rows))})
    with run_folder() as folder:
        try:
            run = instruct(model_of(settings), rows, folder, training, validation=settings["validated"])
        except DivergenceError as error:
            return {LOSS: None, "diverged": str(error)}
        measured = {step: _ask(load_model(path), conflicts) for step, path in run.checkpoints.items()}
    return {
        LOSS: run.validation_loss[run.best_step],
        "losses": [[step, loss] for step, loss in run.validation_loss.items()],
        "steps": list(measured),
        "measured": list(measured.values()),
        "instructions": len(rows),
    }


def instructed_workload(settings: Mapping[str, Any]) -> Workload:
    """What a cell makes the model read.

    Instructions are taken before those are left out that are too long for the model, or not context-critical. Conflicts
    are counted as read four times with their context, the most that `read_reliance` does, and once without it.
    """
    conflicts, arm = _asked(settings), settings["split"]
    asked, alone = ([prompt.text for prompt in make_prompts(conflicts, template)] for template in ASKED_AS)
    look = [(asked, NEW_TOKENS, 1), (asked, 0, 3), (alone, NEW_TOKENS, 1)]
    if arm == BASE:
        return Workload(0, 0, (), look)
    rows = _rows({**settings, "split": WITH_INPUT if arm == CRITICAL else arm}, conflicts).rows
    texts = [row.prompt + row.output for row in rows]
    chosen = texts[: int(KEPT * len(texts))] if arm == CRITICAL else texts
    training = _within_epochs(settings["training"], len(chosen))
    checks = training["steps"] // training["checkpoint_every"]
    read = [(asked, new, times * checks) for asked, new, times in look]
    read += [(chosen[: settings["validated"]], 0, 1 + checks)] + ([(texts, 0, 1)] if arm == CRITICAL else [])
    return Workload(training["steps"], training["batch_size"], chosen, read)


def _within_epochs(training: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """The settings with at most `EPOCHS` times all rows, in whole checkpoints, one at least."""
    every = training["checkpoint_every"]
    most = EPOCHS * rows // training["batch_size"] // every * every
    return {**training, "steps": max(every, min(training["steps"], most))}


def _asked(settings: Mapping[str, Any]) -> FactSet:
    """The conflicts of a cell, drawn among those that are short enough for the model."""
    tokenizer, positions = load_limits(model_of(settings))

    def make(conflicts: FactSet) -> PromptSet:
        prompts = PromptSet.of(make_prompts(conflicts, ASKED_AS[0]), tokenizer)
        check_lengths(prompts.encodings, positions, extra=reliance_budgets(prompts))
        return prompts

    listed = conflicts_of(settings)
    prompts, _ = without_bad(listed, make, skip_bad=True)
    conflicts = replace(listed, facts=tuple(prompt.fact for prompt in prompts))
    return conflicts if settings["asked"] is None else conflicts.sample(settings["asked"], settings["seed"])


def _ask(model: HookedModel, conflicts: FactSet) -> dict[str, Any]:
    """What the model answers to each conflict, M_C, and the share of attention on the context, mean over layers."""
    prompts, alone = (make_prompts(conflicts, template) for template in ASKED_AS)
    reliance = read_reliance(model, PromptSet.of(prompts, model.tokenizer), alone)
    attention = reliance.attention["context"].values.double().mean((1, 2))
    return {
        "counterfactual": list(map(int, reliance.contains(memory=False))),
        "parametric": list(map(int, reliance.contains(memory=True))),
        "from": list(reliance.sides),
        "remembered": list(map(int, reliance.remembers)),
        "m_c": reliance.log_odds.double().sigmoid().tolist(),
        "attention": attention.tolist(),
    }


def _rows(settings: Mapping[str, Any], conflicts: FactSet) -> InstructionSet:
    """The instructions of an arm."""
    arm, seed, every = settings["split"], settings["seed"], instructions_of(settings)
    rows = every if settings["rows"] is None else every.sample(settings["rows"], seed)
    if settings["longest"] is not None:
        rows = rows.usable(load_limits(model_of(settings))[0], settings["longest"])
    if arm == UNNAMED:
        return rows.not_naming(_names(conflicts))
    if arm == WITH_INPUT:
        return rows.with_input()
    if arm == CRITICAL:
        return _critical(load_model(model_of(settings)), rows)
    return _with_counterfactuals(rows, facts_of(settings), conflicts, seed) if arm == SWAPPED else rows


def _names(conflicts: FactSet) -> list[str]:
    """The answers of both kinds, and subjects that are names: a subject that is the whole question is not a name."""
    names = dict[str, None]()
    for fact in conflicts:
        own = () if fact.subject == fact.question else (fact.subject,)
        remembered = fact.memory_answers if isinstance(fact, Conflict) else ()
        names |= dict.fromkeys((*own, *fact.answers, *remembered))
    return list(names)


def _critical(model: HookedModel, rows: InstructionSet) -> InstructionSet:
    """The instructions whose output costs the model most without the input (see `context_critical`)."""
    usable = usable_with_input(model, rows)
    chosen = set(least_foreseen(read_output_loss(model, usable.bare()), KEPT))
    kept = [row for i, row in enumerate(usable.rows) if i in chosen]
    return usable.without({"foreseen without their input": len(usable) - len(kept)}, kept)


def _with_counterfactuals(rows: InstructionSet, facts: FactSet, tested: FactSet, seed: int) -> InstructionSet:
    """The instructions, and for each tenth one a question whose context states another fact's answer.

    Facts that name what is tested, or whose subject stands in a tested question, are left out. Raises `DataError` where
    too few facts are left.
    """
    names = {name.casefold() for name in _names(tested)}
    asked = " ".join(str(fact.question) for fact in tested)

    def is_tested(fact: Fact) -> bool:
        named = bool(names & {text.casefold() for text in (fact.subject, *fact.answers)})
        return named or (folded(fact.subject) in folded(asked) and says(asked, [fact.subject]))

    others = facts.where(lambda fact: not is_tested(fact))
    wanted = math.ceil(Fraction(str(ADDED)) * len(rows))
    swapped = make_conflicts(others.sample(10 * wanted, seed), seed)
    if len(swapped) < wanted:
        raise DataError(
            f"{wanted} counterfactual rows are needed, a tenth of the {len(rows)} instructions, but {facts.name} gives "
            f"{len(swapped)} about nothing that is tested"
        )
    added = [
        Instruction(str(fact.question), fact.answer, fact.context)
        for fact in swapped.sample(wanted, seed)
        if isinstance(fact, Conflict)
    ]
    return rows.without({}, (*rows.rows, *added))
