"""A folder of results is made once, whole, and gone on with after an interrupt."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from attnbalance.errors import OutputError
from attnbalance.files.outputs import HASH, MARKER, read_json, write_json, write_text
from attnbalance.files.result_folder import ResultFolder
from attnbalance.files.work import locked, work_of

CONFIG = {"seed": 0, "layers": (1, 2)}


def results_in(folder: Path, **changes: object) -> ResultFolder:
    return ResultFolder(folder / "out", "kind", CONFIG | changes, "attnbalance kind --out out")


def make(results: ResultFolder, steps: list[str], stop_at: str = "") -> str:
    """Make a folder in two steps and a file, noting the steps that were done; `stop_at` interrupts one of them."""

    def do(step: str) -> None:
        if step == stop_at:
            raise KeyboardInterrupt
        steps.append(step)

    if not results.is_finished():
        with results.working() as work:
            if not (work / "measured").exists():
                do("measure")
                write_text(work / "measured", "1")
            do("conclude")
            with results.writing(work, answer="42", dropped={"too long": 3}) as folder:
                write_text(folder / "report.html", "half of it")
                do("report")
                write_text(folder / "report.html", "all of it")
    return results.close()


def test_a_folder_is_made_once_and_its_answer_is_read_again(tmp_path: Path) -> None:
    steps: list[str] = []
    assert make(results_in(tmp_path), steps) == make(results_in(tmp_path), steps) == "42"
    assert steps == ["measure", "conclude", "report"]
    assert os.listdir(tmp_path) == ["out"]
    assert sorted(os.listdir(tmp_path / "out")) == [MARKER, "report.html"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("notes.txt", "mine", r"holds other things \(notes.txt\)"),
        (MARKER, '{"kind": "study", "config": {}}', "holds the result of `study`"),
    ],
)
def test_what_was_put_into_the_folder_meanwhile_is_kept_and_named(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    steps, results = list[str](), results_in(tmp_path)
    with pytest.raises(OutputError, match=message), results.working() as work:
        write_text(work / "measured", "1")
        with results.writing(work, answer="42", dropped={}) as folder:
            write_text(folder / "report.html", "all of it")
            write_text(tmp_path / "out" / name, text)
    assert (tmp_path / "out" / name).read_text() == text
    (tmp_path / "out" / name).unlink()
    assert make(results, steps) == "42"
    assert steps == ["conclude", "report"]  # what was measured was kept


def test_the_marker_says_what_the_folder_holds_and_how_it_was_made(tmp_path: Path) -> None:
    make(results_in(tmp_path), [])
    marker = read_json(tmp_path / "out" / MARKER)
    assert list(marker)[:5] == ["kind", "config", "answer", "command", "dropped"]
    assert (marker["kind"], marker["config"]) == ("kind", {"seed": 0, "layers": [1, 2]})
    assert (marker["command"], marker["dropped"]) == ("attnbalance kind --out out", {"too long": 3})
    assert marker["files_sha256"] == {"report.html": hashlib.sha256(b"all of it").hexdigest()}
    assert marker["versions"]["attnbalance"]


@pytest.mark.parametrize("stop_at", ["conclude", "report"])
def test_an_interrupted_run_leaves_no_half_folder_and_goes_on_with_what_was_measured(
    tmp_path: Path, stop_at: str
) -> None:
    steps: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        make(results_in(tmp_path), steps, stop_at)
    assert not (tmp_path / "out").exists()
    assert sorted(os.listdir(work_of(tmp_path / "out"))) == [MARKER, "measured"]
    assert make(results_in(tmp_path), steps) == "42"
    assert steps.count("measure") == 1
    assert (tmp_path / "out/report.html").read_text() == "all of it"
    assert os.listdir(tmp_path) == ["out"]


def test_other_settings_are_refused_and_another_command_is_not(tmp_path: Path) -> None:
    make(results_in(tmp_path), [])
    with pytest.raises(OutputError, match="seed is 0 there, 1 here"):
        results_in(tmp_path, seed=1).is_finished()
    assert ResultFolder(tmp_path / "out", "kind", CONFIG, "another").is_finished()


def test_a_folder_that_lost_its_answer_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    results, marker = results_in(tmp_path), tmp_path / "out" / MARKER
    make(results, [])
    write_json(marker, {name: value for name, value in read_json(marker).items() if name not in ("answer", HASH)})
    before = marker.read_bytes()
    with pytest.raises(OutputError, match=f"{marker} must hold the answer.* remove {tmp_path}/out, or name"):
        make(results, [])
    assert marker.read_bytes() == before
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("link", [False, True])
def test_a_folder_that_lost_a_file_is_refused_and_left_as_it_is(tmp_path: Path, link: bool) -> None:
    results, report = results_in(tmp_path), tmp_path / "out" / "report.html"
    make(results, [])
    report.unlink()
    if link:
        report.symlink_to(tmp_path / "nowhere")
    with pytest.raises(OutputError, match=rf"{tmp_path}/out must hold .* but report.html is gone; restore"):
        make(results, [])
    assert os.listdir(tmp_path) == ["out"]


def test_a_folder_in_which_a_file_was_changed_is_refused_by_its_name_and_left_as_it_is(tmp_path: Path) -> None:
    results, report = results_in(tmp_path), tmp_path / "out" / "report.html"
    make(results, [])
    (tmp_path / "out" / "notes.txt").write_text("the user's own")
    assert make(results, []) == "42"
    report.write_text("all of IT")
    with pytest.raises(OutputError, match=rf"{tmp_path}/out must hold .* but report.html was changed; restore them"):
        make(results, [])
    assert report.read_text() == "all of IT"
    report.write_text("all of it")
    assert make(results, []) == "42"


def test_a_folder_whose_answer_was_changed_is_refused(tmp_path: Path) -> None:
    results, marker = results_in(tmp_path), tmp_path / "out" / MARKER
    make(results, [])
    marker.write_text(marker.read_text().replace('"42"', '"43"'))
    with pytest.raises(OutputError, match=f"{marker} was changed"):
        make(results, [])


def test_a_folder_whose_marker_lists_no_files_is_finished(tmp_path: Path) -> None:
    results, marker = results_in(tmp_path), tmp_path / "out" / MARKER
    make(results, [])
    write_json(marker, {name: value for name, value in read_json(marker).items() if name not in ("files_sha256", HASH)})
    assert results.is_finished()


def test_a_list_of_files_that_was_changed_is_refused(tmp_path: Path) -> None:
    results, marker = results_in(tmp_path), tmp_path / "out" / MARKER
    make(results, [])
    write_json(marker, read_json(marker) | {"files_sha256": None, HASH: None})
    with pytest.raises(OutputError, match="'files_sha256' must be"):
        results.is_finished()


def test_work_left_at_the_very_end_by_a_kill_is_removed(tmp_path: Path) -> None:
    results = results_in(tmp_path)
    make(results, [])
    with pytest.raises(KeyboardInterrupt), ResultFolder(tmp_path / "other", "kind", CONFIG).working() as work:
        write_text(work / "measured", "1")
        raise KeyboardInterrupt
    work_of(tmp_path / "other").rename(work_of(tmp_path / "out"))
    assert results.close() == "42"
    assert os.listdir(tmp_path) == ["out"]


def test_work_in_place_is_finished_only_once_it_is_marked(tmp_path: Path) -> None:
    results = results_in(tmp_path)
    with pytest.raises(KeyboardInterrupt), results.working_in_place():
        write_text(results.path / "base", "1")
        with pytest.raises(OutputError, match="is at work"), locked(results.path):
            pass
        raise KeyboardInterrupt
    assert not results.is_finished()
    with results.working_in_place():
        assert (results.path / "base").read_text() == "1"
        results.mark(results.path, answer="42", dropped={})
    assert list(read_json(results.path / MARKER)["files_sha256"]) == ["base"]
    assert results.is_finished()
    assert results.answer() == "42"


def test_a_folder_that_processes_make_together_is_made_like_any_other(tmp_path: Path) -> None:
    results = results_in(tmp_path)
    with pytest.raises(KeyboardInterrupt), results.working(shared=True) as work:
        write_text(work / "measured", "1")
        raise KeyboardInterrupt
    with results.working(shared=True) as work:
        assert (work / "measured").read_text() == "1"  # an interrupt leaves what was done
        assert work == work_of(results.path)
        with results.writing(work, answer="42", dropped={}) as folder:
            write_text(folder / "report.html", "")
    assert results.close() == "42"
    assert os.listdir(tmp_path) == ["out"]
