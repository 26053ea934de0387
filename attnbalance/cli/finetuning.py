"""`attnbalance finetune`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnbalance.cli.options import (
    Accumulate,
    CheckpointEvery,
    Decay,
    Facts,
    GradientRank,
    LearningRate,
    Limit,
    LoraAlpha,
    LoraRank,
    MixedPrecision,
    Model,
    Out,
    Peft,
    Relations,
    Seed,
    SkipBad,
    StepBatch,
    Steps,
    Template,
    Train,
    WeightDecay,
    WeightsDtype,
    as_names,
    json_mapping,
    noting_reuse,
    say_best,
    show_progress,
)
from attnbalance.errors import DataError

if TYPE_CHECKING:
    from attnbalance.data.facts import FactSet
    from attnbalance.data.prompt_sets import PromptSet

FEWEST = 20
"""Least number of validation facts by which a checkpoint is chosen without a warning."""


def finetune(
    model: Model,
    facts: Facts,
    split: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="top, bottom or random: half of the facts not held out, the more popular, the less popular or "
            "any; whole: all of them; controlled-top, controlled-bottom: PopQA's facts with the most frequent answer, "
            "tested on other answers.",
        ),
    ],
    out: Out,
    relations: Relations = None,
    limit: Limit = None,
    template: Template = "qa",
    steps: Steps = 200,
    learning_rate: LearningRate = 3e-4,
    decay: Decay = False,
    batch_size: StepBatch = 128,
    accumulate: Accumulate = 1,
    weight_decay: WeightDecay = 0.0,
    share: Annotated[float, typer.Option(help="Share of the facts that top, bottom or random takes.")] = 0.5,
    train_relations: Annotated[
        str | None, typer.Option(metavar="A,B", help="Train on these relations only; the tested facts keep all.")
    ] = None,
    lora_rank: LoraRank = 0,
    lora_alpha: LoraAlpha = None,
    peft: Peft = None,
    train: Train = "all",
    objective: Annotated[
        str,
        typer.Option(
            metavar="EXPRESSION",
            help="recommended (ce + kl(best)), or terms with weights, e.g. 'ce + 0.3*row-anchor(question)'; a wrong "
            "one lists all.",
        ),
    ] = "ce",
    curriculum: Annotated[
        str,
        typer.Option(metavar="NAME", help="shuffled, popular-first, obscure-first, popular-last, popular-share=SHARE."),
    ] = "shuffled",
    gradient_rank: GradientRank = None,
    dtype: WeightsDtype = None,
    mixed_precision: MixedPrecision = None,
    checkpoint_every: CheckpointEvery = 20,
    patience: Annotated[
        int,
        typer.Option(
            min=0,
            help="Stop after this many validations without improvement; 0: never. Changing curricula never stop early.",
        ),
    ] = 3,
    heldout: Annotated[float, typer.Option(help="Share of the subjects set apart for testing; may be 0.")] = 0.5,
    validation: Annotated[
        float,
        typer.Option(help="Share of the subjects set apart to choose the checkpoint; 0: by the training facts."),
    ] = 0.1,
    replay: Annotated[
        str | None,
        typer.Option(
            metavar="FACTS|generated",
            help="Further facts, trained on too so that MODEL keeps them: those that it knows; with kl or recommended, "
            "any, held to what it says. generated: MODEL names the subjects itself and keeps its own answers.",
        ),
    ] = None,
    replay_share: Annotated[
        float | None,
        typer.Option(
            help="Share of replayed facts among all training facts, if there are enough; with kl or recommended, the "
            "share of each batch; 0.75 by default."
        ),
    ] = None,
    rank_by: Annotated[
        str,
        typer.Option(
            metavar="popularity|loss|slick|salience|relevance",
            help="How top and bottom rank facts: by their popularity, or by what MODEL shows about each fact.",
        ),
    ] = "popularity",
    skip_bad: SkipBad = False,
    seed: Seed = 0,
) -> None:
    """Finetune a model on questions about facts, and keep some subjects apart to test it on.

    The folder --out is itself a model (or adapter): the checkpoint that was best on a validation part of the training
    facts (with --validation 0: on the training facts). It also holds all checkpoints, train.jsonl, heldout.jsonl for
    `attnbalance curve --facts` (of conflicts: --facts conflicts:FILE), and replay.jsonl.
    """
    from attnbalance.data.conflicts import Conflict
    from attnbalance.data.prompt_sets import PromptSet
    from attnbalance.data.prompts import make_prompts
    from attnbalance.data.sources.load_facts import load_facts
    from attnbalance.finetuning.completion import describe
    from attnbalance.finetuning.examples import examples_of
    from attnbalance.finetuning.finetune import finetune as run
    from attnbalance.finetuning.objectives.parse import parse_objective
    from attnbalance.finetuning.ranking import RANKINGS, rank_facts
    from attnbalance.finetuning.replay import GENERATED, SHARE, check_replay
    from attnbalance.finetuning.replay import replay as add_replay
    from attnbalance.finetuning.runs import FACTS
    from attnbalance.finetuning.settings import FinetuneSettings
    from attnbalance.finetuning.splits import split_facts
    from attnbalance.models.load import load_limits, load_model
    from attnbalance.readings.answer_tokens import make_answer_tokens
    from attnbalance.readings.passes import check_passes

    if replay is None and replay_share is not None:
        raise DataError("--replay-share is the share of replayed facts; give --replay as well")
    if rank_by not in RANKINGS:
        raise DataError(f"--rank-by must be one of {', '.join(RANKINGS)}, got {rank_by!r}")
    if rank_by != RANKINGS[0] and split in ("whole", "random"):
        raise DataError(f"--rank-by says what top and bottom go by; split {split} does not rank facts")
    settings = FinetuneSettings(
        template=template,
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
        objective=objective,
        curriculum=curriculum,
        gradient_rank=gradient_rank,
        dtype=dtype,
        mixed_precision=mixed_precision,
        checkpoint_every=checkpoint_every,
        patience=patience or None,
        seed=seed,
    )
    if replay is not None:
        check_replay(settings)
    progress = show_progress()
    chosen = load_facts(facts, as_names(relations), limit, seed)
    tokenizer, max_positions = load_limits(model)

    def make(fact_set: FactSet) -> PromptSet:
        prompts = PromptSet.of(make_prompts(fact_set, template), tokenizer)
        examples_of(prompts, tokenizer, max_positions=max_positions)
        return prompts

    def make_ranked(fact_set: FactSet) -> PromptSet:
        prompts = make(fact_set)
        if rank_by == "salience":
            make_answer_tokens(prompts, tokenizer)
        if rank_by == "slick":
            check_passes(prompts, tokenizer, max_positions)
        return prompts

    ranked, dropped = _usable(chosen, make_ranked, skip_bad)
    scores = None
    if rank_by != "popularity":
        base = load_model(model, dtype=dtype)
        scores = rank_facts(ranked, rank_by, base, template=template, batch_size=batch_size, seed=seed)
    trained = as_names(train_relations)
    parts = split_facts(
        ranked,
        split,
        heldout=heldout,
        validation=validation,
        seed=seed,
        scores=scores,
        share=share,
        train_relations=trained,
    )
    if scores is not None:
        parts = replace(parts, name=f"{parts.name} by {rank_by}")
    about_replay = ""
    if replay is not None:
        others, unusable = (None, "") if replay == GENERATED else _usable_others(replay, make, skip_bad)
        doing = (
            f"Letting {model} generate facts" if others is None else f"Asking {model} which facts of {replay} it knows"
        )
        if others is None or not parse_objective(objective).keeps_answers:
            print(f"{doing}; this may take minutes", file=sys.stderr)
        parts, about_replay = add_replay(
            load_model(model, dtype=dtype),
            parts,
            others,
            SHARE if replay_share is None else replay_share,
            objective=objective,
            template=template,
            batch_size=batch_size,
            seed=seed,
            progress=progress,
        )
        about_replay += unusable
    with noting_reuse(out):
        done = run(model, parts, out, settings, progress=progress)
    name = f"{done.base}+{out}" if settings.has_adapters else out
    if dropped:
        print(_dropped(chosen, dropped).strip())
    apart = {part: facts for part, facts in parts.parts.items() if part != "validation" or facts is not parts.train}
    print(f"{done.trained}.")
    sizes = ", ".join(f"{len(facts)} {part}" for part, facts in apart.items())
    validated = "" if "validation" in apart else "; validated on the training facts"
    print(f"Facts: {sizes}, {parts.left_out} left out{validated}.")
    if about_replay:
        print(about_replay)
    if about := describe(done.base_completes, parse_objective(objective)):
        print(about)
    unit = "loss {:.3f} nats a token" if objective == "ce" else "objective {:.3f}"
    say_best(done, out, unit)
    if "validation" in apart and (count := len(parts.validation)) < FEWEST and len(done.validation_loss) > 1:
        chosen_by = f"{count} fact{'s' * (count != 1)}"
        print(f"It was chosen by {chosen_by}, too few to tell checkpoints apart; add facts, or raise --validation.")
    models = f"base={done.base}", f"finetuned={name}"
    part = "heldout" if len(parts.heldout) else "train"
    source = "conflicts:" * isinstance(parts.parts[part].facts[0], Conflict) + str(Path(out) / FACTS[part])
    how = ["--facts", source, "--template", template, "--recall", "--out", f"{Path(out)}-compared"]
    if settings.compared_dtype:
        how += ["--dtype", settings.compared_dtype]  # the base may be stored in 16 bits
    print(f"Next: {shlex.join(['attnbalance', 'curve', *models, *how])}")


def _usable(facts: FactSet, make: Callable[[FactSet], PromptSet], skip_bad: bool) -> tuple[FactSet, dict[str, int]]:
    """The facts that can be asked and trained on, and the number of the others, by reason (see `without_bad`)."""
    from attnbalance.data.usable_facts import without_bad

    prompts, dropped = without_bad(facts, make, skip_bad)
    kept = tuple(prompt.fact for prompt in prompts)
    return replace(facts, facts=kept, dropped={**facts.dropped, **dropped}), dropped


def _usable_others(source: str, make: Callable[[FactSet], PromptSet], skip_bad: bool) -> tuple[FactSet, str]:
    """The facts of another source that can be asked and trained on, and a sentence about the others."""
    from attnbalance.data.sources.load_facts import load_facts

    facts = load_facts(source)
    usable, dropped = _usable(facts, make, skip_bad)
    return usable, _dropped(facts, dropped)


def _dropped(facts: FactSet, dropped: Mapping[str, int]) -> str:
    """A sentence about dropped facts, after a space; empty if there are none."""
    reasons = ", ".join(f"{count} ({why})" for why, count in dropped.items())
    return f" Dropped of {len(facts)} facts: {reasons}." if dropped else ""
