"""One folder of results: made once for its settings, whole or not at all, and read again afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from attnbalance.errors import OutputError
from attnbalance.files.outputs import MARKER, provenance, read_json, write_saved
from attnbalance.files.processes import held_together
from attnbalance.files.seals import check_files, hash_files
from attnbalance.files.work import HOLDER, LOCK, close_work, finishing, in_place, is_finished, locked, work_of, working

OURS = (MARKER, LOCK, HOLDER)
"""Files in a folder that are no results."""


@dataclass(frozen=True)
class ResultFolder:
    """A folder of results, the kind of result and the settings that make it.

    A feature makes its folder like this:

        results = ResultFolder(as_folder(out), "curve", config)
        if not results.is_finished():
            with results.working() as work:
                curves = measure(work)
                with results.writing(work, answer=headline(curves), dropped={}) as folder:
                    write(curves, folder)
        return results.close()
    """

    path: Path
    """An absolute path (see `as_folder`)."""
    kind: str
    """The name of the feature; a folder of another kind is never written to."""
    config: Mapping[str, object]
    """What the results depend on; a folder made with another config is never written to."""
    command: str = ""
    """The command line that made the results, if any; it is recorded, and a rerun may differ in it."""

    def is_finished(self) -> bool:
        """Whether the folder holds finished results of this kind and config.

        Raises `OutputError` where it holds something else, naming the settings that differ, and where a file that was
        written is gone or was changed.
        """
        if not is_finished(self.path, self.kind, self.config):
            return False
        check_files(self.path)
        return "answer" in read_json(self.path / MARKER)

    @contextmanager
    def working(self, shared: bool = False) -> Iterator[Path]:
        """A hidden work folder that survives an interrupt, for one process at a time (see `work.working`).

        With `shared` it is for all processes that `accelerate launch` started; the main one holds it. Raises
        `OutputError` as well where the file that marks the results as finished has lost their answer.
        """
        if shared:
            with held_together(self.working, work_of(self.path)) as work:
                yield work
            return
        if is_finished(self.path, self.kind, self.config) and not self.is_finished():
            raise OutputError(
                f"{self.path / MARKER} must hold the answer of the results, but was changed and has none; remove "
                f"{self.path}, or name a new folder, and run the command again"
            )
        with working(self.path, self.kind, self.config) as work:
            yield work

    @contextmanager
    def writing(self, work: Path, *, answer: str, dropped: Mapping[str, int]) -> Iterator[Path]:
        """A new folder inside `work` that becomes `path`, marked as finished, when the block ends without an error.

        Raises `OutputError` if someone has put other things into `path` meanwhile; what is in `work` is kept.
        """
        with finishing(self.path, self.kind, self.config, work) as folder:
            yield folder
            self.mark(folder, answer=answer, dropped=dropped)

    @contextmanager
    def working_in_place(self) -> Iterator[None]:
        """Work inside `path` itself, for one process at a time; call `mark` at the end (see `work.in_place`)."""
        with in_place(self.path, self.kind, self.config), locked(self.path):
            yield

    def mark(self, folder: Path, *, answer: str, dropped: Mapping[str, int]) -> None:
        """Write attnbalance.json: what `folder` holds, how it was made, its answer, and the facts left out, by reason.

        `folder` is `path`, or the new folder that will become it. Call this last: the file says that all is there, and
        holds the hashes of the files beside it.
        """
        about = {"kind": self.kind, "config": dict(self.config), "answer": answer, "command": self.command}
        hashes = hash_files(folder, but=OURS)
        write_saved(folder / MARKER, about | {"dropped": dict(dropped), "files_sha256": hashes} | provenance())

    def answer(self) -> str:
        """The answer of a finished folder."""
        return str(read_json(self.path / MARKER)["answer"])

    def close(self) -> str:
        """The answer of a finished folder; removes the work folder that a process killed at the very end left."""
        close_work(self.path)
        return self.answer()
