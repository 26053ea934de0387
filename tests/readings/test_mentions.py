"""Mentions of either answer in a context, found by hand."""

from __future__ import annotations

import torch
from tiny import tiny_tokenizer

from attnbalance.data.conflicts import Conflict
from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.prompts import make_prompts
from attnbalance.readings.attention import AttentionRows
from attnbalance.readings.mentions import _mentions, find_mentions, to_mentions


def conflict(context: str, answers: tuple[str, ...], remembered: tuple[str, ...], subject: str = "Oz") -> Conflict:
    return Conflict(
        subject, "capital", answers, question=f"Where is {subject}?", context=context, memory_answers=remembered
    )


def said(context: str, answers: tuple[str, ...]) -> list[str]:
    return [context[start:end] for start, end in _mentions(context, answers)]


def test_every_mention_counts_in_any_case_as_whole_words() -> None:
    assert said("Lyon, not Lyonnais. LYON!", ("Lyon",)) == ["Lyon", "LYON"]
    assert said("Paris or the City of Light\nof Paris", ("Paris", "City of Light")) == [
        "Paris",
        "Paris",
        "City of Light",
    ]
    assert said("Parisian, xParis", ("Paris",)) == []
    assert said("\u6771\u4eac\u90fd", ("\u6771\u4eac",)) == ["\u6771\u4eac"]  # Tokyo, written without spaces


def test_codes_and_numbers_are_not_found_in_other_words() -> None:
    assert said("It is in the US, so let us go", ("US",)) == ["US"]
    assert said("in 10 of 1,10 and -10 and 10.5", ("10",)) == ["10"]


def test_the_tokens_of_all_mentions_are_found() -> None:
    tokenizer = tiny_tokenizer()
    facts = [
        conflict("Lyon beats Paris. So Lyon it is.", ("Lyon",), ("Paris",), "France"),
        conflict("It moved to Bonn.", ("Bonn",), ("Berlin",), "Germany"),  # Berlin is not said
    ]
    prompts = PromptSet.of(make_prompts(facts, "context"), tokenizer)
    positions = find_mentions(prompts)
    assert {kind: list(of) for kind, of in positions.items()} == {
        "context answer": ["capital/France"],
        "memory answer": ["capital/France"],
    }
    tokens = prompts.encodings[0].tokens
    words = {kind: "".join(tokens[i] for i in of["capital/France"]) for kind, of in positions.items()}
    assert {kind: text.replace(" ", "") for kind, text in words.items()} == {
        "context answer": "LyonLyon",
        "memory answer": "Paris",
    }


def test_an_answer_that_the_template_says_is_no_mention() -> None:
    asked = make_prompts([conflict("Lyon, once Paris", ("Lyon",), ("Paris",))], "Paris or Lyon? {context} {question}")
    prompts = PromptSet.of(asked, tiny_tokenizer())
    [encoding] = prompts.encodings
    for of in find_mentions(prompts).values():
        assert set(of["capital/Oz"]) <= set(encoding.spans["context"])


def test_the_rows_are_summed_over_the_positions() -> None:
    prompts = make_prompts([conflict("Lyon, Paris", ("Lyon",), ("Paris",), name) for name in ("Oz", "Ur")], "context")
    values = torch.arange(2 * 1 * 2 * 4.0).reshape(2, 1, 2, 4)
    rows = AttentionRows(values, {}, (("a", "b", "c", "d"),) * 2, (7,), tuple(prompts))
    reading = to_mentions(rows, "context answer", {"capital/Ur": (1, 3)})
    assert reading.values.tolist() == [[[0.0, 0.0]], [[9.0 + 11.0, 13.0 + 15.0]]]
    assert (reading.name, reading.layers) == ("context answer attention (sum)", (7,))
