"""Processes of one launch: here the only one, or two, of which the first holds the folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import run_in_two_processes

from attnbalance.files.processes import by_main_process, held_together, on_main_process_first, processes


def test_a_process_of_its_own_is_the_main_one() -> None:
    done = list[str]()
    assert (processes().is_main_process, processes().num_processes) == (True, 1)
    assert on_main_process_first(lambda: 42) == 42
    by_main_process(lambda: done.append("done"))
    assert done == ["done"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_folder_is_held_while_the_block_runs_and_let_go_of_after_an_error(tmp_path: Path, fails: bool) -> None:
    held = list[bool]()

    @contextmanager
    def hold() -> Iterator[Path]:
        held.append(True)
        try:
            yield tmp_path
        finally:
            held.append(False)

    def work() -> None:
        with held_together(hold, tmp_path / "other") as folder:
            assert (folder, held) == (tmp_path, [True])
            if fails:
                raise KeyboardInterrupt

    if fails:
        with pytest.raises(KeyboardInterrupt):
            work()
    else:
        work()
    assert held == [True, False]


def test_the_second_of_two_processes_works_only_while_the_first_holds_the_folder(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        """
import sys, time
from contextlib import contextmanager
from pathlib import Path
import torch
from attnbalance.errors import BadRowsError, DataError, DivergenceError, ModelError
from attnbalance.files.processes import by_main_process, from_main_process, held_together, processes

folder, rank = Path(sys.argv[1]), processes().process_index

@contextmanager
def hold():
    assert rank == 0
    time.sleep(1)
    (folder / "held").touch()
    yield folder
    assert (folder / "worked").exists()  # by the other process
    (folder / "held").unlink()

with held_together(hold, folder) as work:
    assert (work / "held").exists()
    if rank == 1:
        time.sleep(1)
        assert (work / "held").exists()
        (work / "worked").touch()
by_main_process(lambda: (folder / f"by {rank}").touch())
assert from_main_process(lambda: f"of {rank}") == "of 0"
for error, kind in ((BadRowsError("bad", [(0, "x")], 1, "mend it"), DataError), (DivergenceError("lower"), ModelError)):
    def fail():
        raise error
    try:
        from_main_process(fail)
    except kind as raised:
        assert str(raised) == str(error)
    else:
        raise AssertionError(f"{rank} did not raise")
assert not (folder / "held").exists() and (folder / "by 0").exists() and not (folder / "by 1").exists()
torch.distributed.destroy_process_group()  # else gloo's threads may abort the process while it ends
"""
    )
    run_in_two_processes(script, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["by 0", "script.py", "worked"]
