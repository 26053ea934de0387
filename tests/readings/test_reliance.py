"""Context reliance, counted by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conflict_facts import made

from attnbalance.data.conflicts import Conflict
from attnbalance.data.prompts import Prompt, make_prompts
from attnbalance.readings.reliance import Reliance

SIDES = ("context", "memory", "neither")


def test_an_output_with_both_answers_is_from_the_context() -> None:
    assert made().sides == ("context", "context", "context", "context", "memory", "neither")
    assert [made().share(side).mean for side in SIDES] == [4 / 6, 1 / 6, 1 / 6]


def test_what_a_model_says_after_its_answer_is_left_out() -> None:
    going_on = tuple(f" none\nQuestion: What is it? Answer: {prompt.fact.answer}" for prompt in made().prompts)
    assert set(replace(made(), outputs=going_on).sides) == {"neither"}


def test_whose_answer_comes_first_is_counted_too() -> None:
    fact = Conflict(
        "Osny",
        "country",
        ("France", "FR"),
        question="Where is Osny?",
        context="Osny is in France.",
        memory_answers=("Italy", "IT", "ITA"),
    )
    said = (
        "It is in France, not in Italy.",
        "The city of Osny is in France, not Italy.",
        "Italy, then France",
        "IT or FR",
    )
    prompts = tuple(Prompt("Where is Osny?", {"subject": (9, 13)}, f"country/Osny {i}", fact) for i in range(len(said)))
    short = Reliance(prompts, said, ("",) * len(said), torch.zeros(len(said)), {})
    assert short.first == ("context", "context", "memory", "memory")  # "It" and "city" hold no Italy
    assert made().first == ("context", "context", "context", "memory", "memory", "neither")
    assert [made().first_share(side).mean for side in SIDES] == [3 / 6, 2 / 6, 1 / 6]


def test_outputs_of_a_real_model_are_judged_as_they_were_read_by_hand() -> None:
    """50 outputs of SmolLM2-135M-Instruct to conflicts drawn at random, read before the rule was chosen."""
    rows = [json.loads(line) for line in (Path(__file__).parent / "read_by_hand.jsonl").read_text().splitlines()]
    conflicts = [
        Conflict(
            "it", "conflict", (row["answer"],), question="What is it?", context=row["answer"],
            memory_answers=(row["memory_answer"],),
        )
        for row in rows
    ]  # fmt: skip
    outputs = tuple(row["output"] for row in rows)
    read = replace(made(), prompts=make_prompts(conflicts, "context"), outputs=outputs)
    labels = [row["label"] for row in rows]
    assert len(labels) == 50
    assert sum(side == label for side, label in zip(read.sides, labels, strict=True)) == 47
    assert sum(side == label for side, label in zip(read.first, labels, strict=True)) == 37
    for memory, right, wrong in ((False, 30, 1), (True, 11, 12)):  # of 32 that say the context's answer, 11 the other
        side, name = ("memory", "memory_answer") if memory else ("context", "answer")
        contains = read.contains(memory=memory)
        assert contains == [row[name].casefold() in row["output"].casefold() for row in rows]
        hits = [label == side for label, hit in zip(labels, contains, strict=True) if hit]
        assert (sum(hits), len(hits) - sum(hits)) == (right, wrong)


def test_an_output_may_contain_both_answers() -> None:
    """By the paper's containment the last one ("NewLaosian") counts, and two outputs count for both."""
    assert made().counterfactual().mean == 5 / 6
    assert made().parametric().mean == 3 / 6


def test_without_the_context_answers_are_remembered_or_guessed() -> None:
    assert made().remembers == (True, True, True, True, False, False)
    assert (made().remembered().mean, made().guessed().mean) == (4 / 6, 1 / 6)
    remembering = made().remembering()
    assert remembering is not None
    assert remembering.share("context").mean == 4 / 4
    names = tuple(prompt.prompt_id for prompt in made().prompts)
    assert remembering.attention["context"].prompt_ids == names[:4]
    for held, kept in ((names[3:], names[3:4]), (names[5:], None)):  # as if other contexts said one answer only
        some = replace(made(), attention={"context answer": made().attention["context"].at(held)}).remembering()
        assert some is not None
        assert {kind: reading.prompt_ids for kind, reading in some.attention.items()} == (
            {"context answer": kept} if kept else {}
        )
    assert replace(made(), without=("",) * 6).remembering() is None


def test_m_c_is_the_share_of_the_contexts_answer_in_both_probabilities() -> None:
    """Odds of 3, 1 and 1/3 are shares of .75, .5 and .25."""
    assert made().m_c().mean == pytest.approx((0.75 + 0.5 + 0.5 + 0.25 + 0.5 + 0.5) / 6)
    certain = replace(made(), log_odds=torch.full((6,), 200.0))
    assert (certain.m_c().mean, certain.m_c().high) == (1.0, 1.0)
