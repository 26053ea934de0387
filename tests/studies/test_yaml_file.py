"""YAML from anywhere: plain values come out as they were written, everything else is refused with its reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnbalance.errors import DataError
from attnbalance.studies.yaml_file import LARGEST_FILE, read_yaml


def written(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "study.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_plain_values_come_out_as_they_were_written(tmp_path: Path) -> None:
    path = written(tmp_path, "a: {b: [1, 2.5, yes, null, 'x: y', 0, -0.5, '010', 0x10]}\n")
    assert read_yaml(path) == {"a": {"b": [1, 2.5, True, None, "x: y", 0, -0.5, "010", 16]}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: &x [1]\nb: *x", r"aliases \(\*NAME\) are not read"),
        ("a: 1\nb: 2\na: 3", r"'a' occurs twice in one mapping \(line 1\)"),
        ("steps: 1:30", "1:30 would be read as a number to base 60"),
        ("limit: 010", "010 begins with a zero, which makes it a number to base 8; write it without"),
        ("steps: [-0_1]", "-0_1 begins with a zero"),
        ("share: 00.5", "00.5 begins with a zero"),
        ("a: !!python/object/apply:os.getcwd []", "cannot parse .* as YAML"),
        ("[" * 100_000, "nested too deeply|cannot parse"),
        (b"a: \xff", "not UTF-8 text"),
        (b"a" * (LARGEST_FILE + 1), "more than 1,000,000 bytes"),
    ],
    ids=[
        "alias",
        "key twice",
        "base 60",
        "base 8",
        "base 8 with a sign",
        "leading zero of a decimal number",
        "code",
        "depth",
        "bytes",
        "size",
    ],
)
def test_anything_else_is_refused_with_its_reason(tmp_path: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_yaml(written(tmp_path, content))


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        read_yaml(tmp_path / "nothing.yaml")
    with pytest.raises(DataError, match="not a regular file"):
        read_yaml(tmp_path)
