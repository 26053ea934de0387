"""Output folders: whose they are, and that one process at a time works on them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from filelock import FileLock

from attnbalance.errors import OutputError
from attnbalance.files.outputs import MARKER, TEMPORARY, as_folder, read_json, remove, write_json, write_text
from attnbalance.files.work import close_work, in_place, is_finished, locked, work_of, working

CONFIG = {"steps": 5, "recipe": {"layers": (1, 2)}}


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def broken_off(out: Path, **changes: object) -> Path:
    """Work that did something and then broke off."""
    with pytest.raises(KeyboardInterrupt), working(out, "kind", CONFIG | changes) as work:
        write_text(work / "done.txt", "half")
        raise KeyboardInterrupt
    return work_of(out)


def test_nothing_and_an_empty_folder_are_not_finished(tmp_path: Path) -> None:
    assert not is_finished(tmp_path / "new", "kind", CONFIG)
    assert not is_finished(tmp_path, "kind", CONFIG)


def test_the_same_settings_are_finished(tmp_path: Path) -> None:
    write_json(tmp_path / MARKER, {"kind": "kind", "config": CONFIG})
    assert is_finished(tmp_path, "kind", CONFIG)


def test_two_long_texts_are_shown_where_they_differ(tmp_path: Path) -> None:
    there, here = ("/a/folder" * 20 + f"/{name}/" + "model" * 20 for name in ("one", "two"))
    write_json(tmp_path / MARKER, {"kind": "kind", "config": {"model": there}})
    with pytest.raises(OutputError, match=r"model is \.\.\..*/one/.*\.\.\. there, \.\.\..*/two/.*\.\.\. here"):
        is_finished(tmp_path, "kind", {"model": here})


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        ("kind", CONFIG | {"steps": 6}, "steps is 5 there, 6 here"),
        ("kind", CONFIG | {"more": 1}, "more is absent there, 1 here"),
        ("kind", CONFIG | {"recipe": {"layers": (1, 3)}}, r"recipe\.layers\[1\] is 2 there, 3 here"),
        ("kind", CONFIG | {"recipe": {"layers": (1,)}}, r"recipe\.layers\[1\] is 2 there, absent here"),
        ("kind", CONFIG | {"facts": "/long/" * 20 + "a"}, r"facts is absent there, '/long/.*\.\.\. here"),
        ("kind", CONFIG | {"recipe": {"layers": (1, 2), "rank": 4}}, r"recipe\.rank is absent there, 4 here"),
        ("other", CONFIG, "the result of `kind`"),
    ],
)
def test_other_results_are_not_overwritten(tmp_path: Path, kind: str, config: dict[str, object], message: str) -> None:
    write_json(tmp_path / MARKER, {"kind": "kind", "config": CONFIG})
    with pytest.raises(OutputError, match=message):
        is_finished(tmp_path, kind, config)


@pytest.mark.parametrize("changed", [{}, {"config": None}, {"config": [1]}])
def test_a_folder_whose_record_was_changed_is_refused_with_what_to_do(tmp_path: Path, changed: dict) -> None:
    write_json(tmp_path / MARKER, {"kind": "kind"} | changed)
    with pytest.raises(OutputError, match=f"{MARKER} was changed: 'config' must be dict, got .*remove {tmp_path} and"):
        is_finished(tmp_path, "kind", CONFIG)


def test_unfinished_work_whose_record_was_changed_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), working(tmp_path / "out", "kind", CONFIG) as work:
        (work / "measured").write_text("1")
        raise KeyboardInterrupt
    write_json(work / MARKER, read_json(work / MARKER) | {"config": None})
    with pytest.raises(OutputError, match=f"'config' must be dict, got None; .*remove {work} and"):  # noqa: SIM117
        with working(tmp_path / "out", "kind", CONFIG):
            pass


@pytest.mark.parametrize(
    "name", ["thesis.tex", ".notes.old", ".draft.tmp", ".data.old/all", ".attnbalance-abcdefgh/precious"]
)
def test_other_files_are_not_overwritten_whatever_their_names(tmp_path: Path, name: str) -> None:
    write_text(tmp_path / name, "")
    with pytest.raises(OutputError, match=rf"other things \({Path(name).parts[0]}\)"):
        is_finished(tmp_path, "kind", CONFIG)


def test_a_file_is_no_output_folder(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(OutputError, match="is a file"):
        is_finished(tmp_path / "thesis.tex", "kind", CONFIG)


def test_what_a_kill_left_of_the_first_file_is_not_in_the_way(tmp_path: Path) -> None:
    write_text(tmp_path / ".attnbalance-abcdefgh" / "new", "{")
    assert not is_finished(tmp_path, "kind", CONFIG)


@pytest.mark.parametrize("seen", ["the folder", "its file"])
def test_what_another_process_has_just_removed_is_not_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: str
) -> None:
    folder = tmp_path / "out" / f"{TEMPORARY}abcdefgh"
    folder.mkdir(parents=True)
    (folder / "new").touch()
    whole = Path.iterdir

    def iterdir(path: Path) -> Iterator[Path]:
        inside = list(whole(path))  # is listed, and gone when it is looked at
        if path == (tmp_path / "out" if seen == "the folder" else folder):
            shutil.rmtree(folder)
        return iter(inside)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert not is_finished(tmp_path / "out", "curve", {})
    assert not folder.exists()


def test_work_is_there_again_after_an_interrupt_and_gone_when_done(tmp_path: Path) -> None:
    assert (broken_off(tmp_path / "out") / "done.txt").read_text() == "half"
    with working(tmp_path / "out", "kind", CONFIG) as work:
        assert (work / "done.txt").read_text() == "half"
    assert left(tmp_path) == []


def test_work_in_which_nothing_was_done_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), working(tmp_path / "out", "kind", CONFIG):
        raise KeyboardInterrupt
    assert left(tmp_path) == []


def test_work_begun_with_other_settings_is_refused_and_kept(tmp_path: Path) -> None:
    work = broken_off(tmp_path / "out")
    with (
        pytest.raises(OutputError, match="unfinished work with other settings: steps is 5 there, 6 here"),
        working(tmp_path / "out", "kind", {**CONFIG, "steps": 6}),
    ):
        pass
    assert (work / "done.txt").read_text() == "half"
    assert read_json(work / MARKER)["config"]["steps"] == 5


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write"), working(tmp_path / "file" / "out", "kind", CONFIG):
        pass


def test_the_current_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with (
        pytest.raises(OutputError, match="is the current folder; name a folder in it"),
        working(as_folder("."), "kind", CONFIG),
    ):
        pass


@pytest.mark.parametrize("kind", ["folder", "link", "file", "result"])
def test_what_is_not_ours_in_the_place_of_the_work_is_refused_by_name_and_kept(tmp_path: Path, kind: str) -> None:
    work, precious = work_of(tmp_path / "out"), tmp_path / "disk" / "precious"
    write_text(precious, "ten years of work")
    if kind == "link":
        work.symlink_to(precious.parent)
    elif kind == "file":
        precious = work
        work.write_text("ten years of work")
    else:
        precious = work / "precious"
        write_text(precious, "ten years of work")
        if kind == "result":
            write_json(work / MARKER, {"kind": "curve", "config": {}})
    with pytest.raises(OutputError, match=r"\.out\.partial is in the way"), working(tmp_path / "out", "kind", CONFIG):
        pass
    close_work(tmp_path / "out")
    assert precious.read_text() == "ten years of work"
    assert os.path.lexists(work)


def test_work_whose_marker_is_damaged_is_set_aside(tmp_path: Path) -> None:
    (broken_off(tmp_path / "out") / MARKER).write_text('{"kind": "unf')
    with (
        pytest.warns(UserWarning, match=r"set aside as damaged-\.out\.partial"),
        working(tmp_path / "out", "kind", CONFIG) as work,
    ):
        assert not (work / "done.txt").exists()
    assert (tmp_path / "damaged-.out.partial" / "done.txt").read_text() == "half"


def test_work_left_by_a_process_killed_at_the_very_end_is_cleared(tmp_path: Path) -> None:
    broken_off(tmp_path / "out")
    close_work(tmp_path / "out")
    assert left(tmp_path) == []


def test_work_whose_removal_a_kill_broke_off_is_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before each of the removals, one after the other."""
    unlink, removals, left_over = Path.unlink, 0, 0

    def killed(path: Path, **how: bool) -> None:
        nonlocal left_over
        if not left_over:
            raise KeyboardInterrupt
        left_over -= 1
        unlink(path, **how)

    while True:
        left_over = removals
        broken_off(tmp_path / "out")
        (tmp_path / ".out.partial" / "more.txt").write_text("more")
        with monkeypatch.context() as patched:
            patched.setattr(Path, "unlink", killed)
            try:
                remove(tmp_path / ".out.partial")
            except KeyboardInterrupt:
                removals += 1
            else:
                break
        close_work(tmp_path / "out")
        assert left(tmp_path) == []
    assert removals >= 2


def test_work_removed_under_a_process_can_be_gone_on_with(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), working(tmp_path / "out", "kind", CONFIG) as work:
        for path in work.iterdir():
            path.unlink()
        work.rmdir()
        write_text(work / "done.txt", "half")
        raise KeyboardInterrupt
    with working(tmp_path / "out", "kind", CONFIG) as work:
        assert (work / "done.txt").read_text() == "half"


def test_a_folder_removed_while_it_was_written_is_no_success_and_can_be_gone_on_with(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with (
        pytest.raises(OutputError, match="out was removed or changed while it was written"),
        in_place(out, "kind", CONFIG),
    ):
        (out / MARKER).unlink()
        out.rmdir()
        write_text(out / "late.txt", "")
    assert is_finished(out, "kind", CONFIG)


HOLD = """
import signal, sys
from pathlib import Path
from attnbalance.files.work import working
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background jobs
with working(Path(sys.argv[1]), "kind", {"steps": 5}) as work:
    (work / "done.txt").write_text("half")
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def held(out: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that works on a folder until it is told to end, or is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_second_process_is_refused_and_told_which_one_is_at_work(tmp_path: Path) -> None:
    for steps in (5, 6):
        with held(tmp_path / "out") as process:
            with (
                pytest.raises(OutputError, match=rf"process {process.pid} on .* is at work on .*\.out\.partial"),
                working(tmp_path / "out", "kind", {"steps": steps}),
            ):
                pass
            assert (work_of(tmp_path / "out") / "done.txt").read_text() == "half"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_work_of_a_process_that_was_ended_can_be_gone_on_with_at_once(tmp_path: Path, number: int) -> None:
    with held(tmp_path / "out") as process:
        process.send_signal(number)
        process.wait()
    with working(tmp_path / "out", "kind", {"steps": 5}) as work:
        assert (work / "done.txt").read_text() == "half"
    assert left(tmp_path) == []


@pytest.mark.parametrize("method", ["acquire", "_acquire"])
def test_a_folder_that_another_process_removes_while_it_is_locked_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """By another process, before the lock is taken or just after."""
    taken = getattr(FileLock, method)

    def removed(self: FileLock, *args: object, **kwargs: object) -> object:
        if method == "acquire":
            shutil.rmtree(tmp_path / "work")
            raise FileNotFoundError
        result = taken(self, *args, **kwargs)
        shutil.rmtree(tmp_path / "work")
        return result

    monkeypatch.setattr(FileLock, method, removed)
    message = "another process has just ended its work on .*; run the same command again"
    with pytest.raises(OutputError, match=message), locked(tmp_path / "work"):
        pass


def test_another_call_in_the_same_process_is_refused_too(tmp_path: Path) -> None:
    with locked(tmp_path):
        with pytest.raises(OutputError, match=f"process {os.getpid()} on "), locked(tmp_path):
            pass
        with pytest.raises(OutputError, match=f"process {os.getpid()} on "), locked(tmp_path):
            pass
    with locked(tmp_path):
        pass
    assert left(tmp_path) == []


def test_the_lock_of_a_process_that_made_the_folder_anew_is_left_to_it(tmp_path: Path) -> None:
    with locked(tmp_path / "work"):
        shutil.rmtree(tmp_path / "work")
        second = locked(tmp_path / "work")
        second.__enter__()
    assert left(tmp_path / "work") == [".attnbalance.lock", ".attnbalance.lock.json"]
    second.__exit__(None, None, None)
    assert left(tmp_path / "work") == []


def test_a_lock_file_of_which_the_holder_is_unknown_is_refused_all_the_same(tmp_path: Path) -> None:
    with locked(tmp_path):
        (tmp_path / ".attnbalance.lock.json").write_text(json.dumps(["x"]))
        with pytest.raises(OutputError, match="another process is at work"), locked(tmp_path):
            pass


def test_what_another_process_finished_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    write_json(tmp_path / "out" / MARKER, {"kind": "kind", "config": CONFIG, "answer": "42"})
    with pytest.raises(OutputError, match="has just finished"), working(tmp_path / "out", "kind", CONFIG):
        pass
    assert read_json(tmp_path / "out" / MARKER)["answer"] == "42"
    assert left(tmp_path) == ["out"]
