"""Outputs, written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attnbalance.errors import OutputError
from attnbalance.outputs import (
    MARKER,
    as_folder,
    is_finished,
    open_work,
    provenance,
    read_json,
    replacing,
    write_json,
    write_text,
)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_error_halfway_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt", "old")
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "a.txt") as temporary:
        temporary.write_text("half")
        raise ZeroDivisionError
    assert (tmp_path / "a.txt").read_text() == "old"
    assert left(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_folder_is_replaced_whole_or_not_at_all(fails: bool, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/old").touch()
    try:
        with replacing(tmp_path / "run") as temporary:
            temporary.mkdir()
            (temporary / "new").touch()
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert fails
    assert left(tmp_path) == ["run"]
    assert left(tmp_path / "run") == (["old"] if fails else ["new"])


def test_what_a_killed_run_left_is_cleared_by_the_next(tmp_path: Path) -> None:
    (tmp_path / ".run.tmp").mkdir()
    (tmp_path / ".run.tmp/half").touch()
    with replacing(tmp_path / "run") as temporary:
        temporary.mkdir()
    assert left(tmp_path) == ["run"]
    assert left(tmp_path / "run") == []


def test_json_is_read_back_and_numbers_that_are_no_json_are_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "deep/a.json", {"é": [1, None]})
    assert read_json(tmp_path / "deep/a.json") == {"é": [1, None]}
    assert "é" in (tmp_path / "deep/a.json").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "b.json", float("nan"))
    assert left(tmp_path) == ["deep"]
    for content in ("{", "[1]", ""):
        (tmp_path / "c.json").write_text(content)
        assert read_json(tmp_path / "c.json") == {}
    assert read_json(tmp_path / "absent.json") == {}


def test_provenance_names_the_versions_that_computed() -> None:
    versions = provenance()["versions"]
    assert isinstance(versions, dict)
    assert versions["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert set(versions) >= {"attnbalance", "transformers", "peft"}


CONFIG = {"steps": 5, "recipe": {"layers": (1, 2)}}


def test_nothing_and_an_empty_folder_are_not_finished(tmp_path):
    assert not is_finished(tmp_path / "new", "kind", CONFIG)
    assert not is_finished(tmp_path, "kind", CONFIG)


def test_the_same_settings_are_finished(tmp_path):
    write_json(tmp_path / MARKER, {"kind": "kind", "config": CONFIG})
    assert is_finished(tmp_path, "kind", CONFIG)


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        ("kind", CONFIG | {"steps": 6}, "steps is 5 there, 6 here"),
        ("kind", CONFIG | {"more": 1}, "more is None there, 1 here"),
        ("other", CONFIG, "the result of `kind`"),
    ],
)
def test_other_results_are_not_overwritten(tmp_path, kind, config, message):
    write_json(tmp_path / MARKER, {"kind": "kind", "config": CONFIG})
    with pytest.raises(OutputError, match=message):
        is_finished(tmp_path, kind, config)


def test_other_files_are_not_overwritten(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(OutputError, match=r"other things \(thesis.tex\)"):
        is_finished(tmp_path, "kind", CONFIG)
    with pytest.raises(OutputError, match="is a file"):
        is_finished(tmp_path / "thesis.tex", "kind", CONFIG)


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write"):
        open_work(tmp_path / "file" / "out", "kind", CONFIG)


def test_what_a_kill_left_of_a_file_is_not_in_the_way(tmp_path: Path) -> None:
    (tmp_path / f".{MARKER}.tmp").write_text("{")
    assert not is_finished(tmp_path, "kind", CONFIG)
    write_text(tmp_path / MARKER, "whole")
    assert left(tmp_path) == [MARKER]


def test_the_current_folder_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OutputError, match="is the current folder; name a folder in it"):
        open_work(as_folder("."), "kind", CONFIG)


def test_a_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    with replacing(as_folder(tmp_path / "link")) as temporary:
        temporary.mkdir()
        write_text(temporary / "a.txt", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "disk" / "a.txt").read_text() == "new"


def test_opening_work_again_writes_nothing(tmp_path: Path) -> None:
    work = open_work(tmp_path / "out", "kind", CONFIG)
    before = (work / MARKER).stat().st_mtime_ns
    assert open_work(tmp_path / "out", "kind", CONFIG) == work
    assert (work / MARKER).stat().st_mtime_ns == before
