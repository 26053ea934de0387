"""The command that reads facts and no model: `facts`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attnbalance.cli.options import Limit, Relations, Seed, SkipBad, Template, as_names
from attnbalance.data.sources.load_facts import source_names
from attnbalance.errors import DataError, OutputError


def facts(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help=f"{source_names()}.")],
    relations: Relations = None,
    limit: Limit = None,
    template: Template = "qa",
    skip_bad: SkipBad = False,
    seed: Seed = 0,
    popularity: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A table with the columns subject and popularity, such as page views: these take the place of the "
            "source's own, and facts of other subjects are dropped and counted.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the facts here, as .jsonl for any other command.")
    ] = None,
) -> None:
    """Look at facts before a model is asked: how many of each relation, the constant answer, popularity, wording.

    Every question is checked as the other commands check it. With --out the facts are written as a file of one's own,
    to be looked at, changed and given to the other commands as --facts.
    """
    from dataclasses import replace

    from attnbalance.data.conflicts import Conflict
    from attnbalance.data.prompts import make_prompts
    from attnbalance.data.sources.load_facts import load_facts
    from attnbalance.data.usable_facts import without_bad
    from attnbalance.files.outputs import write_json_lines
    from attnbalance.report.fact_table import describe_facts

    chosen = load_facts(source, as_names(relations), limit, seed, popularity)
    if out is not None:
        _check_file(out)
        if any(isinstance(fact, Conflict) for fact in chosen):
            raise DataError("a file of facts cannot hold conflicts; give the other commands the source itself")
    prompts, dropped = without_bad(chosen, lambda some: make_prompts(some, template), skip_bad)
    usable = replace(chosen, facts=tuple(prompt.fact for prompt in prompts))
    print(f"{len(usable)} fact{'' if len(usable) == 1 else 's'} of {usable.name}\n\n{describe_facts(usable)}")
    for reason, count in {**chosen.dropped, **dropped}.items():
        print(f"\nDropped: {count} ({reason})")
    if out is not None:
        write_json_lines(out, (fact.as_dict() for fact in usable))
        print(f"\nFacts: {out}")


def _check_file(path: Path) -> None:
    """Raise `OutputError` for a file that other commands could not read, or that is there already."""
    if path.suffix.lower() != ".jsonl":
        raise OutputError(f"--out must be a file whose name ends in .jsonl, got {path}")
    if path.exists():
        raise OutputError(f"{path} is already there; remove it, or choose another name")
    if not path.parent.is_dir():
        raise OutputError(f"there is no folder {path.parent} for {path.name}")
