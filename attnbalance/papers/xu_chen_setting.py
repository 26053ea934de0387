"""Sizes of the figures of Xu & Chen (2025), and the conditions under which their claims are the paper's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attnbalance.papers.figure import CellResult, Condition

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "multiplicity": (1, 2),
        "share": (0.2, 0.5),
        "universe": (8, 16),
        "centre": {"multiplicity": 2, "share": 0.2, "universe": 8},
        "data": {"pairs": 20, "frequent": 0.8, "spared": 0.5},
        "harder": {"pairs": 30, "multiplicity": 1},
        "one-layer": {"neurons": 4, "rates": [0.5] * 3, "stage_steps": [5] * 3, "tuning_rate": 0.1, "tuning_steps": 9},
        "GPT-2": {
            "layers": 1,
            "d_model": 16,
            "heads": 2,
            "rate": 2e-3,
            "steps": 5,
            "tuning_rate": 5e-4,
            "tuning_steps": 5,
        },
        "long": {"one-layer": 20, "GPT-2": 10},
    },
    "small": {
        "multiplicity": (1, 2, 4),
        "share": (0.05, 0.2, 0.5),
        "universe": (16, 64, 128),
        "centre": {"multiplicity": 2, "share": 0.2, "universe": 64},
        "data": {"pairs": 60, "frequent": 0.8, "spared": 0.5},
        "harder": {"pairs": 150, "multiplicity": 1},
        "one-layer": {
            "neurons": 8,
            "rates": [0.6, 0.3, 0.15],
            "stage_steps": [50, 500, 250],
            "tuning_rate": 0.03,
            "tuning_steps": 500,
        },
        "GPT-2": {
            "layers": 2,
            "d_model": 64,
            "heads": 4,
            "rate": 2e-3,
            "steps": 300,
            "tuning_rate": 5e-4,
            "tuning_steps": 60,
        },
        "long": {"one-layer": 4000, "GPT-2": 400},
    },
    "paper": {
        "multiplicity": (1, 2, 4, 8, 16),
        "share": (0.05, 0.1, 0.2, 0.5),
        "universe": (16, 64, 128, 256),
        "centre": {"multiplicity": 2, "share": 0.2, "universe": 64},
        "data": {"pairs": 200, "frequent": 0.8, "spared": 0.5},
        "harder": {"pairs": 500, "multiplicity": 1},
        "one-layer": {
            "neurons": 20,
            "rates": [1.0, 0.5, 0.25],
            "stage_steps": [150, 2000, 1000],
            "tuning_rate": 0.03,
            "tuning_steps": 2000,
        },
        "GPT-2": {
            "layers": 12,
            "d_model": 768,
            "heads": 12,
            "rate": 1e-4,
            "steps": 2000,
            "tuning_rate": 1e-5,
            "tuning_steps": 2000,
        },
        "long": {"one-layer": 20000, "GPT-2": 5000},
    },
}
"""The text we used has lost the paper's numbers, except GPT-2's layers, heads and width and the 2000 finetuning steps.

"harder" has the settings that differ in GPT-2's second sweep of M.
"""


UNNAMED = Condition("the model and the sizes of Appendix D", "not named in the text we used", met=False)


def gpt2_condition(settings: Mapping[str, Any]) -> Condition:
    """Whether a GPT-2 has the paper's layers and heads. Its printed width, 786, is no multiple of 12; 768 is taken."""
    layers, heads = settings["layers"], settings["heads"]
    return Condition("a GPT-2 of 12 layers and 12 heads", f"{layers} and {heads}", layers == heads == 12)


def setting_of(results: Sequence[CellResult], model: str) -> tuple[Condition, ...]:
    """The paper's setting of "one-layer" or "GPT-2" (appendix J), as far as it can be read (see `SIZES`)."""
    cells = [result.settings for result in results if result.settings["architecture"] == model]
    steps = min(settings["tuning_steps"] for settings in cells)
    finetuning = Condition("at least 2,000 steps of finetuning", f"{steps:,}", met=steps >= 2000)
    return (gpt2_condition(cells[0]), finetuning) if model == "GPT-2" else (finetuning,)
