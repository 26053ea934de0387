"""The options that several commands share, and what every command does around its library call."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnbalance.data.sources.load_facts import source_names
from attnbalance.errors import DataError
from attnbalance.files.outputs import MARKER, as_folder
from attnbalance.seeds import LARGEST_SEED

if TYPE_CHECKING:
    from attnbalance.finetuning.runs import Run

Out = Annotated[
    str,
    typer.Option(metavar="FOLDER", help="Folder for the results: new, empty, or one to continue (same settings)."),
]
Models = Annotated[
    list[str],
    typer.Argument(metavar="LABEL=MODEL[+ADAPTER] ...", help="Models to measure: folders, GGUF files or Hub ids."),
]
Facts = Annotated[
    str,
    typer.Option(
        metavar="SOURCE",
        help=f"{source_names()} with the columns subject, relation, answers (one text, or a JSON list of texts) and, "
        "optionally, popularity, question and statement.",
    ),
]
Reduce = Annotated[
    str, typer.Option(metavar="max|max-of-mean|sum", help="How attention to a subject's tokens is reduced.")
]
FurtherReadings = Annotated[
    str | None,
    typer.Option(
        metavar="A,B",
        help="What to measure besides subject attention: 'subject share', 'relation share', 'context share', 'first "
        "token share', 'rest share', 'attention entropy', 'value-weighted subject attention'.",
    ),
]
Relations = Annotated[str | None, typer.Option(metavar="A,B", help="Only the facts of these relations.")]
Limit = Annotated[int | None, typer.Option(metavar="N", min=1, help="At most N facts, drawn at random (seeded).")]
Seed = Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Seed of everything that is random.")]
Scoring = Annotated[
    str,
    typer.Option(
        metavar="whole-words|containment|exact-match",
        help="What makes an answer right; recall.json holds all accuracies, and F1.",
    ),
]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="Drop and count facts that cannot be asked; the error without it says why.")
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
BatchSize = Annotated[int, typer.Option(min=1, help="Prompts in a batch; fewer if they are long.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder, GGUF file or Hub id of a model.")]
Steps = Annotated[int, typer.Option(min=1, help="Optimizer steps at most.")]
LearningRate = Annotated[float, typer.Option("--lr", help="Learning rate of AdamW.")]
Decay = Annotated[
    bool, typer.Option("--decay", help="Let the learning rate fall linearly to 0 at the last step; never stop early.")
]
StepBatch = Annotated[int, typer.Option(min=1, help="Examples per step, over all devices.")]
Accumulate = Annotated[int, typer.Option(min=1, help="Parts into which a device splits its share of a batch.")]
WeightDecay = Annotated[float, typer.Option(min=0.0, help="Weight decay of AdamW.")]
LoraRank = Annotated[int, typer.Option(min=0, help="Rank of LoRA adapters; 0 trains the weights themselves.")]
LoraAlpha = Annotated[float | None, typer.Option(help="Scale of LoRA; by default twice the rank.")]
Peft = Annotated[
    str | None,
    typer.Option(metavar="JSON", help='Other adapters, by peft\'s fields: \'{"peft_type": "OFT"}\', for example.'),
]
Train = Annotated[
    str,
    typer.Option(
        metavar="PARTS",
        help="Which weights to train: all, q, k, v, o, qk, ov, attention, mlp, joined by +; @ limits one to layers or "
        "heads: qk@4-7, q@3.1.",
    ),
]
GradientRank = Annotated[
    int | None, typer.Option(min=1, help="Replace each matrix's gradient by its best approximation of this rank.")
]
WeightsDtype = Annotated[str | None, typer.Option(help="float32, bfloat16, ...; by default what suits the method.")]
MixedPrecision = Annotated[
    str | None,
    typer.Option(
        metavar="bf16|no",
        help="bf16: multiply in bfloat16, with the weights kept in their dtype; by default on GPUs that can. It "
        "is faster on processors with avx512_bf16, too.",
    ),
]
CheckpointEvery = Annotated[int, typer.Option(min=1, help="Steps between checkpoints and validations.")]


def say(answer: str, out: str) -> None:
    """Print the answer and where its report lies."""
    print(f"{answer}\n\nReport: {Path(out) / 'report.html'}")


@contextmanager
def noting_reuse(out: str) -> Iterator[None]:
    """Says on stderr, after the block that makes the folder `out`, if it was finished before and is left as it was."""
    marker = as_folder(out) / MARKER
    before = marker.stat().st_mtime_ns if marker.is_file() else None
    yield
    if before is not None and marker.stat().st_mtime_ns == before:
        print(f"{out} is already finished with these settings; nothing was computed again", file=sys.stderr)


def as_names(text: str | None) -> list[str] | None:
    """Names separated by commas."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def command_line() -> str:
    """The command as it was typed."""
    return shlex.join(["attnbalance", *sys.argv[1:]])


def show_progress() -> bool:
    """Whether to show progress (see `progress_bar`): unless TQDM_DISABLE is set.

    Transformers' own remarks are silenced, and its bars where output is no terminal.
    """
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    logging.set_verbosity_error()
    return os.environ.get("TQDM_DISABLE", "0") in ("", "0")


def say_best(run: Run, out: str, unit: str = "loss {:.3f} nats a token") -> None:
    """Print which checkpoint of a run is best, and whether the base is better still."""
    loss = run.validation_loss[run.best_step]
    print(f"Best checkpoint: step {run.best_step}, validation {unit.format(loss)}; it is {out} itself.")
    if run.base_loss is not None and run.base_loss < loss:
        print(f"The base itself is better: validation {unit.format(run.base_loss)}; try a lower --lr.")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; raises `ValueError` for a name that occurs twice, of which one value would be lost."""
    names = Counter(name for name, _ in pairs)
    if repeated := [name for name, count in names.items() if count > 1]:
        raise ValueError(f"{repeated[0]!r} occurs twice")
    return dict(pairs)


def json_mapping(option: str, text: str) -> dict[str, Any]:
    """The JSON object of an option; raises `DataError` for any other text."""
    try:
        value = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{option} must be a JSON object, got {text!r}: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{option} must be a JSON object, got {text!r}")
    return value
