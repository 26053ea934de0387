"""Outputs, written whole or not at all."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable
from pathlib import Path
from types import NoneType

import pytest
import torch
from safetensors.torch import save_file

from attnbalance.arguments import Kind
from attnbalance.errors import OutputError
from attnbalance.files.outputs import (
    as_folder,
    check_saved,
    provenance,
    read_json,
    read_saved,
    remove,
    replacing,
    write_json,
    write_json_lines,
    write_saved,
    write_text,
    writing,
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


def test_files_of_the_user_beside_an_output_stay_whatever_their_names(tmp_path: Path) -> None:
    names = [".run.tmp", ".run.old", ".run.partial", ".attnbalance-abcdefgh"]
    for name in names:
        write_text(tmp_path / name / "precious", "ten years of work")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/old").touch()
    with replacing(tmp_path / "run") as temporary:
        temporary.mkdir()
    assert left(tmp_path) == sorted([*names, "run"])
    assert all((tmp_path / name / "precious").read_text() == "ten years of work" for name in names)


def test_a_link_is_removed_and_never_what_it_points_to(tmp_path: Path) -> None:
    write_text(tmp_path / "disk/precious", "ten years of work")
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    remove(tmp_path / "link")
    remove(tmp_path / "link")
    assert left(tmp_path) == ["disk"]
    assert left(tmp_path / "disk") == ["precious"]


def test_what_cannot_be_read_is_set_aside_with_one_message(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    assert read_saved(tmp_path / "a.json") == {}
    write_json(tmp_path / "a.json", {"b": 1})
    assert read_saved(tmp_path / "a.json") == {"b": 1}
    assert not recwarn.list
    for content in ("{", ""):
        (tmp_path / "a.json").write_text(content)
        assert read_saved(tmp_path / "a.json") == {}
    assert left(tmp_path) == ["damaged-a.json", "damaged-a.json-2"]
    first, second = (str(warning.message) for warning in recwarn)
    assert first == f"{tmp_path / 'a.json'} cannot be read; set aside as damaged-a.json in {tmp_path}, and made again"
    assert "damaged-a.json-2" in second


def test_what_was_saved_is_read_again_and_refused_once_a_number_in_it_was_changed(tmp_path: Path) -> None:
    path, value = tmp_path / "a.json", {"b": [1.5, (2,)], "c": {"d": None, "é": "ü"}}
    write_saved(path, value)
    assert read_saved(path) == {"b": [1.5, [2]], "c": {"d": None, "é": "ü"}}
    path.write_text(path.read_text().replace("1.5", "2.5"))
    with pytest.raises(OutputError, match=rf"{path} was changed: its content must have SHA-256 \w+, got \w+; restore"):
        read_saved(path)


def refused_by_safetensors(path: Path) -> None:
    save_file({"a": torch.zeros(1)}, path / "none" / "a.safetensors")


def refused_by_the_system(path: Path) -> None:
    (path / "none" / "a.txt").write_text("")


def refused_for_want_of_space(path: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("write", [refused_by_safetensors, refused_by_the_system, refused_for_want_of_space])
def test_what_cannot_be_written_is_one_kind_of_error(tmp_path: Path, write: Callable[[Path], None]) -> None:
    with (
        pytest.raises(OutputError, match="cannot write .*out: .*(No such file|No space left)"),
        writing(tmp_path / "out"),
    ):
        write(tmp_path)


def test_json_is_read_back_and_numbers_that_are_no_json_are_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "deep/a.json", {"é": [1, None]})
    assert read_json(tmp_path / "deep/a.json") == {"é": [1, None]}
    assert "é" in (tmp_path / "deep/a.json").read_text(encoding="utf-8")
    for value in (math.nan, [math.inf]):
        with pytest.raises(OutputError, match="b.json: expected finite numbers, got NaN or infinity"):
            write_json(tmp_path / "b.json", value)
    assert left(tmp_path) == ["deep"]
    for content in ("{", "[1]", ""):
        (tmp_path / "c.json").write_text(content)
        assert read_json(tmp_path / "c.json") == {}
    assert read_json(tmp_path / "absent.json") == {}


def test_lines_of_json_are_written_whole_one_value_each(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "deep/a.jsonl", ({"é": text} for text in ("a\nb", "c")))
    assert (tmp_path / "deep/a.jsonl").read_text(encoding="utf-8") == '{"é": "a\\nb"}\n{"é": "c"}\n'
    with pytest.raises(OutputError, match="a.jsonl: expected finite numbers, got NaN or infinity"):
        write_json_lines(tmp_path / "deep/a.jsonl", [1, math.nan])
    assert "c" in (tmp_path / "deep/a.jsonl").read_text(encoding="utf-8")
    write_json_lines(tmp_path / "none.jsonl", [])
    assert (tmp_path / "none.jsonl").read_text() == ""


def test_provenance_names_the_versions_that_computed() -> None:
    versions = provenance()["versions"]
    assert isinstance(versions, dict)
    assert versions["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert set(versions) >= {"attnbalance", "transformers", "peft"}


def test_a_loop_of_links_is_no_output_folder(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OutputError, match="loop"):
        as_folder(tmp_path / "loop")


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"n": 1}, "'rows' must be a collection of str, got none; restore the file, or remove run and run the command"),
        ({"n": 1, "rows": None}, "'rows' must be a collection of str, got None"),
        ({"n": 1, "rows": ["a", 1]}, r"'rows' must be a collection of str, got \['a', 1\]"),
        ({"n": "1", "rows": []}, "'n' must be int or None, got '1'"),
    ],
)
def test_a_changed_file_is_refused_with_what_it_lacks(saved: dict[str, object], message: str) -> None:
    kinds: dict[str, Kind] = {"n": (int, NoneType), "rows": [str]}
    check_saved(Path("run/a.json"), {"n": None, "rows": ["a"], "more": 1}, Path("run"), **kinds)
    with pytest.raises(OutputError, match=f"run/a.json was changed: {message}"):
        check_saved(Path("run/a.json"), saved, Path("run"), **kinds)


def test_a_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    with replacing(as_folder(tmp_path / "link")) as temporary:
        temporary.mkdir()
        write_text(temporary / "a.txt", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "disk" / "a.txt").read_text() == "new"


def test_a_file_behind_a_link_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    write_text(tmp_path / "disk/a.txt", "old")
    (tmp_path / "link.txt").symlink_to("disk/a.txt")
    write_text(tmp_path / "link.txt", "new")
    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "disk/a.txt").read_text() == "new"
    (tmp_path / "dangling").symlink_to("disk/b.txt")
    write_text(tmp_path / "dangling", "b")
    assert (tmp_path / "disk/b.txt").read_text() == "b"
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OutputError, match="cannot follow"):
        write_text(tmp_path / "loop", "c")


@pytest.mark.parametrize("out", ["", " "])
def test_an_empty_name_is_no_output_folder(out: str) -> None:
    with pytest.raises(OutputError, match=f"`out` must name a folder, got '{out}'"):
        as_folder(out)


def test_an_output_folder_of_endless_depth_is_refused() -> None:
    with pytest.raises(OutputError, match="at most 200 folders deep"):
        as_folder("/".join(["a"] * 1800))
