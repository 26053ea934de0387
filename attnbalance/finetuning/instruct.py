"""Finetuning on instructions, about no facts: runs along which reliance on context can be measured."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from attnbalance.arguments import expects
from attnbalance.data.facts import FactSet
from attnbalance.data.instructions import Instruction, InstructionSet
from attnbalance.data.tokens import encode_continued
from attnbalance.errors import DataError
from attnbalance.files.outputs import as_folder
from attnbalance.finetuning.curriculum import order
from attnbalance.finetuning.examples import IGNORED, Example
from attnbalance.finetuning.finetune import DEFAULTS, absolute_model, run_in
from attnbalance.finetuning.finetune_model import train_run
from attnbalance.finetuning.loop import TrainingData
from attnbalance.finetuning.runs import NONE, Run
from attnbalance.finetuning.schedule import check_count
from attnbalance.finetuning.settings import FinetuneSettings
from attnbalance.finetuning.splits import Split
from attnbalance.models.fingerprint import files_fingerprint
from attnbalance.models.load import load_limits

ABOUT_FACTS = ("template", "curriculum", "objective")
"""Settings that are about facts, and must be left at their defaults."""


@expects(instructions=InstructionSet, settings=FinetuneSettings)
def instruct(
    model: str | Path,
    instructions: InstructionSet,
    out: str | Path,
    settings: FinetuneSettings = DEFAULTS,
    *,
    validation: int = 200,
    progress: bool = False,
) -> Run:
    """Finetune a local model or Hub id on instructions; returns the run in the folder `out`, as `finetune` does.

    The model learns the tokens of each output and the end-of-sequence token; those of the prompt (see
    `Instruction.prompt`) carry no loss. Rows longer than the model's positions, and those whose prompt the tokenizer
    merges with the output, are left out and counted in the run's attnbalance.json. One shuffle of all rows is read
    after another, so that few steps read only a part of them. `Run.train` and `Run.heldout` are empty: the run is about
    no facts. Raises what `finetune` raises, and `DataError` for settings about facts and for too few rows.

    Args:
        model: A local model folder, GGUF file or Hub id.
        instructions: What to train on (see `load_instructions`).
        out: The folder of the run.
        settings: How to train; template, curriculum and objective, which are about facts, as they are by default.
        validation: The number of rows, drawn at random, that are not trained on: their loss (nats a token) is measured
            at each checkpoint, and the run itself is the checkpoint with the lowest.
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
        rows = random.Random(settings.seed).sample(instructions.rows, len(instructions))  # noqa: S311
        tokenizer, limit = load_limits(base)
        examples, dropped = _examples(rows, tokenizer, limit)
        if len(examples) <= validation:
            raise DataError(
                f"expected more than {validation} instructions (`validation`) that fit the model, got {len(examples)} "
                f"of {len(rows)}: {dict(dropped)}"
            )
        validated, trained = examples[:validation], examples[validation:]
        schedule = settings.schedule
        indices = order([0.0] * len(trained), schedule.steps, schedule.batch_size, schedule.seed)
        about = FactSet((), instructions.source, {**instructions.dropped, **dropped})
        data = TrainingData([trained[i] for i in indices], validated)
        split = Split("instructions", about, NONE, NONE, 0)
        train_run(base, split, data, out, settings, config, progress=progress)

    return run_in(out, config, train)


def _check(settings: FinetuneSettings, validation: object) -> None:
    """Refuse settings about facts, and no rows for validation."""
    given, usual = settings.record(), DEFAULTS.record()
    if other := [name for name in ABOUT_FACTS if given[name] != usual[name]]:
        raise DataError(
            f"`{other[0]}` is about facts, and instructions are about none; leave it out, got {given[other[0]]!r}"
        )
    check_count("validation", validation)


def _examples(
    rows: Sequence[Instruction], tokenizer: PreTrainedTokenizerBase, max_positions: int | None
) -> tuple[list[Example], Counter[str]]:
    """The examples of instructions, in order, and how many are left out, by reason."""
    end = [tokenizer.eos_token_id] if isinstance(tokenizer.eos_token_id, int) else []
    encoded = encode_continued([row.prompt for row in rows], [row.output for row in rows], tokenizer)
    examples, dropped = list[Example](), Counter[str]()
    for pair in encoded:
        if pair is None:
            dropped["the tokenizer merges prompt and output"] += 1
            continue
        prompt, output = pair
        labels = (*output, *end)
        if max_positions is not None and len(prompt) + len(labels) > max_positions:
            dropped[f"more than {max_positions} tokens"] += 1
            continue
        examples.append(Example((*prompt, *labels), (*[IGNORED] * len(prompt), *labels)))
    return examples, dropped
