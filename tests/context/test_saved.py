"""What was read of a model comes back as it was, or not at all."""

from __future__ import annotations

from pathlib import Path

import torch
from conflict_facts import made

from attnbalance.context.saved import load_reliance, save_reliance
from attnbalance.files.kept_tensors import keep


def test_it_comes_back_under_its_key_alone(tmp_path: Path) -> None:
    assert load_reliance(tmp_path / "model", "key", made().prompts) is None
    save_reliance(made(), "bfloat16", tmp_path / "model", "key")
    kept = load_reliance(tmp_path / "model", "key", made().prompts)
    assert kept is not None
    again, dtype = kept
    assert dtype == "bfloat16"
    assert (again.outputs, again.without, again.sides) == (made().outputs, made().without, made().sides)
    assert torch.equal(again.log_odds, made().log_odds)
    for role, reading in made().attention.items():
        assert torch.equal(again.attention[role].values, reading.values)
        assert again.attention[role].layers == reading.layers
    assert load_reliance(tmp_path / "model", "other", made().prompts) is None


def test_what_an_earlier_version_kept_without_a_dtype_counts_as_not_there(tmp_path: Path) -> None:
    keep(tmp_path / "model", "key", {"outputs": made().outputs}, {"log_odds": made().log_odds})
    assert load_reliance(tmp_path / "model", "key", made().prompts) is None
