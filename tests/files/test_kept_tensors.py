"""What is kept under a key comes back whole, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attnbalance.files.kept_tensors import ABOUT, TENSORS, keep, kept


def test_what_was_kept_comes_back_under_its_key_alone(tmp_path: Path) -> None:
    assert kept(tmp_path / "model", "key") is None
    keep(tmp_path / "model", "key", {"names": ["a", "b"]}, {"numbers": torch.arange(6.0).view(2, 3).T})
    saved = kept(tmp_path / "model", "key")
    assert saved is not None
    assert saved[0]["names"] == ["a", "b"]
    assert torch.equal(saved[1]["numbers"], torch.arange(6.0).view(2, 3).T)
    assert kept(tmp_path / "model", "another") is None


def test_a_folder_with_a_file_of_someone_else_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").write_text("mine")
    with pytest.warns(UserWarning, match=r"holds files of someone else \(notes.txt\); set aside as damaged-model"):
        keep(tmp_path / "model", "key", {}, {"numbers": torch.ones(2)})
    assert kept(tmp_path / "model", "key") is not None
    assert (tmp_path / "damaged-model" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", [ABOUT, TENSORS])
def test_a_damaged_folder_is_set_aside(tmp_path: Path, name: str) -> None:
    keep(tmp_path / "model", "key", {}, {"numbers": torch.ones(2)})
    (tmp_path / "model" / name).write_bytes(b"")
    with pytest.warns(UserWarning, match=name):
        assert kept(tmp_path / "model", "key") is None
    assert not (tmp_path / "model").exists()
