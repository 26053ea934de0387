"""Seals: damage to saved work is seen before it is used."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from time import sleep

import pytest

from attnbalance.files import seals
from attnbalance.files.outputs import MARKER
from attnbalance.files.seals import SEAL, damage, hash_file, seal


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "work/deep").mkdir(parents=True)
    (tmp_path / "work/a.bin").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "work/deep/optimizer.pt").write_bytes(b"state")
    seal(tmp_path / "work")
    return tmp_path / "work"


def test_what_is_as_it_was_sealed_is_whole_also_as_a_copy(folder: Path) -> None:
    assert damage(folder) is None
    assert damage(Path(shutil.copytree(folder, folder.with_name("copy"), copy_function=shutil.copyfile))) is None


@pytest.mark.parametrize("how", ["truncated", "zeroed", "garbage", "emptied"])
@pytest.mark.parametrize("name", ["a.bin", "deep/optimizer.pt", SEAL])
def test_every_damage_to_every_file_shows(folder: Path, name: str, how: str) -> None:
    path = folder / name
    old = path.read_bytes()
    half = len(old) // 2
    new = {"truncated": old[:half], "zeroed": bytes(len(old)), "garbage": old[:half] + b"?" + old[half + 1 :]}
    path.write_bytes(new.get(how, b""))
    message = damage(folder)
    assert message is not None
    assert str(folder) in message


def test_a_missing_file_shows_unless_it_may_be_gone(folder: Path) -> None:
    (folder / "deep/optimizer.pt").unlink()
    assert damage(folder) == f"{folder / 'deep/optimizer.pt'} is missing"
    assert damage(folder, ("deep",)) is None
    (folder / "a.bin").unlink()
    assert damage(folder, ("deep",)) == f"{folder / 'a.bin'} is missing"


def test_a_folder_that_was_sealed_in_other_work_shows(tmp_path: Path) -> None:
    for name in ("work", "other"):
        (tmp_path / name / "part").mkdir(parents=True)
        (tmp_path / name / "part" / "a.bin").write_bytes(b"same")
        (tmp_path / name / MARKER).write_text(f'{{"config": "{name}"}}')
        seal(tmp_path / name / "part")
        assert damage(tmp_path / name / "part") is None
    moved = tmp_path / "work" / "moved"
    shutil.copytree(tmp_path / "other" / "part", moved)
    assert damage(moved) == f"{moved} is part of other work"
    (tmp_path / "other" / MARKER).unlink()
    assert damage(tmp_path / "other" / "part") == f"{tmp_path / 'other' / 'part'} is part of other work"


@pytest.mark.parametrize("large", [2**10, 2**30])
def test_every_byte_of_a_file_counts_also_where_hashes_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: int
) -> None:
    monkeypatch.setattr(seals, "LARGE", large)
    path = tmp_path / "a"
    path.write_bytes(b"x" * 2**20)
    assert hash_file(path) == hash_file(path) == hashlib.sha256(b"x" * 2**20).hexdigest()
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    sleep(0.02)  # the clock of a file's times may tick every 10 ms
    with path.open("r+b") as stream:
        stream.seek(300_001)
        stream.write(b"y")
    os.utime(path, ns=times)  # as if it had not been changed
    assert hash_file(path) == hashlib.sha256(b"x" * 300_001 + b"y" + b"x" * (2**20 - 300_002)).hexdigest()


def test_a_large_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seals, "LARGE", 2**10)
    (tmp_path / "a").write_bytes(b"x" * 2**11)
    first = hash_file(tmp_path / "a")
    monkeypatch.setattr(Path, "open", None)
    assert hash_file(tmp_path / "a") == first
