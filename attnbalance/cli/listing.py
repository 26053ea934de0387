"""Commands that list: `facts` and `tasks`, without a model, and `families`, tiny models of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attnbalance.cli.json_output import NUMBERS
from attnbalance.cli.options import Limit, Relations, Seed, SkipBad, Template, as_names
from attnbalance.data.sources.load_facts import source_names
from attnbalance.errors import DataError, OutputError


def facts(
    ctx: typer.Context,
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
            help="A table with the columns subject and popularity, such as page views. It replaces the source's "
            "own popularity; facts about other subjects are dropped and counted.",
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
    from dataclasses import asdict, replace

    from attnbalance.data.conflicts import Conflict
    from attnbalance.data.prompts import make_prompts
    from attnbalance.data.sources.load_facts import load_facts
    from attnbalance.data.usable_facts import without_bad
    from attnbalance.files.outputs import write_json_lines
    from attnbalance.report.fact_table import describe_facts, relation_rows

    chosen = load_facts(source, as_names(relations), limit, seed, popularity)
    if out is not None:
        _check_file(out)
        if any(isinstance(fact, Conflict) for fact in chosen):
            raise DataError("a file of facts cannot hold conflicts; give the other commands the source itself")
    prompts, dropped = without_bad(chosen, lambda some: make_prompts(some, template), skip_bad)
    usable = replace(chosen, facts=tuple(prompt.fact for prompt in prompts))
    print(f"{len(usable)} fact{'' if len(usable) == 1 else 's'} of {usable.name}\n\n{describe_facts(usable)}")
    all_dropped = {**chosen.dropped, **dropped}
    for reason, count in all_dropped.items():
        print(f"\nDropped: {count} ({reason})")
    if out is not None:
        write_json_lines(out, (fact.as_dict() for fact in usable))
        print(f"\nFacts: {out}")
    relations_in = [asdict(row) for row in relation_rows(usable)]
    about = {"source": usable.name, "facts": len(usable), "relations": relations_in, "dropped": all_dropped}
    ctx.meta[NUMBERS] = {"facts": about}


def _check_file(path: Path) -> None:
    """Raise `OutputError` for a file that other commands could not read, or that is there already."""
    if path.suffix.lower() != ".jsonl":
        raise OutputError(f"--out must be a file whose name ends in .jsonl, got {path}")
    if path.exists():
        raise OutputError(f"{path} is already there; remove it, or choose another name")
    if not path.parent.is_dir():
        raise OutputError(f"there is no folder {path.parent} for {path.name}")


def families(
    ctx: typer.Context,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL_TYPE ...]", help="Such as llama; by default every family.")
    ] = None,
    dtype: Annotated[str, typer.Option(metavar="float32|bfloat16", help="Dtype of the models' weights.")] = "float32",
) -> None:
    """Check that attention of every model family of the installed transformers is read right.

    Tiny random models are read padded left, padded right and alone, within the lengths from which their attention
    changes and beyond, and compared with their own eager attention. No network is needed; all take some minutes.
    Exits with code 1 if one is WRONG.
    """
    from dataclasses import asdict

    from attnbalance.families.check_families import OUTCOMES, WRONG, check_families
    from attnbalance.files.outputs import provenance

    kinds, outcomes = dict[bool, list[str]](), list[dict[str, object]]()
    for outcome in check_families(names or (), dtype):
        length = "crossed" if outcome.crossed else ""
        detail = " ".join(outcome.detail.split())[:200]
        print(f"{outcome.family:<28} {length:<8} {outcome.kind:<9} {detail}", flush=True)
        kinds.setdefault(outcome.crossed, []).append(outcome.kind)
        outcomes.append(asdict(outcome))
    for crossed, some in kinds.items():
        counts = ", ".join(f"{some.count(kind)} {kind}" for kind in OUTCOMES if kind in some)
        print(f"lengths {'crossed by most prompts' if crossed else 'beyond the prompts'}: {counts}")
    versions = dict(provenance()["versions"])  # pyright: ignore
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    ctx.meta[NUMBERS] = {"families": {"dtype": dtype, "outcomes": outcomes, "versions": versions}}
    if any(WRONG in some for some in kinds.values()):
        raise typer.Exit(1)


def tasks(ctx: typer.Context) -> None:
    """Print the folder of the tasks popqa and entity_questions, for lm-evaluation-harness.

    lm_eval --tasks popqa,entity_questions --include_path $(attnbalance tasks) asks and scores as `attnbalance curve
    --recall` does. --metadata '{"popqa": "PATH", "entity_questions": "PATH"}' names local copies of the data.
    """
    from attnbalance.harness.tasks import FOLDER, TASKS

    print(FOLDER)
    ctx.meta[NUMBERS] = {"tasks": {"folder": str(FOLDER), "names": list(TASKS)}}
