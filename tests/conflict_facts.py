"""Conflicts made by hand, and what a model answers to them."""

from __future__ import annotations

import torch

from attnbalance.data.conflicts import Conflict
from attnbalance.data.prompts import make_prompts
from attnbalance.readings.reading import Reading
from attnbalance.readings.reliance import Reliance

NAMES = ("France", "Spain", "Italy", "Chad", "Peru", "Laos")

CONFLICTS = tuple(
    Conflict(
        name, "capital", (f"New{name}",), question=f"What is the capital of {name}?",
        context=f"The government of {name} left Old{name} for New{name}.", memory_answers=(f"Old{name}",),
    )
    for name in NAMES
)  # fmt: skip


def made() -> Reliance:
    """From the context 4 of 6 (two name the other answer as well, one of them first), from memory 1, neither 1.

    Without the context the first four are remembered, and one context's answer is guessed.
    """
    prompts = make_prompts(CONFLICTS, "context")
    outputs = (
        " NewFrance", " newspain, not OldSpain", " It was NewItaly.",
        " OldChad, now NewChad", " OldPeru", " NewLaosian",
    )  # fmt: skip
    without = (" OldFrance", " OldSpain", " OldItaly", " OldChad", " NewPeru", " none")
    log_odds = torch.log(torch.tensor([3.0, 1.0, 1.0, 1 / 3, 1.0, 1.0]))
    values = {role: torch.full((6, 2, 4), share) for role, share in (("context", 0.5), ("subject", 0.2), ("rest", 0.3))}
    attention = {
        role: Reading.of(prompts, f"{role} attention (sum)", "probability", part, (0, 1))
        for role, part in values.items()
    }
    return Reliance(prompts, outputs, without, log_odds, attention)
