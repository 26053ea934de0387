"""Reproducing figures: every piece of work in a file of its own, done in parallel, and one page about them all."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attnbalance.errors import AttnBalanceError, DataError, OutputError
from attnbalance.outputs import MARKER, as_folder, is_finished, provenance, read_json, write_json
from attnbalance.reproduce.figure import Cell, Figure, Result

KIND = "reproduction"
SCALES = ("small", "paper")


def figures() -> dict[str, Figure]:
    """All figures by name, in the order of the report."""
    from attnbalance.reproduce import directors, ghosal_fig2, ghosal_fig6, goyal, xu_chen

    every = (*ghosal_fig2.FIGURES, *ghosal_fig6.FIGURES, *xu_chen.FIGURES, *directors.FIGURES, *goyal.FIGURES)
    return {figure.name: figure for figure in every}


def reproduce(
    names: Sequence[str],
    out: str | Path,
    *,
    scale: str = "small",
    seeds: int = 5,
    facts: str = "popqa",
    workers: int | None = None,
    command: str | None = None,
    progress: bool = False,
) -> str:
    """Reproduce figures, or "all", into the folder `out`; returns what was seen and what was not, a line a figure.

    Work that is done is not done again, so a killed run goes on, and figures share what they have in common. Writes
    cells/*.json as they are done and, for each figure, NAME.json and NAME.png; then report.html. `workers` processes
    work side by side; by default one a GPU, or as many as there are CPU cores, at most four. With more than one name, a
    figure whose data cannot be had is told as not run; alone it raises. Raises `DataError` for names, scales and seeds
    that there are not, `OutputError` for a folder that holds something else.
    """
    from attnbalance.report.reproduction import answer_of, write_figure, write_page

    chosen, out = _chosen(names), as_folder(out)
    if scale not in SCALES:
        raise DataError(f"--scale must be {' or '.join(SCALES)}, got {scale!r}")
    if seeds < 2:
        raise DataError(f"intervals over seeds need at least 2 of them, got {seeds}")
    config = {"scale": scale, "facts": facts}
    _open(out, config)
    work = {figure.name: figure.cells(scale, range(seeds), facts) for figure in chosen}
    refused = _run(work, out, workers, progress)
    if refused and len(chosen) == 1:
        raise DataError(refused[chosen[0].name])
    done = {}
    for figure in chosen:
        if figure.name not in refused:
            results = [Result(cell.settings, read_json(_file(out, cell))["values"]) for cell in work[figure.name]]
            done[figure.name] = write_figure(figure, results, out, scale)
    answer = answer_of(chosen, done, refused)
    seconds = sum(read_json(_file(out, cell)).get("seconds", 0.0) for cell in _distinct(work).values())
    write_page(chosen, done, refused, out, {"scale": scale, "seeds": seeds, "seconds": seconds, "command": command})
    write_json(out / MARKER, read_json(out / MARKER) | {"answer": answer})
    return answer


def run_cell(figure: str, cell: Cell, out: Path) -> None:
    """Do one piece of work and write its file, whole or not at all."""
    began = time.perf_counter()
    values = figures()[figure].run(cell.settings)
    about = {"settings": dict(cell.settings), "values": values, "seconds": time.perf_counter() - began}
    write_json(_file(out, cell), about | provenance())


def _chosen(names: Sequence[str]) -> list[Figure]:
    known = figures()
    unknown = [name for name in names if name not in (*known, "all")]
    if unknown or not names:
        raise DataError(f"no figure {unknown[0] if unknown else ''!r}; there are all, {', '.join(known)}")
    return [figure for figure in known.values() if "all" in names or figure.name in names]


def _open(out: Path, config: Mapping[str, Any]) -> None:
    """Make the folder, or go on with one of the same scale and facts."""
    if is_finished(out, KIND, config):
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / MARKER, {"kind": KIND, "config": config} | provenance())
    except OSError as error:
        raise OutputError(f"cannot write to --out {out}: {error}") from error


def _file(out: Path, cell: Cell) -> Path:
    return out / "cells" / f"{cell.name}.json"


def _distinct(work: Mapping[str, Sequence[Cell]]) -> dict[str, Cell]:
    return {cell.name: cell for cells in work.values() for cell in cells}


def _run(work: Mapping[str, Sequence[Cell]], out: Path, workers: int | None, progress: bool) -> dict[str, str]:
    """Do what is not done yet; returns the figures that could not be, with why."""
    from tqdm import tqdm

    owner = {cell.name: name for name, cells in reversed(list(work.items())) for cell in cells}
    cells = _distinct(work)
    left = {name: cell for name, cell in cells.items() if not _is_done(out, cell)}
    refused: dict[str, str] = {}
    with tqdm(total=len(cells), initial=len(cells) - len(left), unit="fit", disable=not progress) as bar:
        for name, error in _finished(left, owner, out, _workers(workers, len(left)), refused):
            bar.set_description(owner[name])
            bar.update()
            if error is not None:
                refused |= {figure: str(error) for figure, some in work.items() if cells[name] in some}
    return refused


def _finished(
    left: Mapping[str, Cell], owner: Mapping[str, str], out: Path, workers: int, refused: Mapping[str, str]
) -> Iterator[tuple[str, AttnBalanceError | None]]:
    """The names of cells as they are done, with what a user can put right about those that could not be."""
    if workers == 1:
        for name, cell in left.items():
            try:
                if owner[name] not in refused:
                    run_cell(owner[name], cell, out)
            except AttnBalanceError as error:
                yield name, error
            else:
                yield name, None
        return
    with _pool(workers) as pool:
        waiting = {pool.submit(run_cell, owner[name], cell, out): name for name, cell in left.items()}
        for future in as_completed(waiting):
            error = future.exception()
            if error is not None and not isinstance(error, AttnBalanceError):
                raise error
            yield waiting[future], error


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that share the cores and GPUs; on an error or interrupt what has not begun is dropped."""
    context = multiprocessing.get_context("spawn")
    places = context.SimpleQueue()
    for place in range(workers):
        places.put(place)
    pool = ProcessPoolExecutor(workers, context, _settle, (places, workers))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _settle(places: Any, workers: int) -> None:
    """Give a new process its share of the cores, and a GPU."""
    import torch

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    if torch.cuda.is_available():
        torch.cuda.set_device(places.get() % torch.cuda.device_count())


def _workers(asked: int | None, cells: int) -> int:
    import torch

    if asked is not None and asked < 1:
        raise DataError(f"--workers must be at least 1, got {asked}")
    usual = torch.cuda.device_count() or min(4, os.cpu_count() or 1)
    return max(1, min(asked or usual, cells))


def _is_done(out: Path, cell: Cell) -> bool:
    """Whether a cell has its result; raises `OutputError` where that is of other settings."""
    found = read_json(_file(out, cell))
    if found and found.get("settings") != dict(cell.settings):
        raise OutputError(f"{_file(out, cell)} is of other settings; name a new folder, or remove that file")
    return bool(found)
