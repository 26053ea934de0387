"""Commands that measure models which exist: `curve`, `trajectory`, `knowledge`, `context`, `salience`, `explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attnbalance.cli.options import (
    BatchSize,
    Chat,
    Device,
    Dtype,
    Facts,
    FurtherReadings,
    Limit,
    Models,
    Out,
    Reduce,
    Relations,
    Scoring,
    Seed,
    SkipBad,
    Template,
    Tokenizer,
    TrustRemoteCode,
    as_names,
    command_line,
    noting_reuse,
    say,
    show_progress,
)
from attnbalance.errors import DataError


def curve(
    models: Models,
    facts: Facts,
    out: Out,
    relations: Relations = None,
    template: Template = "qa",
    limit: Limit = None,
    recall: Annotated[bool, typer.Option("--recall", help="Also generate answers and report accuracy.")] = False,
    scoring: Scoring = "whole-words",
    skip_bad: SkipBad = False,
    reduce: Reduce = "max",
    readings: FurtherReadings = None,
    chat: Chat = False,
    tokenizer: Tokenizer = None,
    dtype: Dtype = None,
    device: Device = None,
    batch_size: BatchSize = 32,
    trust_remote_code: TrustRemoteCode = False,
    seed: Seed = 0,
) -> None:
    """Draw the subject-attention curve of one or more models on the same questions, with intervals.

    Writes report.html, curves.png, curves.json, readings.parquet (label, reading, prompt_id, layer, head, value),
    prompts.jsonl, differences.json and, with --recall, recall.json and answers.jsonl. Differences are the second model
    minus the first.
    """
    from attnbalance.comparison.compare import compare as run
    from attnbalance.comparison.specs import MeasureSettings, parse_spec
    from attnbalance.data.sources.load_facts import load_facts
    from attnbalance.readings.attention import REDUCTIONS

    if reduce not in REDUCTIONS:
        raise DataError(f"--reduce must be one of {', '.join(REDUCTIONS)}, got {reduce!r}")
    specs = [parse_spec(model) for model in models]
    chosen = load_facts(facts, as_names(relations), limit, seed)
    settings = MeasureSettings(
        template, chat, reduce, recall, batch_size, dtype, device, tokenizer, trust_remote_code, seed, scoring
    )
    further, how = as_names(readings) or (), {"command": command_line(), "progress": show_progress(), "shared": True}
    with noting_reuse(out):
        answer = run(specs, chosen, settings, out, readings=further, skip_bad=skip_bad, **how)
    say(answer, out)


def trajectory(
    where: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN ...", help="A run's folder, folders of checkpoints, or quoted patterns: 'run/checkpoint-*'."
        ),
    ],
    facts: Facts,
    out: Out,
    base: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Model before training (step 0); by default the adapters' base.")
    ] = None,
    relations: Relations = None,
    template: Template = "qa",
    limit: Limit = None,
    recall: Annotated[bool, typer.Option("--recall", help="Also generate answers and report accuracy.")] = False,
    scoring: Scoring = "whole-words",
    skip_bad: SkipBad = False,
    reduce: Reduce = "max",
    readings: FurtherReadings = None,
    chat: Chat = False,
    tokenizer: Tokenizer = None,
    dtype: Dtype = None,
    device: Device = None,
    batch_size: BatchSize = 32,
    trust_remote_code: TrustRemoteCode = False,
    seed: Seed = 0,
) -> None:
    """Draw subject attention, and accuracy with --recall, along the checkpoints of one training run.

    Checkpoints hold LoRA adapters of one base, which is loaded once and is step 0, or full weights of one shape. Writes
    report.html, trajectory.json, trajectory.png and the tables of `curve`. The report is about the last step against
    the first.
    A killed run resumes at the checkpoint that it had not yet measured.
    """
    from attnbalance.comparison.specs import MeasureSettings
    from attnbalance.data.sources.load_facts import load_facts
    from attnbalance.readings.attention import REDUCTIONS
    from attnbalance.trajectory.compare_checkpoints import compare_checkpoints as run

    if reduce not in REDUCTIONS:
        raise DataError(f"--reduce must be one of {', '.join(REDUCTIONS)}, got {reduce!r}")
    chosen = load_facts(facts, as_names(relations), limit, seed)
    settings = MeasureSettings(
        template, chat, reduce, recall, batch_size, dtype, device, tokenizer, trust_remote_code, seed, scoring
    )
    further, how = as_names(readings) or (), {"command": command_line(), "progress": show_progress(), "shared": True}
    with noting_reuse(out):
        answer = run(where, chosen, settings, out, base=base, readings=further, skip_bad=skip_bad, **how)
    say(answer, out)


def knowledge(
    models: Models,
    facts: Facts,
    out: Out,
    relations: Relations = None,
    template: Template = "qa",
    limit: Limit = None,
    scoring: Scoring = "whole-words",
    skip_bad: SkipBad = False,
    tokenizer: Tokenizer = None,
    dtype: Dtype = None,
    device: Device = None,
    batch_size: BatchSize = 64,
    trust_remote_code: TrustRemoteCode = False,
    seed: Seed = 0,
) -> None:
    """Ask models about facts in every form, and sort the facts by how surely they are known (SLiCK).

    Forms: a statement, the question, both after four answered ones of the relation, and the model's chat. Writes
    table.md, knowledge.json, knowledge.png and facts.jsonl (the category and the answers of each fact). Run it before
    finetuning: it says what there is to keep. With several models it says what each further one kept and gained
    against the first. A killed run resumes.
    """
    from attnbalance.comparison.specs import MeasureSettings, parse_spec
    from attnbalance.data.sources.load_facts import load_facts
    from attnbalance.survey.compare_knowledge import compare_knowledge as run

    progress = show_progress()
    specs = [parse_spec(model) for model in models]
    chosen = load_facts(facts, as_names(relations), limit, seed)
    settings = MeasureSettings(
        template, False, "max", True, batch_size, dtype, device, tokenizer, trust_remote_code, seed, scoring
    )
    with noting_reuse(out):
        answer = run(specs, chosen, settings, out, skip_bad=skip_bad, command=command_line(), progress=progress)
    print(f"{answer}\n\nTable: {Path(out) / 'table.md'}")


def context(
    models: Models,
    conflicts: Annotated[
        str,
        typer.Option(
            metavar="SOURCE",
            help="PATH of a .json, .jsonl, .csv, .tsv or .parquet file with the columns context, question, answer, "
            "memory_answer, or of memo-trap; or swapped:FACTS, which states facts with each other's answers.",
        ),
    ],
    out: Out,
    relations: Relations = None,
    template: Annotated[
        str,
        typer.Option(
            metavar="context|alpaca-context|alpaca-context-only|quote",
            help="How context and question are combined.",
        ),
    ] = "context",
    limit: Limit = None,
    skip_bad: SkipBad = False,
    chat: Chat = False,
    tokenizer: Tokenizer = None,
    dtype: Dtype = None,
    device: Device = None,
    batch_size: BatchSize = 32,
    trust_remote_code: TrustRemoteCode = False,
    seed: Seed = 0,
) -> None:
    """Ask whether models answer knowledge conflicts from the context or from memory, and where they look.

    Each question is also asked without its context. Writes table.md, context.json, answers.jsonl,
    readings.parquet, context.png and attention.png. Models are drawn in their order: name the checkpoints of a run in
    theirs. A killed run resumes.
    """
    from attnbalance.comparison.specs import MeasureSettings, parse_spec
    from attnbalance.context.compare_context import compare_context
    from attnbalance.data.sources.load_facts import SOURCES, SWAPPED, load_facts

    source = conflicts if conflicts.partition(":")[0] in (*SOURCES, SWAPPED) else f"conflicts:{conflicts}"
    chosen = load_facts(source, as_names(relations), limit, seed)
    settings = MeasureSettings(
        template, chat, "sum", False, batch_size, dtype, device, tokenizer, trust_remote_code, seed
    )
    specs, progress = [parse_spec(model) for model in models], show_progress()
    with noting_reuse(out):
        answer = compare_context(
            specs, chosen, settings, out, skip_bad=skip_bad, command=command_line(), progress=progress
        )
    print(f"{answer}\n\nTable: {Path(out) / 'table.md'}")


def salience(
    models: Models,
    facts: Facts,
    out: Out,
    relations: Relations = None,
    template: Template = "qa",
    limit: Limit = None,
    skip_bad: SkipBad = False,
    chat: Chat = False,
    tokenizer: Tokenizer = None,
    dtype: Dtype = None,
    device: Device = None,
    batch_size: BatchSize = 32,
    trust_remote_code: TrustRemoteCode = False,
    seed: Seed = 0,
) -> None:
    """Read what models store about the subjects of facts: value and MLP salience by layer and head, and relevance.

    Writes salience.json (means by layer, and correlations with popularity), salience.parquet (label, reading,
    prompt_id, layer, head, value), salience.png, popularity.png and prompts.jsonl.
    """
    from attnbalance.comparison.specs import MeasureSettings, parse_spec
    from attnbalance.data.sources.load_facts import load_facts
    from attnbalance.storage.compare_salience import compare_salience as run

    progress = show_progress()
    specs = [parse_spec(model) for model in models]
    chosen = load_facts(facts, as_names(relations), limit, seed)
    settings = MeasureSettings(
        template, chat, "max", False, batch_size, dtype, device, tokenizer, trust_remote_code, seed
    )
    with noting_reuse(out):
        answer = run(specs, chosen, settings, out, skip_bad=skip_bad, command=command_line(), progress=progress)
    print(f"{answer}\n\nResults: {out}")


def explain(
    before: Annotated[
        str, typer.Argument(metavar="[LABEL=]BEFORE", help="The checkpoint that knew more, or came first.")
    ],
    after: Annotated[str, typer.Argument(metavar="[LABEL=]AFTER", help="Another checkpoint of the same model.")],
    facts: Facts,
    out: Out,
    relations: Relations = None,
    template: Template = "qa",
    limit: Limit = None,
    scoring: Scoring = "whole-words",
    skip_bad: SkipBad = False,
    chat: Chat = False,
    tokenizer: Tokenizer = None,
    dtype: Dtype = None,
    device: Device = None,
    batch_size: BatchSize = 128,
    trust_remote_code: TrustRemoteCode = False,
    seed: Seed = 0,
) -> None:
    """Explain why facts were lost between two checkpoints: no longer looked at, or no longer stored?

    Splits the change of each answer's margin by the weights that cause it, and tests which interventions bring answers
    back: raised attention, attention rows and weights of the other checkpoint. Writes report.html, explain.json,
    changes.parquet (one row per question), edges.parquet (by layer and head), causes.png and the files of `curve
    --recall`.
    """
    from attnbalance.comparison.specs import MeasureSettings, parse_spec
    from attnbalance.data.sources.load_facts import load_facts
    from attnbalance.explanation.explain import explain as run

    progress = show_progress()
    chosen = load_facts(facts, as_names(relations), limit, seed)
    settings = MeasureSettings(
        template, chat, "max", True, batch_size, dtype, device, tokenizer, trust_remote_code, seed, scoring
    )
    specs = parse_spec(before), parse_spec(after)
    with noting_reuse(out):
        answer = run(*specs, chosen, settings, out, skip_bad=skip_bad, command=command_line(), progress=progress)
    say(answer, out)
