"""Seals: damage to saved work is seen before it is used."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from attnbalance.files import seals
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


def test_a_file_is_hashed_whole_up_to_a_size_and_then_by_its_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * 2**20)
    whole = hash_file(path)
    assert whole == hashlib.sha256(b"x" * 2**20).hexdigest()
    monkeypatch.setattr(seals, "WHOLE", 2**19)
    pages = hash_file(path)
    assert pages != whole
    path.write_bytes(b"y" + b"x" * (2**20 - 1))
    assert hash_file(path) != pages
