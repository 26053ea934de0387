"""The demonstration, made small enough for tests."""

from __future__ import annotations

import functools

import pytest

import attnbalance.demo as demonstration
from attnbalance.data.synthetic import synthetic_facts
from attnbalance.finetuning.pretrain import Recipe
from attnbalance.finetuning.settings import FinetuneSettings


def make_demo_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the demo invent few facts, make a tiny model of them and train it for a few steps."""
    recipe = Recipe(layers=2, d_model=32, heads=2, vocabulary=400, steps=8, batch_size=16)
    monkeypatch.setattr(demonstration, "SYNTHETIC_RECIPE", recipe)
    monkeypatch.setattr(demonstration, "POPQA_RECIPE", recipe)
    monkeypatch.setattr(
        demonstration, "synthetic_facts", functools.partial(synthetic_facts, subjects=20, relations=2, answers=4)
    )
    quick = functools.partial(FinetuneSettings, steps=4, batch_size=8, checkpoint_every=2)
    monkeypatch.setattr(demonstration, "FinetuneSettings", quick)
