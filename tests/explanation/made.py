"""Explanations made of numbers chosen by a test."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from attnbalance.explanation.conclude import conclude
from attnbalance.explanation.conclusions import Explanation
from attnbalance.readings.change import Change
from attnbalance.readings.recall import Recall
from attnbalance.readings.salience import ReadoutRanks
from attnbalance.readings.steering import Treatment
from tests.fakes import a_comparison, a_reading, a_recall

N = 40
BEFORE, AFTER = [True] * 20 + [False] * 20, [False] * 12 + [True] * 8 + [True] * 4 + [False] * 16
ATTENTION = {"old": [0.5, 0.6], "new": [0.3, 0.2]}
RANKS = ReadoutRanks(torch.arange(N) % 6 + 1, torch.full((N,), 5), torch.full((N,), 6))


def a_change(
    qk: float, ov_mlp: float, rest: float = 0.0, settings: dict[str, tuple[object, object]] | None = None
) -> Change:
    """The same causes in every prompt, with a little scatter in each."""
    scatter = 0.01 * torch.randn(N, generator=torch.Generator().manual_seed(0))
    parts = {
        "qk": qk + scatter,
        "ov": torch.full((N,), ov_mlp / 2),
        "mlp": torch.full((N,), ov_mlp / 2),
        "rest": torch.full((N,), rest),
    }
    before = torch.full((N,), 3.0)
    prompts = a_comparison(ATTENTION).prompts
    components = {part: {"subject": torch.zeros(N, 2, 2), "rest": torch.zeros(N, 1, 1)} for part in parts}
    by_attention, by_readout = a_reading(prompts, [0.1, -0.2], 2, 1), a_reading(prompts, [0.0, 0.3], 2, 2)
    after, rows = before + sum(parts.values()), torch.full((N,), qk / 2)
    return Change(before, after, parts, components, rows, by_attention, by_readout, settings or {})


def an_explanation(
    change: Change,
    *,
    subject: str = "Ann {}",
    popular: bool = True,
    checked: bool = True,
    ranks: ReadoutRanks = RANKS,
    read_only: Mapping[str, str] | None = None,
) -> Explanation:
    """12 of 40 facts are lost, 4 gained; rows and W_Q and W_K bring all of them back, a boost six, its control none."""
    comparison = a_comparison(
        ATTENTION, {"old": BEFORE, "new": AFTER}, pair=("old", "new"), subject=subject, popular=popular
    )
    answers: Mapping[str, list[tuple[Treatment, Recall]]] = {"new": [], "old": []}
    for label, plain, other in (("new", AFTER, BEFORE), ("old", BEFORE, AFTER)) if checked else ():
        tokens, boost = "attention to other tokens x4", "attention to the subject x4"
        for name, kind, alpha, control, right in (
            (tokens, "control", 4.0, None, plain),
            (boost, "boost", 4.0, tokens, [True] * 6 + plain[6:]),
            ("rows of all layers", "rows", None, None, other),
            ("W_Q and W_K", "weights", None, None, other),
        ):
            recall = a_recall(comparison.prompts, right)
            answers[label].append((Treatment(name, kind, alpha, lambda recall=recall: recall, control), recall))
    return conclude(comparison, change, {"old": ranks, "new": ranks}, answers, 0, read_only or {})
