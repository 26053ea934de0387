"""What was read of a model comes back as it was, or not at all."""

from __future__ import annotations

from dataclasses import replace
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


def test_what_an_earlier_version_kept_otherwise_counts_as_not_there(tmp_path: Path) -> None:
    """Once there was no dtype; then readings were of all prompts, and did not say so."""
    for about in ({}, {"dtype": "float32", "attention": {"rest": ["rest attention (sum)", "probability", [0, 1]]}}):
        keep(tmp_path / "model", "key", {"outputs": made().outputs, **about}, {"log_odds": made().log_odds})
        assert load_reliance(tmp_path / "model", "key", made().prompts) is None


def test_a_reading_of_some_prompts_comes_back_with_these(tmp_path: Path) -> None:
    some = made().attention["context"].at([prompt.prompt_id for prompt in made().prompts[2:4]])
    save_reliance(replace(made(), attention={"context answer": some}), "float32", tmp_path / "model", "key")
    kept = load_reliance(tmp_path / "model", "key", made().prompts)
    assert kept is not None
    assert kept[0].attention["context answer"].prompt_ids == some.prompt_ids
    assert kept[0].attention["context answer"].subjects == ("Italy", "Chad")
