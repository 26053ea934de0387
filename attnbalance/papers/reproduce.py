"""Reproducing figures: each cell is saved in its own file, cells run in parallel, and one page shows all figures."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attnbalance.arguments import expects
from attnbalance.errors import AttnBalanceError, BadRowsError, DataError, ModelError
from attnbalance.files.outputs import as_folder
from attnbalance.files.processes import from_main_process, held_together, processes
from attnbalance.files.work import in_place, is_finished, locked
from attnbalance.files.worker import parse_worker
from attnbalance.finetuning.schedule import warn_of_precisions
from attnbalance.papers.cell_files import refuse_others, saved_cell, sources_of, write_cell
from attnbalance.papers.figure import Cell, CellResult, PaperFigure
from attnbalance.papers.pool import check_workers, started_pool
from attnbalance.progress import progress_bar

KIND = "reproduction"
SCALES = ("tiny", "small", "paper")
"""tiny shows that the code runs, and nothing else."""
MOST_SEEDS = 1000
"""All cells are listed before any is run, so their number is limited; ten seeds suffice for intervals."""


def figures() -> dict[str, PaperFigure]:
    """All figures by name, in the order of the report."""
    from attnbalance.papers import (
        directors,
        ghosal_fig2,
        ghosal_fig5,
        ghosal_fig6,
        ghosal_popqa,
        ghosal_table3,
        goyal,
        goyal_tuned,
        xu_chen,
        xu_chen_capitals,
    )

    of_ghosal = (ghosal_fig2, ghosal_popqa, ghosal_fig5, ghosal_table3, ghosal_fig6)
    modules = (*of_ghosal, xu_chen, directors, xu_chen_capitals, goyal, goyal_tuned)
    return {figure.name: figure for module in modules for figure in module.FIGURES}


@expects(names=[str])
def reproduce(
    names: Sequence[str],
    out: str | Path,
    *,
    scale: str = "small",
    seeds: int = 5,
    facts: str | None = None,
    model: str | None = None,
    instructions: str | None = None,
    conflicts: str | None = None,
    choices: str | None = None,
    squad: str | None = None,
    mixed_precision: str | None = None,
    workers: int = 1,
    worker: str | None = None,
    command: str | None = None,
    progress: bool = False,
) -> str:
    """Reproduce figures, or "all", into the folder `out`; return the verdict on each of their claims as text.

    Finished cells are not run again, so an interrupted run resumes, and figures share cells. Writes cells/*.json as
    they finish; NAME.json and NAME.png for each figure; and report.html, which shows all figures whose cells for these
    seeds are in the folder. `workers` processes run in parallel; a script that sets more than one must guard its own
    code with `if __name__ == "__main__":`. Several machines can share the work with `worker`: "I/N" runs each N-th
    cell, from the I-th (counted from 0; by default Slurm's array index). Each machine writes the figures whose cells
    are all there. Processes of `accelerate launch` all call this with the same arguments: they train the language model
    of each cell together (DDP or FSDP), and the first one writes; an error in a cell then ends them all. By default,
    the sources (`facts` to `mixed_precision`) are those of the folder's cells. If no cell names them, `facts` is PopQA
    from the Hub and the others are None (see `Sources`). A figure whose data cannot be loaded, or are not given, is
    reported as not run; the error is raised if no figure can be run. Raises `DataError` for unknown names or scales,
    too few seeds and missing data, `OutputError` for a folder with other contents, and `ModelError` for a cell that
    cannot be completed.
    """
    chosen, out = chosen_figures(names), as_folder(out)
    check_size(scale, seeds, workers)
    check_workers(workers)
    index, count = parse_worker(worker)
    place = out if count == 1 else out / "workers" / f"{index}-of-{count}"
    is_finished(out, KIND, {"scale": scale})  # what the folder holds is refused before it is read
    given = {"facts": facts, "model": model, "instructions": instructions, "conflicts": conflicts}
    given |= {"squad": squad, "choices": choices, "mixed_precision": mixed_precision}
    sources = sources_of(out, given)
    work = {
        name: figure.cells(scale, range(seeds), sources)
        for name, figure in figures().items()
        if not sources.missing(figure.needs)
    }
    refused: dict[str, AttnBalanceError] = {
        figure.name: DataError(sources.missing(figure.needs)) for figure in chosen if figure.name not in work
    }
    if len(refused) == len(chosen):
        raise DataError(_listed(refused))
    with held_together(lambda: _holding(out, scale, place), out):
        asked = {figure.name: work[figure.name] for figure in chosen if figure.name in work}
        refuse_others(_distinct(asked), out)
        refused |= _run(asked, out, workers, slice(index, None, count), progress)
        if len(refused) == len(chosen):
            raise joined(refused)
        about = {"scale": scale, "seeds": seeds, "model": sources.model, "command": command}
        return from_main_process(lambda: _write(chosen, work, refused, out, about))


@contextmanager
def _holding(out: Path, scale: str, folder: Path) -> Iterator[Path]:
    """`out`, while this process holds `folder`, which is `out` or a worker's part of it."""
    with in_place(out, KIND, {"scale": scale}), locked(folder):
        yield out


def _write(
    chosen: Sequence[PaperFigure],
    work: Mapping[str, Sequence[Cell]],
    refused: Mapping[str, AttnBalanceError],
    out: Path,
    about: Mapping[str, Any],
) -> str:
    """Write all figures whose cells are there, and the page; return what to say of the chosen ones.

    `work` are the cells of every figure whose sources are given, `refused` the errors of those that cannot be run.
    """
    from attnbalance.papers.page import answer_of, write_figure, write_page

    names = {figure.name for figure in chosen}
    done, left = {}, dict[str, str]()
    for name, cells in work.items():
        missing = sum(not saved_cell(out, cell) for cell in cells)
        if not missing:
            saved = [saved_cell(out, cell) for cell in cells]
            results = [CellResult(cell.settings, it["values"]) for cell, it in zip(cells, saved, strict=True)]
            seconds = sum(it["seconds"] for it in saved)
            done[name] = write_figure(figures()[name], results, out, about["scale"], seconds)
        elif name in names and name not in refused:
            left[name] = (
                f"{missing} of {len(cells)} cells are left to other workers; the last to finish writes the figure, "
                "or run this command again"
            )
    refusals = {name: str(error) for name, error in refused.items()}
    made = _distinct({name: work[name] for name in done}).values()
    seconds = sum(saved_cell(out, cell)["seconds"] for cell in made)
    warn_of_precisions([saved_cell(out, cell).get("mixed_precision") for cell in made], "cells", stacklevel=7)
    shown = [figure for name, figure in figures().items() if name in done or name in refusals]
    write_page(shown, done, refusals, out, {**about, "seconds": seconds})
    return answer_of(chosen, done, refusals | left)


def check_size(scale: str, seeds: int, workers: int = 1) -> None:
    """Raise `DataError` for an unknown scale, too few or too many seeds, and no worker."""
    if scale not in SCALES or not 2 <= seeds <= MOST_SEEDS or workers < 1:
        raise DataError(
            f"`scale` must be {', '.join(SCALES[:-1])} or {SCALES[-1]}, `seeds` at least 2 for intervals and at most "
            f"{MOST_SEEDS:,}, `workers` at least 1; got {scale!r}, {seeds} and {workers}"
        )


def run_cell(figure: str, cell: Cell, out: Path) -> None:
    """Run one cell; the main process writes its file (see `write_cell`)."""
    from attnbalance.finetuning.loop import precision_of
    from attnbalance.papers.finetuned import LOSS, finetuning_of

    began = time.perf_counter()
    values = figures()[figure].run(cell.settings)
    seconds = time.perf_counter() - began
    precision = precision_of(finetuning_of(cell.settings).schedule) if LOSS in values else None
    from_main_process(lambda: write_cell(out, cell, values, seconds, precision))


def chosen_figures(names: Sequence[str]) -> list[PaperFigure]:
    """The figures of these names, or all for "all", in the order of the report; raises `DataError` for others."""
    known = figures()
    unknown = [name for name in names if name not in (*known, "all")]
    if unknown or not names:
        raise DataError(f"no figure {unknown[0] if unknown else ''!r}; choose from all, {', '.join(known)}")
    return [figure for figure in known.values() if "all" in names or figure.name in names]


def _distinct(work: Mapping[str, Sequence[Cell]]) -> dict[str, Cell]:
    return {cell.name: cell for cells in work.values() for cell in cells}


def joined(refused: Mapping[str, AttnBalanceError]) -> AttnBalanceError:
    """One error for figures that cannot be run: theirs if they have the same, else all of them by name."""
    first, *others = refused.values()
    return first if all(str(error) == str(first) for error in others) else DataError(_listed(refused))


def _listed(refused: Mapping[str, AttnBalanceError]) -> str:
    return "; ".join(f"{name}: {error}" for name, error in refused.items())


def _run(
    work: Mapping[str, Sequence[Cell]], out: Path, workers: int, part: slice, progress: bool
) -> dict[str, AttnBalanceError]:
    """Run a part of the cells, but for those that are saved; return the figures that cannot be run, with errors."""
    cells = dict(list(_distinct(work).items())[part])
    owner = {cell.name: name for name, cells in reversed(list(work.items())) for cell in cells}
    names = from_main_process(lambda: {cell.name for cell in cells.values() if not saved_cell(out, cell)})
    left = [cell for cell in cells.values() if cell.name in names]
    refused: dict[str, AttnBalanceError] = {}

    def wanted(cell: Cell) -> bool:
        return any(cell in cells for name, cells in work.items() if name not in refused)

    about = {"initial": len(cells) - len(left), "unit": "fit", "leave": True}
    with progress_bar("fits", total=len(cells), shown=progress and processes().is_main_process, **about) as bar:
        jobs = ((owner[cell.name], cell) for cell in left if wanted(cell))
        for cell, error in _finished(jobs, out, min(workers, len(left))):
            bar.set_description(owner[cell.name])
            bar.update()
            if error is not None:
                refused |= {name: error for name, cells in work.items() if cell in cells}
    return refused


def _finished(
    jobs: Iterator[tuple[str, Cell]], out: Path, workers: int
) -> Iterator[tuple[Cell, AttnBalanceError | None]]:
    """The cells as they finish, with the error of those that failed in a way a user can fix."""
    if workers <= 1:
        for figure, cell in jobs:
            yield cell, _tried(figure, cell, out)
        return
    with started_pool(workers) as pool:
        waiting: dict[Future, Cell] = {}
        for figure, cell in jobs:
            waiting[pool.submit(_tried, figure, cell, out)] = cell
            if len(waiting) == workers:  # submit no more than can start, so that an interrupt ends all that started
                yield from _first(waiting)
        while waiting:
            yield from _first(waiting)


def _tried(figure: str, cell: Cell, out: Path) -> AttnBalanceError | None:
    if processes().num_processes > 1:  # an error in one of them must end them all
        run_cell(figure, cell, out)
        return None
    try:
        run_cell(figure, cell, out)
    except BadRowsError as error:
        return DataError(str(error))  # unlike BadRowsError, it can be pickled
    except AttnBalanceError as error:
        return error
    except Exception as error:
        error.add_note(f"while working on {cell.name}, for {figure}")
        raise
    return None


def _first(waiting: dict[Future, Cell]) -> Iterator[tuple[Cell, AttnBalanceError | None]]:
    """Wait for at least one of the futures; remove and yield those that are done."""
    for future in wait(waiting, return_when=FIRST_COMPLETED).done:
        cell = waiting.pop(future)
        try:
            yield cell, future.result()
        except BrokenProcessPool as error:
            raise ModelError(
                f"a process ended while it worked on {cell.name}: out of memory? Use `workers=1`. (A script that sets "
                'workers must guard its own code with `if __name__ == "__main__":`)'
            ) from error
