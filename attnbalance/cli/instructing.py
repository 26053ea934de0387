"""`attnbalance instruct` and `attnbalance context-critical`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from attnbalance.cli.options import (
    Accumulate,
    CheckpointEvery,
    Decay,
    Device,
    Dtype,
    GradientRank,
    LearningRate,
    LoraAlpha,
    LoraRank,
    MixedPrecision,
    Model,
    Out,
    Peft,
    Seed,
    StepBatch,
    Steps,
    Train,
    WeightDecay,
    WeightsDtype,
    command_line,
    json_mapping,
    noting_reuse,
    say_best,
    show_progress,
)

Data = Annotated[
    Path,
    typer.Option(
        metavar="FILE",
        help="A .json list, or a .jsonl, .csv, .tsv or .parquet table, with the columns instruction, output and, "
        "optionally, input (Alpaca's); or SQuAD's questions.",
    ),
]


def context_critical(
    model: Model,
    data: Data,
    out: Out,
    share: Annotated[float, typer.Option(help="The share of instructions to keep, > 0 and < 1.")] = 0.75,
    batch_size: Annotated[int, typer.Option(min=1, help="Instructions in a forward pass; fewer if long.")] = 8,
    dtype: Dtype = None,
    device: Device = None,
) -> None:
    """Keep the instructions whose output a model predicts worst without their input.

    Writes instructions.json, for `attnbalance instruct --data`, and losses.jsonl. A killed run resumes.
    """
    from attnbalance.context.critical import context_critical as run
    from attnbalance.data.sources.instructions import load_instructions

    progress = show_progress()
    with noting_reuse(out):
        answer = run(
            model,
            load_instructions(data),
            out,
            share=share,
            batch_size=batch_size,
            dtype=dtype,
            device=device,
            command=command_line(),
            progress=progress,
        )
    following = ["attnbalance", "instruct", model, "--data", str(Path(out) / "instructions.json"), "--out", "..."]
    print(f"{answer}\nNext: {shlex.join(following)}")


def instruct(
    model: Model,
    data: Data,
    out: Out,
    with_input: Annotated[
        bool, typer.Option("--with-input", help="Train only on instructions that have an input.")
    ] = False,
    not_naming: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Leave out instructions that name one of the names in this text file, one a line."
        ),
    ] = None,
    steps: Steps = 200,
    learning_rate: LearningRate = 1e-5,
    decay: Decay = False,
    batch_size: StepBatch = 16,
    accumulate: Accumulate = 1,
    weight_decay: WeightDecay = 0.0,
    lora_rank: LoraRank = 0,
    lora_alpha: LoraAlpha = None,
    peft: Peft = None,
    train: Train = "all",
    gradient_rank: GradientRank = None,
    dtype: WeightsDtype = None,
    mixed_precision: MixedPrecision = None,
    checkpoint_every: CheckpointEvery = 20,
    patience: Annotated[
        int, typer.Option(min=0, help="Stop after this many validations without improvement; 0: never.")
    ] = 0,
    validation: Annotated[int, typer.Option(min=1, help="Instructions set apart to choose the checkpoint.")] = 200,
    seed: Seed = 0,
) -> None:
    """Finetune a model on instructions, such as Alpaca's, with checkpoints for `attnbalance context`.

    The folder --out is itself a model (or adapter): the checkpoint with the lowest loss on a validation part. It also
    holds all checkpoints.
    """
    from attnbalance.data.sources.instructions import load_instructions, load_names
    from attnbalance.finetuning.instruct import instruct as run
    from attnbalance.finetuning.settings import FinetuneSettings
    from attnbalance.report.wording import left_out

    settings = FinetuneSettings(
        steps=steps,
        learning_rate=learning_rate,
        batch_size=batch_size,
        accumulate=accumulate,
        decay=decay,
        weight_decay=weight_decay,
        lora_rank=lora_rank,
        lora_alpha=lora_alpha,
        peft=None if peft is None else json_mapping("--peft", peft),
        train=train,
        gradient_rank=gradient_rank,
        dtype=dtype,
        mixed_precision=mixed_precision,
        checkpoint_every=checkpoint_every,
        patience=patience or None,
        seed=seed,
    )
    progress = show_progress()
    rows = load_instructions(data)
    rows = rows.with_input() if with_input else rows
    rows = rows if not_naming is None else rows.not_naming(load_names(not_naming))
    with noting_reuse(out):
        done = run(model, rows, out, settings, validation=validation, progress=progress)
    print(f"{done.trained}.")
    read, trained = max(done.validation_loss) * batch_size, int(str(done.instructions["train"]))
    times = f"{trained:,} instructions" if read >= trained else f"{read:,} of {trained:,} instructions"
    again = f" ({read / trained:.1f} times)" if read > trained else ""
    print(
        f"Trained on {times}{again} of {done.instructions['source']}; validated on {done.instructions['validation']}."
    )
    if done.dropped:
        print(left_out(done.dropped))
    say_best(done, out)
    adapter = f"{done.base}+" if settings.has_adapters else ""
    models = [f"step-{step}={adapter}{path}" for step, path in done.checkpoints.items()]
    how = ["--conflicts", "...", "--template", "alpaca-context", "--out", "..."]
    if settings.compared_dtype:
        how += ["--dtype", settings.compared_dtype]  # the base may be stored in 16 bits
    print(f"Next: {shlex.join(['attnbalance', 'context', f'base={done.base}', *models, *how])}")
