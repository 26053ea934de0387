"""`attnbalance --json COMMAND`: one JSON object on standard output; all that people read goes to standard error."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from itertools import takewhile
from pathlib import Path
from typing import Any, TextIO

from typer import Exit
from typer.core import TyperCommand

from attnbalance.errors import OutputError
from attnbalance.files.outputs import MARKER, as_folder
from attnbalance.files.work import HOLDER, LOCK

OPTION = "--json"
WANTED, NUMBERS = "attnbalance.json_wanted", "attnbalance.numbers"
"""Names in a command's context: whether JSON is wanted, and the numbers of a command that writes no results."""

RESULTS = {
    "curve": ("curves.json", "differences.json", "recall.json"),
    "trajectory": ("trajectory.json", "curves.json", "recall.json"),
    "knowledge": ("knowledge.json",),
    "context": ("context.json",),
    "salience": ("salience.json",),
    "explain": ("explain.json", "curves.json", "recall.json"),
    "finetune": ("trajectory.json",),
    "instruct": ("trajectory.json",),
    "study": ("study.json",),
    "demo": ("curves.json", "differences.json", "recall.json"),
}
"""The files of results in a command's folder, beside attnbalance.json; those of `reproduce` are its figures'."""


GROWING = ("study", "reproduce")
"""The commands whose folder may hold results of fewer fits or cells than were asked for now."""

SHARED = ("finetune", "instruct", "curve", "trajectory", "reproduce")
"""The commands whose work is shared by the processes that `accelerate launch` starts."""


class Command(TyperCommand):
    """A command that prints one JSON object about its results if `--json` stands before its name."""

    def invoke(self, ctx: Any) -> object:
        """Run the command."""
        if not ctx.meta[WANTED]:
            with _first_process_prints(ctx.info_name):
                return super().invoke(ctx)
        if not sys.stdout:  # Python's word for one that is closed
            raise OutputError("--json writes to standard output, which is closed; leave it out, or open that")
        ending, before = None, dict[Path, tuple[int, int]]()
        with _standard_output_as_error():
            if ctx.info_name in GROWING:
                before = _stamps(ctx)
            try:
                super().invoke(ctx)
            except Exit as exit_code:  # a command that has its results and found something wrong
                ending = exit_code
        print_json(_about(ctx, before), ctx.info_name)
        if ending is not None:
            raise ending
        return None


def wants_json(arguments: Sequence[str]) -> bool:
    """Whether `--json` is among the options before the command."""
    return OPTION in takewhile(lambda argument: argument.startswith("-"), arguments)


def print_json(value: Mapping[str, object], command: str | None) -> None:
    """Print a JSON object about a command on one line, if this process prints; numbers that are not finite are null."""
    if _prints(command):
        print(json.dumps(json.loads(json.dumps(value), parse_constant=lambda _: None)), flush=True)


def _prints(command: str | None) -> bool:
    """Whether this process writes to standard output: of those that share a command's work, the first one does."""
    return command not in SHARED or os.environ.get("RANK", "0") == "0"


def _about(ctx: Any, before: Mapping[Path, tuple[int, int]]) -> dict[str, object]:
    """The command, the version, the folder of results as an absolute path, its files, and its numbers.

    before: the stamps of files from before the command; results that it did not write again are left out.
    """
    from importlib.metadata import version

    out = ctx.params.get("out")
    folder = None if out is None else as_folder(out)
    files = sorted(path.name for path in folder.iterdir() if path.is_file()) if folder and folder.is_dir() else []
    return {
        "command": ctx.info_name,
        "version": version("attnbalance"),
        "out": None if folder is None else str(folder),
        "files": [name for name in files if name not in (LOCK, HOLDER)],
        "results": ctx.meta.get(NUMBERS) or _results(folder, (MARKER, *_new_files_of(ctx, before))),
    }


def _new_files_of(ctx: Any, before: Mapping[Path, tuple[int, int]]) -> list[str]:
    now = _stamps(ctx) if before else {}
    old = {path.name for path, stamp in now.items() if before.get(path) == stamp}
    return [name for name in _files_of(ctx) if name not in old]


def _stamps(ctx: Any) -> dict[Path, tuple[int, int]]:
    """What changes when a file of results is written: its inode and its time."""
    paths = [as_folder(ctx.params["out"]) / name for name in _files_of(ctx)]
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in paths if path.is_file()}


def _files_of(ctx: Any) -> Sequence[str]:
    """The files of results of a command, beside attnbalance.json."""
    if ctx.info_name == "reproduce":
        from attnbalance.papers.reproduce import figures

        return [f"{name}.json" for name in figures() if {name, "all"} & {*ctx.params["names"]}]
    return RESULTS.get(ctx.info_name, ())


def _results(folder: Path | None, names: Sequence[str]) -> dict[str, object]:
    """What files of a folder hold, by their names without the ending; those that are not there are left out."""
    paths = sorted(folder / name for name in set(names)) if folder else []
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths if path.is_file()}


@contextmanager
def _first_process_prints(command: str | None) -> Iterator[None]:
    """Sends nowhere what a process that does not print (see `_prints`) writes to standard output."""
    if _prints(command):
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


@contextmanager
def _standard_output_as_error() -> Iterator[None]:
    """Sends all that this process, libraries in it and processes it starts write to standard output to error output."""
    written = sys.stdout
    _flush(written)
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _flush(written)
        os.dup2(kept, 1)
        os.close(kept)


def _flush(stream: TextIO) -> None:
    """Write out what Python and the C library hold back for standard output."""
    stream.flush()
    ctypes.CDLL(None).fflush(None)
