"""The command line: parses, calls the library, prints; a message and exit code 2 for whatever a user can put right."""

from __future__ import annotations

import errno
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from attnbalance.errors import AttnBalanceError, DataError


class _Commands(TyperGroup):
    """Commands whose errors, where a user can put them right, become one message and exit code 2."""

    def invoke(self, ctx: Any) -> object:
        """Run the command that was named."""
        try:
            return super().invoke(ctx)
        except AttnBalanceError as error:
            _fail(str(error))
        except KeyboardInterrupt as interrupt:
            left = f"; {interrupt}" if str(interrupt) else ""
            _fail(f"interrupted{left}; run the same command again to go on")
        except Exception as error:
            message = _trouble(error)
            if message is None:
                raise
            _fail(message)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Measure where finetuning takes a language model's attention off a question's subject, and what that costs.",
    epilog="Start with `attnbalance demo`. SOURCE is `popqa` (from the Hub), `popqa:PATH`, or PATH of your own facts.",
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(version("attnbalance"))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Options before the command."""


Out = Annotated[Path, typer.Option(help="Folder for the results: new, empty, or one to go on with (same settings).")]
Facts = Annotated[
    str,
    typer.Option(
        metavar="SOURCE",
        help="`popqa`, `popqa:PATH`, or PATH of a .jsonl, .csv, .tsv or .parquet file with the columns subject, "
        "relation, answers (one text, or a JSON list of texts) and, optionally, popularity and question.",
    ),
]
Relations = Annotated[str | None, typer.Option(metavar="A,B", help="Only the facts of these relations.")]
Limit = Annotated[int | None, typer.Option(metavar="N", min=1, help="At most N facts, drawn at random (seeded).")]
Seed = Annotated[int, typer.Option(help="Decides everything that is random.")]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="Drop and count facts whose question does not hold its subject exactly once.")
]
Template = Annotated[
    str,
    typer.Option(
        metavar="plain|qa|TEXT",
        help="plain: the question as it is; qa: 'Question: ... Answer:'; or a text with {question} or {subject}, and "
        "with {relation} where wanted.",
    ),
]


Chat = Annotated[bool, typer.Option("--chat", help="Ask through the tokenizer's chat template.")]
Tokenizer = Annotated[str | None, typer.Option(help="Folder or Hub id of the tokenizer, if not the model's.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, ...; by default the checkpoint's.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ..., or auto to spread over all GPUs.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Prompts at once.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]


@app.command()
def demo(
    out: Out = Path("attnbalance-demo"),
    facts: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="Real facts with popularity, in place of the invented world.")
    ] = None,
    relations: Relations = None,
    limit: Limit = None,
    seed: Seed = 0,
) -> None:
    """See the whole thing at work on a small model made here: about five minutes on two CPU cores.

    Pretrains a small Llama on a world of facts, finetunes it on questions about the more popular half of them
    (FT-Top), the less popular half (FT-Bottom) and all (FT-Whole), and writes a report on what that does to attention
    and to answers about held-out subjects. Run it again to continue, or to see the answer again.
    """
    from attnbalance.demo import demo as run

    if facts is None and (relations or limit):
        raise DataError("--relations and --limit choose among --facts; the invented world takes neither")
    names = _names(relations)
    answer = run(out, source=facts, relations=names, limit=limit, seed=seed, command=_command(), progress=_progress())
    _say(answer, out)


@app.command()
def finetune(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder or Hub id of a causal language model.")],
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
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps at most.")] = 200,
    learning_rate: Annotated[float, typer.Option("--lr", help="Learning rate of AdamW, constant.")] = 3e-4,
    batch_size: Annotated[int, typer.Option(min=1, help="Questions a step, over all devices.")] = 128,
    accumulate: Annotated[int, typer.Option(min=1, help="Parts in which a device takes its share of a batch.")] = 1,
    weight_decay: Annotated[float, typer.Option(min=0.0)] = 0.0,
    share: Annotated[float, typer.Option(help="Share of the facts that top, bottom or random takes.")] = 0.5,
    train_relations: Annotated[
        str | None, typer.Option(metavar="A,B", help="Train on these relations only; the tested facts keep all.")
    ] = None,
    lora_rank: Annotated[int, typer.Option(min=0, help="Rank of LoRA adapters; 0 trains the weights themselves.")] = 0,
    lora_alpha: Annotated[float | None, typer.Option(help="Scale of LoRA; by default twice the rank.")] = None,
    train: Annotated[
        str | None,
        typer.Option(
            metavar="PARTS",
            help="Which weights: all, q, k, v, o, qk, ov, attention, mlp, joined by +; @ limits one to layers or "
            "heads: qk@4-7, q@3.1. By default all; attention where the objective names recommended.",
        ),
    ] = None,
    objective: Annotated[
        str,
        typer.Option(
            metavar="EXPRESSION",
            help="recommended, or terms with weights, e.g. 'ce + 0.3*row-anchor(question)'; a wrong one lists all.",
        ),
    ] = "ce",
    curriculum: Annotated[
        str,
        typer.Option(metavar="NAME", help="shuffled, popular-first, obscure-first, popular-last, popular-share=SHARE."),
    ] = "shuffled",
    gradient_rank: Annotated[
        int | None, typer.Option(min=1, help="Replace each matrix's gradient by its best approximation of this rank.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, ...; by default what suits the method.")] = None,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints and validations.")] = 20,
    patience: Annotated[int, typer.Option(min=0, help="Stop after so many validations without gain; 0: never.")] = 3,
    heldout: Annotated[float, typer.Option(help="Share of the subjects set apart for testing.")] = 0.5,
    rank_by: Annotated[
        str,
        typer.Option(
            metavar="popularity|loss|salience|relevance",
            help="What top and bottom go by: the facts' popularity, or what MODEL itself shows of each fact.",
        ),
    ] = "popularity",
    skip_bad: SkipBad = False,
    seed: Seed = 0,
) -> None:
    """Finetune a model on questions about facts, and keep some subjects apart to test it on.

    The folder --out is itself a model (or adapter): the checkpoint that was best on a validation part of the training
    facts. It also holds all checkpoints, train.jsonl, and heldout.jsonl for `attnbalance curve --facts`.
    """
    from attnbalance.datasets.load import load_facts
    from attnbalance.facts import FactSet
    from attnbalance.finetune.ranking import RANKINGS, rank_facts
    from attnbalance.finetune.splits import split_facts
    from attnbalance.finetune.trainer import finetune as run
    from attnbalance.measure import without_bad
    from attnbalance.models.load import load_limits, load_model
    from attnbalance.prompts import Prompt, make_prompts
    from attnbalance.readings.contrast import make_contrasts

    if rank_by not in RANKINGS:
        raise DataError(f"--rank-by must be one of {', '.join(RANKINGS)}, got {rank_by!r}")
    if rank_by != RANKINGS[0] and split in ("whole", "random"):
        raise DataError(f"--rank-by says what top and bottom go by; split {split} does not rank facts")
    progress = _progress()
    chosen = load_facts(facts, _names(relations), limit, seed)

    def make(some: FactSet) -> tuple[Prompt, ...]:
        prompts = make_prompts(some, template)
        if rank_by == "salience":
            make_contrasts(prompts, load_limits(model)[0])
        return prompts

    prompts, dropped = without_bad(chosen, make, skip_bad)
    usable = replace(chosen, facts=tuple(prompt.fact for prompt in prompts))
    scores = None
    if rank_by != "popularity":
        scores = rank_facts(usable, rank_by, load_model(model, dtype=dtype), template=template, batch_size=batch_size)
    trained = _names(train_relations)
    parts = split_facts(usable, split, heldout=heldout, seed=seed, scores=scores, share=share, train_relations=trained)
    if scores is not None:
        parts = replace(parts, name=f"{split} by {rank_by}")
    done = run(
        model,
        parts,
        out,
        template=template,
        steps=steps,
        learning_rate=learning_rate,
        batch_size=batch_size,
        accumulate=accumulate,
        weight_decay=weight_decay,
        lora_rank=lora_rank,
        lora_alpha=lora_alpha,
        train=train,
        objective=objective,
        curriculum=curriculum,
        gradient_rank=gradient_rank,
        dtype=dtype,
        checkpoint_every=checkpoint_every,
        patience=patience or None,
        seed=seed,
        progress=progress,
    )
    loss = done.validation_loss[done.best_step]
    name = f"{done.base}+{out}" if lora_rank else str(out)
    if dropped:
        print(f"Dropped of {len(chosen)} facts: {', '.join(f'{n} ({why})' for why, n in dropped.items())}.")
    sizes = {part: len(getattr(parts, part)) for part in ("train", "validation", "heldout")}
    print(f"{done.trained}.")
    print(f"Facts: {', '.join(f'{n} {part}' for part, n in sizes.items())}, {parts.left_out} left out.")
    unit = "loss {:.3f} nats a token" if objective == "ce" else "objective {:.3f}"
    print(f"Best checkpoint: step {done.best_step}, validation {unit.format(loss)}; it is {out} itself.")
    print(
        f"Next: attnbalance curve base={done.base} finetuned={name} --facts {out / 'heldout.jsonl'} --recall --out ..."
    )


@app.command()
def study(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file: worlds, methods, splits, seeds.")],
    out: Out,
    worker: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Do part I (from 0) of N; by default all, or Slurm's array index's part."),
    ] = None,
) -> None:
    """Compare ways of finetuning: methods x splits x seeds on one or more worlds, every fit in a folder of its own.

    Writes fits/WORLD/seed-N/SPLIT/METHOD/result.json and, once all are there, table.md, study.json and study.png. Run
    it again to go on, or several times at once with --worker.
    """
    from attnbalance.study import study as run

    print(f"{run(config, out, worker=worker, progress=_progress())}\n\nResults: {out}")


@app.command()
def reproduce(
    names: Annotated[list[str], typer.Argument(metavar="NAME ...", help="all, or figures; a wrong name lists them.")],
    out: Out,
    scale: Annotated[
        str, typer.Option(metavar="small|paper", help="small: minutes on two CPU cores; paper: for GPUs.")
    ] = "small",
    seeds: Annotated[int, typer.Option(min=2, help="Runs of each setting, that intervals are taken over.")] = 5,
    facts: Annotated[
        str, typer.Option(metavar="SOURCE", help="Where xu-chen-popqa has PopQA from: `popqa` (Hub), or `popqa:PATH`.")
    ] = "popqa",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes; by default one a GPU, or one a CPU core, at most four.")
    ] = None,
) -> None:
    """Reproduce figures of the three papers, each claim judged from intervals over seeds: seen, not seen, or reversed.

    Writes, for each figure, NAME.png and NAME.json (all numbers, and one sentence on what is seen), and report.html.
    Run it again to go on; figures share what they have in common.
    """
    from attnbalance.reproduction import reproduce as run
    from attnbalance.reproduction import usual_workers

    options: dict[str, Any] = {"scale": scale, "seeds": seeds, "facts": facts, "workers": workers or usual_workers()}
    print(f"{run(names, out, **options, command=_command(), progress=_progress())}\n\nResults: {out}")


@app.command()
def curve(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="LABEL=MODEL[+ADAPTER] ...", help="Models to compare: folders or Hub ids, with an adapter."
        ),
    ],
    facts: Facts,
    out: Out,
    relations: Relations = None,
    template: Template = "qa",
    limit: Limit = None,
    recall: Annotated[bool, typer.Option("--recall", help="Also generate answers and report accuracy.")] = False,
    skip_bad: SkipBad = False,
    reduce: Annotated[str, typer.Option(metavar="max|sum", help="How a subject's tokens are put together.")] = "max",
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
    prompts.jsonl and, with --recall, recall.json and answers.jsonl. The report is about the difference of the first two
    models.
    """
    from attnbalance.datasets.load import load_facts
    from attnbalance.measure import How, parse_spec
    from attnbalance.readings.attention import REDUCTIONS
    from attnbalance.results import curve as run

    if reduce not in REDUCTIONS:
        raise DataError(f"--reduce must be one of {', '.join(REDUCTIONS)}, got {reduce!r}")
    specs = [parse_spec(model) for model in models]
    chosen = load_facts(facts, _names(relations), limit, seed)
    how = How(template, chat, reduce, recall, batch_size, dtype, device, tokenizer, trust_remote_code, seed)
    answer = run(specs, chosen, how, out, skip_bad=skip_bad, command=_command(), progress=_progress())
    _say(answer, out)


@app.command()
def salience(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="LABEL=MODEL[+ADAPTER] ...", help="Models to read: folders or Hub ids, with an adapter."
        ),
    ],
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
    from attnbalance.datasets.load import load_facts
    from attnbalance.measure import How, parse_spec
    from attnbalance.salience import salience as run

    progress = _progress()
    specs = [parse_spec(model) for model in models]
    chosen = load_facts(facts, _names(relations), limit, seed)
    how = How(template, chat, "max", False, batch_size, dtype, device, tokenizer, trust_remote_code, seed)
    answer = run(specs, chosen, how, out, skip_bad=skip_bad, command=_command(), progress=progress)
    print(f"{answer}\n\nResults: {out}")


@app.command()
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

    Splits the change of every answer's lead by cause and by place, and tries what brings answers back: attention
    raised, attention rows and weights of the other checkpoint. Writes report.html, explain.json, changes.parquet (one
    row a question), edges.parquet (by layer and head), causes.png and what `curve --recall` writes.
    """
    from attnbalance.datasets.load import load_facts
    from attnbalance.explain import explain as run
    from attnbalance.measure import How, parse_spec

    progress = _progress()
    chosen = load_facts(facts, _names(relations), limit, seed)
    how = How(template, chat, "max", True, batch_size, dtype, device, tokenizer, trust_remote_code, seed)
    specs = parse_spec(before), parse_spec(after)
    answer = run(*specs, chosen, how, out, skip_bad=skip_bad, command=_command(), progress=progress)
    _say(answer, out)


def main() -> None:
    """Run the command line.

    Threads that wait for each other give up their core soon (libgomp reads the setting when torch is imported): on a
    machine that does anything else besides, small models train several times faster, and on an idle one as fast.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    app()


def _trouble(error: BaseException) -> str | None:
    """What to say of a full disk, whatever library met it, and of other trouble with files; None for another error."""
    if getattr(error, "errno", None) == errno.ENOSPC or os.strerror(errno.ENOSPC) in str(error):
        return f"the disk is full ({error}); free some space and run the same command again to go on"
    return f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.filename else None


def _fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def _say(answer: str, out: Path) -> None:
    print(f"{answer}\n\nReport: {out / 'report.html'}")


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def _command() -> str:
    return shlex.join(["attnbalance", *sys.argv[1:]])


def _progress() -> bool:
    """Whether to draw progress bars: on a terminal. Elsewhere transformers' own bars and remarks are silenced too."""
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    logging.set_verbosity_error()
    return sys.stderr.isatty()


if __name__ == "__main__":
    main()
