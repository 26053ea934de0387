"""The table, the JSON and the sentences, from what was made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conflict_facts import CONFLICTS, made

from attnbalance.context.tables import HEAD, answer, as_json, attention_curves, lines, table
from attnbalance.data.prompts import make_prompts
from attnbalance.readings.reading import Reading
from attnbalance.readings.reliance import Reliance


def all_from_context() -> Reliance:
    return replace(made(), outputs=tuple(f" {prompt.fact.answer}" for prompt in made().prompts))


def test_the_row_holds_the_shares() -> None:
    head, _, row = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in table({"base": made()}).splitlines()[:3]
    )
    cells = dict(zip(head, row, strict=True))
    assert tuple(head) == HEAD
    shares = {name: cell.split(" ")[0] for name, cell in cells.items()}
    assert shares == {
        "model": "base", "conflicts": "6", "from context": "66.7%", "from memory": "16.7%", "neither": "16.7%",
        "context's first": "50.0%", "contains context's": "83.3%", "contains memory's": "50.0%",
        "from context, of remembered": "100.0%",
        "without context: memory": "66.7%", "without context: context's": "16.7%", "M_C": "0.5",
        "attention: context": "50.0%", "attention: subject": "20.0%",
        "attention: context's and remembered answer": "(0)",
    }  # fmt: skip
    assert cells["from context, of remembered"].endswith("(4)")
    assert "| (0) |" in table({"base": replace(made(), without=("",) * 6)})
    read = made().attention["context"]
    kinds = {"context answer": read, "memory answer": made().attention["subject"]}
    both = {kind: reading.at(read.prompt_ids[:3]) for kind, reading in kinds.items()}
    row = table({"base": replace(made(), attention=made().attention | both)}).splitlines()[2]
    assert row.endswith("| 50.0% and 20.0% (3) |")


def test_the_sentences_compare_each_further_model_with_the_first() -> None:
    text = answer({"base": made(), "tuned": all_from_context()})
    assert text.startswith("Of 6 conflicts base answers 66.7% [")
    assert "of the 4 that it remembers without the context, 100.0%" in text
    assert "From the context: tuned +33.3 points [" in text
    assert text.endswith("against base.")
    alone = answer({"base": replace(made(), without=("",) * 6)})
    assert alone.endswith("from memory; without the context it remembers none of the answers.")


def test_json_holds_all_conflicts_and_those_that_are_remembered() -> None:
    saved: Any = as_json(made())
    assert (saved["from"]["context"]["mean"], saved["first"]["context"]["mean"]) == (4 / 6, 0.5)
    assert saved["contains"]["memory"]["mean"] == 0.5
    assert (saved["remembered"]["conflicts"], saved["remembered"]["first"]["context"]["mean"]) == (4, 0.75)
    assert saved["without_context"]["memory"]["mean"] == pytest.approx(4 / 6)
    saved = as_json(replace(made(), without=("",) * 6))
    assert saved["remembered"] is None


def test_attention_to_the_parts_of_the_prompt_adds_up() -> None:
    curves = attention_curves(made())
    assert [curves[role].mean for role in ("context", "subject")] == [(0.5, 0.5), pytest.approx((0.2, 0.2))]
    assert curves["rest"].mean == pytest.approx((0.3, 0.3))
    assert curves["rest"].name == "rest attention (sum)"


def test_a_line_says_what_was_answered() -> None:
    line: Any = next(iter(lines("base", made())))
    assert (line["model"], line["output"], line["from"], line["remembers"]) == ("base", " NewFrance", "context", True)
    assert line["memory_answers"] == ["OldFrance"]
    assert line["log_odds"] == pytest.approx(1.0986, abs=1e-4)  # log 3


def test_the_seed_draws_the_intervals_of_m_c() -> None:
    names = [f"Land {i}" for i in range(24)]
    facts = [replace(CONFLICTS[0], subject=name, question=f"What is the capital of {name}?") for name in names]
    odds = 4 * torch.randn(len(names), generator=torch.Generator().manual_seed(0)) - 6  # few of them are likely
    prompts = make_prompts(facts, "context")
    attention = {
        role: Reading.of(prompts, each.name, "probability", torch.full((24, 2, 4), 0.3), (0, 1))
        for role, each in made().attention.items()
    }
    spread = Reliance(prompts, (" NewFrance",) * 24, (" OldFrance",) * 24, odds, attention)
    saved: list[Any] = [as_json(spread, seed)["m_c"] for seed in (0, 1)]
    assert saved[0]["mean"] == saved[1]["mean"] == pytest.approx(float(odds.double().sigmoid().mean()))
    assert saved[0]["high"] != saved[1]["high"]  # the other end is Student's, which needs no seed
    assert str(spread.m_c(1)) in table({"base": spread}, 1)
