"""Comparisons and results of fits, made of numbers chosen by a test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from attnbalance.comparison.comparison import Comparison, ExampleRow, Measured
from attnbalance.data.facts import Fact
from attnbalance.data.prompts import Prompt, make_prompts
from attnbalance.data.scoring import SCORINGS
from attnbalance.readings.reading import Reading
from attnbalance.readings.recall import Recall

TOKENS = ("<s>", "What", " is", " the", " sport", " of", " Ann", " Lee", "?")


def a_comparison(
    attention: Mapping[str, Sequence[float]],
    correct: Mapping[str, Sequence[bool]] | None = None,
    *,
    n: int = 40,
    heads: int = 2,
    pair: tuple[str, str] | None = ("top", "bottom"),
    popular: bool = True,
    subject: str = "Ann {}",
    tokens: Sequence[str] = TOKENS,
    source: Mapping[str, object] | None = None,
    template: str = "qa",
) -> Comparison:
    """Labels with the given layer means of attention (scatter 0.01 over prompts) and the given right answers.

    Prompt i is about subject i and has popularity 1000 - i. A wrong answer with an even i is the shortcut.
    """
    facts = [Fact(subject.format(i), "sport", ("chess",), 1000.0 - i if popular else None) for i in range(n)]
    prompts = make_prompts(facts, template)
    measured = tuple(
        Measured(
            label,
            (a_reading(prompts, means, heads, seed),),
            a_recall(prompts, correct[label]) if correct and label in correct else None,
            tuple(an_example(prompt, tokens, len(means), seed) for prompt in prompts[:3]),
            source or {"model": f"models/{label}", "run": {"seed": seed}},
        )
        for seed, (label, means) in enumerate(attention.items())
    )
    return Comparison(measured, prompts, "max", pair, {"subject not in question": 7}, 0)


def a_reading(prompts: Sequence[Prompt], means: Sequence[float], heads: int, seed: int) -> Reading:
    scatter = 0.01 * torch.randn(len(prompts), len(means), heads, generator=torch.Generator().manual_seed(seed))
    return Reading(
        "subject attention (max)",
        "probability",
        torch.tensor(means)[None, :, None] + scatter,
        tuple(range(len(means))),
        tuple(prompt.prompt_id for prompt in prompts),
        tuple(prompt.fact.subject for prompt in prompts),
    )


def a_recall(prompts: Sequence[Prompt], correct: Sequence[bool]) -> Recall:
    return Recall(
        tuple(prompt.prompt_id for prompt in prompts),
        tuple(prompt.fact.subject for prompt in prompts),
        tuple(prompt.fact.popularity for prompt in prompts),
        tuple("chess" if right else "golf" for right in correct),
        dict.fromkeys(SCORINGS, tuple(correct)),
        tuple((1 + 3 * right) / 4 for right in correct),
        tuple(not right and i % 2 == 0 for i, right in enumerate(correct)),
    )


def an_example(prompt: Prompt, tokens: Sequence[str], layers: int, seed: int) -> ExampleRow:
    weights = torch.rand(layers, len(tokens), generator=torch.Generator().manual_seed(seed)).softmax(-1)
    inside = tuple(position in (6, 7) for position in range(len(tokens)))
    return ExampleRow(prompt.prompt_id, tuple(tokens), inside, tuple(map(tuple, weights.tolist())))


def a_fit(method: str, split: str, seed: int, correct: list[int], stated: list[int]) -> dict[str, Any]:
    """One fit's `result.json`: of each held-out fact, whether it is answered, and whether the base completes it."""
    ids = [f"r/{i}" for i in range(len(correct))]
    return {
        "world": "w",
        "seed": seed,
        "split": split,
        "method": method,
        "prompt_ids": ids,
        "subjects": ids,
        "correct": list(map(bool, correct)),
        "stated": list(map(bool, stated)),
        "accuracy_by_quintile": [1.0, 0.5],
        "shortcut_rate": None,
        "subject_attention": [0.2, 0.4],
        "new_facts": 0.5,
        "kept_facts": 1.0,
        "drift": 0.1,
        "seconds": 3.0,
    }
