"""A study of two methods, run once."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnbalance.studies.study import study

RECIPE = "{steps: 60, batch_size: 32, layers: 1, d_model: 32, heads: 2, vocabulary: 500, learning_rate: 0.01}"
CONFIG = f"""
worlds:
  tiny: {{facts: synthetic, subjects: 30, answers: 3, recipe: {RECIPE}}}
seeds: [0, 1]
splits: [top, bottom]
methods:
  plain: {{learning_rate: [0.001, 0.01]}}
  recommended: {{objective: recommended}}
defaults: {{steps: 4, batch_size: 16, checkpoint_every: 2}}
"""


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("study") / "study.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="session")
def done(config: Path) -> Path:
    """A study that ran in one go."""
    out = config.parent / "one"
    study(config, out)
    return out
