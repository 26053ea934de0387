"""Finetuning on instructions, about no facts: runs along which reliance on context can be measured."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from attnbalance.arguments import expects
from attnbalance.data.instructions import Instruction, InstructionSet
from attnbalance.errors import DataError
from attnbalance.files.outputs import as_folder
from attnbalance.finetuning.curriculum import order
from attnbalance.finetuning.examples import IGNORED, Example
from attnbalance.finetuning.finetune import absolute_model, run_in
from attnbalance.finetuning.finetune_model import check_settings, train_run
from attnbalance.finetuning.loop import TrainingData
from attnbalance.finetuning.runs import Run
from attnbalance.finetuning.schedule import check_count
from attnbalance.finetuning.settings import FinetuneSettings
from attnbalance.models.fingerprint import files_fingerprint
from attnbalance.models.load import load_limits

USUAL = FinetuneSettings(learning_rate=1e-5, batch_size=16, patience=None)
"""How `instruct` trains unless it is told otherwise. It does not stop early, so that all checkpoints are there."""

ABOUT_FACTS = ("template", "curriculum", "objective")
"""Settings for facts alone, which must be left at their defaults; the objective is `ce`."""


@expects(instructions=InstructionSet, settings=FinetuneSettings)
def instruct(
    model: str | Path,
    instructions: InstructionSet,
    out: str | Path,
    settings: FinetuneSettings = USUAL,
    *,
    validation: int = 200,
    progress: bool = False,
) -> Run:
    """Finetune a local model or Hub id on instructions; returns the run in the folder `out`, as `finetune` does.

    The model learns the tokens of each output and the end-of-sequence token, if the tokenizer has one; those of the
    prompt (see `Instruction.prompt`) carry no loss. Rows are read in one shuffle after another; a short run reads only
    a part of them. Rows that cannot be used are left out and counted in `Run.dropped`: those longer than the model's
    positions, those whose prompt the tokenizer merges with the output, and those with the prompt of a validation row.
    `Run.train` and `Run.heldout` are empty: the run is about no facts.

    Raises what `finetune` raises, and `DataError` for settings that only facts have, for too few rows, and for rows so
    long that the model reads them differently in a batch with shorter ones (longrope).

    Args:
        model: A local model folder, GGUF file or Hub id.
        instructions: What to train on (see `load_instructions`).
        out: The folder of the run.
        settings: How to train; template, curriculum and objective must keep their defaults.
        validation: The number of rows that are not trained on: their loss (nats a token) is measured at each
            checkpoint, and the run itself is the checkpoint with the lowest. They are chosen by a hash of their
            prompts, so runs with different seeds validate on the same rows.
        progress: Whether to draw a progress bar.
    """
    _check(settings, validation)
    out, base = as_folder(out), absolute_model(model)
    config = {
        "model": base,
        "model_files": files_fingerprint(base),
        "split": "instructions",
        "facts_sha256": {},
        "instructions_sha256": instructions.sha256,
        "validation": validation,
        **{name: value for name, value in settings.record().items() if name not in ABOUT_FACTS},
    }

    def train() -> None:
        check_settings(settings)
        tokenizer, limit = load_limits(base)
        usable, examples = instruction_examples(instructions, tokenizer, limit)
        validated, trained, repeated = _split(usable.rows, validation)
        usable = usable.without({"the prompt of a validation row": repeated}, usable.rows)
        if not trained:
            raise DataError(
                f"expected more than {validation} instructions (`validation`) with prompts of their own, got "
                f"{len(usable)} of {usable.source}{_left_out(usable)}"
            )
        schedule = settings.schedule
        indices = order([0.0] * len(trained), schedule.steps, schedule.batch_size, schedule.seed)
        data = TrainingData([examples[trained[i]] for i in indices], [examples[i] for i in validated])
        sizes = {"source": usable.source, "train": len(trained), "validation": len(validated)}
        about = {"instructions": sizes, "dropped": dict(usable.dropped), "shortcuts": {}}
        train_run(base, tokenizer, data, out, settings, config, about, {}, progress=progress)

    return run_in(out, config, train)


def _check(settings: FinetuneSettings, validation: object) -> None:
    """Refuse settings that only facts have, and no rows for validation."""
    given, usual = settings.record(), USUAL.record()
    if other := [name for name in ABOUT_FACTS if given[name] != usual[name]]:
        usual_value, value = (getattr(each, other[0]) for each in (USUAL, settings))
        raise DataError(
            f"instructions are learned with `{other[0]}`={usual_value!r} alone; leave it out, got {value!r}"
        )
    check_count("validation", validation)


def _left_out(instructions: InstructionSet) -> str:
    """How many rows were left out, by reason, after a colon; empty if none were."""
    reasons = ", ".join(f"{count} ({why})" for why, count in instructions.dropped.items())
    return f"; left out: {reasons}" if reasons else ""


def instruction_examples(
    instructions: InstructionSet, tokenizer: PreTrainedTokenizerBase, max_positions: int | None
) -> tuple[InstructionSet, list[Example]]:
    """The instructions that the model can be trained on, and their examples, in order."""
    encodings = instructions.encodings(tokenizer, max_positions)
    examples = [
        Example((*prompt, *output), (*[IGNORED] * len(prompt), *output))
        for prompt, output in (encoded for encoded in encodings if not isinstance(encoded, str))
    ]
    return instructions.readable(encodings), examples


def _split(rows: Sequence[Instruction], validation: int) -> tuple[list[int], list[int], int]:
    """The indices of the rows to validate and to train on, and how many are neither, since they repeat a prompt."""
    hashed = sorted(range(len(rows)), key=lambda i: hashlib.sha256(rows[i].prompt.encode()).digest())
    validated = hashed[:validation]
    asked = {rows[i].prompt for i in validated}
    trained = [i for i in range(len(rows)) if rows[i].prompt not in asked]
    return validated, trained, len(rows) - len(trained) - len(validated)
