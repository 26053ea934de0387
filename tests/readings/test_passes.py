"""Passes: whose answer is the control, and which facts are too long to be asked."""

from __future__ import annotations

from dataclasses import replace

import pytest
from base_oracle import TOWNS
from tiny import tiny_tokenizer

from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.prompts import make_prompts
from attnbalance.errors import BadRowsError
from attnbalance.readings.passes import check_passes, other_prompts


def test_the_control_is_about_another_subject() -> None:
    again = [replace(fact, question=f"Which city is {fact.subject}?") for fact in TOWNS]
    prompts = make_prompts([*TOWNS, *again])
    for prompt, other in zip(prompts, other_prompts(prompts, 0), strict=True):
        assert other.fact.subject != prompt.fact.subject
        assert other.fact.relation == prompt.fact.relation


def test_the_facts_that_are_too_long_as_examples_are_named_and_no_others() -> None:
    tokenizer = tiny_tokenizer("plain")
    facts = list(TOWNS)
    facts[3] = replace(facts[3], subject="Ab" * 200, question=None)
    asked = PromptSet.of(make_prompts(facts, "qa"), tokenizer)
    lengths = [len(encoding.ids) for encoding in asked.encodings]
    positions = lengths[3] + 20  # enough for every question by itself
    with pytest.raises(BadRowsError, match="too long to be asked after 4 others") as caught:
        check_passes(asked, tokenizer, positions)
    assert caught.value.indices == (3,)
    check_passes(asked.at([i for i in range(len(facts)) if i != 3]), tokenizer, positions)
    with pytest.raises(BadRowsError) as caught:
        check_passes(asked, tokenizer, 5)
    assert caught.value.indices == tuple(range(len(facts)))


def test_a_fact_that_no_pass_can_ask_takes_no_other_with_it() -> None:
    tokenizer = tiny_tokenizer("plain")
    facts = list(TOWNS)
    facts[2], facts[3] = (
        replace(fact, subject="Ab" * n, question=None) for fact, n in zip(facts, (900, 40), strict=False)
    )
    asked = PromptSet.of(make_prompts(facts, "qa"), tokenizer)
    lengths = [len(encoding.ids) for encoding in asked.encodings]
    positions = lengths[3] + 4 * max(lengths[i] for i in range(len(facts)) if i not in (2, 3)) + 60
    assert lengths[3] * 5 > positions
    with pytest.raises(BadRowsError) as caught:
        check_passes(asked, tokenizer, positions)
    assert caught.value.indices == (2,)
    check_passes(asked.at([i for i in range(len(facts)) if i != 2]), tokenizer, positions)
