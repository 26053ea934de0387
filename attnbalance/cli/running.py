"""Commands that make their own models: `demo`, `study`, `reproduce`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from attnbalance.cli.json_output import NUMBERS
from attnbalance.cli.options import (
    Limit,
    MixedPrecision,
    Out,
    Relations,
    Seed,
    as_names,
    command_line,
    noting_reuse,
    say,
    show_progress,
)
from attnbalance.errors import DataError


def demo(
    out: Out = "attnbalance-demo",
    facts: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="Real facts with popularity, in place of the invented world.")
    ] = None,
    relations: Relations = None,
    limit: Limit = None,
    seed: Seed = 0,
) -> None:
    """Run the whole analysis on a small model made here: about two and a half minutes on two CPU cores.

    Pretrains a small Llama on a world of facts, finetunes it on questions about the more popular half of them
    (FT-Top), the less popular half (FT-Bottom) and all (FT-Whole), and writes a report on what that does to attention
    and to answers about held-out subjects. Run it again to continue, or to print its result again.
    """
    from attnbalance.demo import demo as run

    if facts is None and (relations or limit):
        raise DataError("--relations and --limit choose among --facts; the invented world takes neither")
    names = as_names(relations)
    about: dict[str, Any] = {"source": facts, "relations": names, "limit": limit, "seed": seed}
    with noting_reuse(out):
        answer = run(out, **about, command=command_line(), progress=show_progress())
    say(answer, out)


def study(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file: worlds, methods, splits, seeds.")],
    out: Out,
    worker: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Part I (from 0) of N; by default all, or this task's part of a Slurm array."),
    ] = None,
) -> None:
    """Compare ways of finetuning: methods x splits x seeds on one or more worlds, every fit in a folder of its own.

    Writes fits/WORLD/seed-N/SPLIT/METHOD/result.json and, once all are there, table.md, study.json and study.png. Run
    it again to continue, or several times at once with --worker.
    """
    from attnbalance.studies.study import study as run

    print(f"{run(config, out, worker=worker, progress=show_progress())}\n\nResults: {out}")


def reproduce(
    ctx: typer.Context,
    names: Annotated[list[str], typer.Argument(metavar="NAME ...", help="all, or figures; a wrong name lists them.")],
    out: Out,
    scale: Annotated[
        str,
        typer.Option(
            metavar="tiny|small|paper",
            help="small: an hour for all simulations, on two CPU cores; paper: for GPUs; tiny: shows that it runs.",
        ),
    ] = "small",
    seeds: Annotated[
        int, typer.Option(min=2, help="Number of runs of each setting; intervals are over these runs.")
    ] = 5,
    facts: Annotated[
        str | None,
        typer.Option(metavar="SOURCE", help="PopQA, for figures of real facts: popqa:PATH; by default from the Hub."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="A pretrained model, for the figures that need one."),
    ] = None,
    instructions: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Instructions with Alpaca's columns, for the figures that need them."),
    ] = None,
    squad: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="SQuAD's questions, such as train-v1.1.json, for the figure that needs them."
        ),
    ] = None,
    conflicts: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Knowledge conflicts (see `context`), for the figures that need them."),
    ] = None,
    choices: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="MMLU's .csv files, or their folder, for the figures that need them."),
    ] = None,
    mixed_precision: MixedPrecision = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes; by default one per GPU or CPU core (at most four), one under accelerate launch.",
        ),
    ] = None,
    worker: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Part I (from 0) of N; by default all, or this task's part of a Slurm array."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Run nothing: print what is left to do, its tokens, memory and GPU hours."),
    ] = False,
) -> None:
    """Reproduce figures of the three papers; claims are judged seen, opposite, absent or cannot tell.

    Intervals over seeds decide. A paper is scored by its own statements, where the runs meet its setting. Writes, for
    each figure, NAME.png and NAME.json (all numbers, and the verdicts), and report.html.
    Run it again to continue; figures share what they have in common.
    """
    from dataclasses import asdict

    from attnbalance.papers.forecast import forecast, table
    from attnbalance.papers.pool import usual_workers
    from attnbalance.papers.reproduce import reproduce as run

    options: dict[str, Any] = {"scale": scale, "seeds": seeds, "facts": facts, "model": model}
    options |= {"instructions": instructions, "conflicts": conflicts, "choices": choices}
    options |= {"squad": squad, "mixed_precision": mixed_precision}
    if dry_run:
        forecasts = forecast(names, out, **options)
        ctx.meta[NUMBERS] = {"forecast": [asdict(each) for each in forecasts]}
        print(table(forecasts))
        return
    options |= {"workers": workers or usual_workers(), "worker": worker}
    print(f"{run(names, out, **options, command=command_line(), progress=show_progress())}\n\nResults: {out}")
