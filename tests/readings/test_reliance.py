"""Context reliance, counted by hand, and against plain loops on a tiny model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conflict_facts import CONFLICTS, made
from tiny import argmax_loop, count_passes, eager, tiny_model, tiny_tokenizer, without_bytes

from attnbalance import load_model
from attnbalance.data.conflicts import Conflict
from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.prompts import Prompt, make_prompts
from attnbalance.errors import BadRowsError, DataError, ModelError
from attnbalance.models.hooked import HookedModel
from attnbalance.readings.answer_probability import read_answer_probability
from attnbalance.readings.reliance import NEW_TOKENS, Reliance, read_reliance, reliance_budgets

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
    assert remembering.attention["context"].prompt_ids == tuple(p.prompt_id for p in made().prompts[:4])
    assert replace(made(), without=("",) * 6).remembering() is None


def test_m_c_is_the_share_of_the_contexts_answer_in_both_probabilities() -> None:
    """Odds of 3, 1 and 1/3 are shares of .75, .5 and .25."""
    assert made().m_c().mean == pytest.approx((0.75 + 0.5 + 0.5 + 0.25 + 0.5 + 0.5) / 6)
    certain = replace(made(), log_odds=torch.full((6,), 200.0))
    assert (certain.m_c().mean, certain.m_c().high) == (1.0, 1.0)


@pytest.mark.parametrize(("family", "once"), [("llama", True), ("neox", True), ("bloom", True), ("mistral", False)])
def test_a_model_is_read_as_plain_loops_read_it(family: str, once: bool) -> None:
    """Mistral's sliding window keeps a cache that is not of all tokens, so that its prompts are read anew each time."""
    network = tiny_model(family)
    network.config.max_position_embeddings = 256
    model = load_model(network, tokenizer=tiny_tokenizer(), device="cpu")
    assert model.shares_prefixes == once
    asked, alone = (make_prompts(CONFLICTS[:3], template) for template in ("context", "qa"))
    read = read_reliance(model, asked, alone, batch_size=2)
    for prompts, texts in ((asked, read.outputs), (alone, read.without)):
        encodings = PromptSet.of(prompts, model.tokenizer).encodings
        for encoding, text in zip(encodings, texts, strict=True):
            ids = argmax_loop(network, list(encoding.ids), NEW_TOKENS)
            assert text == model.tokenizer.decode(ids, skip_special_tokens=True)
    remembered = [replace(prompt, fact=conflict.remembered) for prompt, conflict in zip(asked, CONFLICTS, strict=False)]
    both = [read_answer_probability(model, prompts) for prompts in (asked, remembered)]
    torch.testing.assert_close(read.log_odds, both[0] - both[1], atol=1e-4, rtol=1e-5)
    plain = eager(network)
    for i, encoding in enumerate(PromptSet.of(asked, model.tokenizer).encodings):
        with torch.no_grad():
            maps = plain(torch.tensor([encoding.ids]), output_attentions=True).attentions
        for role in ("context", "subject"):
            expected = torch.stack([layer[0, :, -1, list(encoding.spans[role])].sum(-1) for layer in maps])
            torch.testing.assert_close(read.attention[role].values[i], expected, atol=1e-5, rtol=1e-4)


def test_each_prompt_is_read_once() -> None:
    """What passes through the embedding: the prompts, then for each answer its tokens after the prompt's last one."""
    network = tiny_model("llama")
    network.config.max_position_embeddings = 256
    model = load_model(network, tokenizer=tiny_tokenizer(), device="cpu")
    asked, alone = (make_prompts(CONFLICTS, template) for template in ("context", "qa"))
    assert model.shares_prefixes
    assert model.answers_from_cache
    shapes = count_passes(network)
    read_reliance(model, asked, alone)
    read = [shape[1] for shape in shapes]
    remembered = [replace(prompt, fact=conflict.remembered) for prompt, conflict in zip(asked, CONFLICTS, strict=True)]
    encoded, others = (PromptSet.of(prompts, model.tokenizer) for prompts in (asked, remembered))
    width = max(len(encoding.ids) for encoding in encoded.encodings)
    assert read[:3] == [width, *(1 + max(map(len, each.answers.ids)) for each in (encoded, others))]
    assert read.count(width) == 1


def test_a_cache_that_does_not_hold_all_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    network = tiny_model("llama")
    network.config.max_position_embeddings = 256
    model = load_model(network, tokenizer=tiny_tokenizer(), device="cpu")
    asked, alone = (make_prompts(CONFLICTS[:2], template) for template in ("context", "qa"))
    assert model.shares_prefixes
    rows = HookedModel.rows
    monkeypatch.setattr(HookedModel, "rows", lambda self, batch, cache: rows(self, batch))  # the cache stays empty
    with pytest.raises(ModelError, match="does not keep the keys and values of all tokens in every layer"):
        read_reliance(model, asked, alone)


def test_the_rest_of_the_prompt_holds_no_attention_sink() -> None:
    """In gpt-oss rows sum to less than 1; what is missing went to the sink, not to the rest of the prompt."""
    network = tiny_model("gpt_oss")
    network.config.max_position_embeddings = 256
    model = load_model(network, tokenizer=tiny_tokenizer(), device="cpu")
    asked, alone = (make_prompts(CONFLICTS[:3], template) for template in ("context", "qa"))
    read, plain = read_reliance(model, asked, alone), eager(network)
    for i, encoding in enumerate(PromptSet.of(asked, model.tokenizer).encodings):
        with torch.no_grad():
            maps = plain(torch.tensor([encoding.ids]), output_attentions=True).attentions
        of_roles = {position for role in ("context", "subject") for position in encoding.spans[role]}
        others = [position for position in range(len(encoding.ids)) if position not in of_roles]
        expected = torch.stack([layer[0, :, -1, others].sum(-1) for layer in maps])
        torch.testing.assert_close(read.attention["rest"].values[i], expected, atol=1e-5, rtol=1e-4)
        total = sum(reading.values[i] for reading in read.attention.values())
        assert total.min() < 0.99  # so that 1 minus the others would be wrong


def test_long_answers_get_the_tokens_that_they_take() -> None:
    long = replace(CONFLICTS[0], memory_answers=("Old" + "x" * 80,))
    prompts = PromptSet.of(make_prompts([CONFLICTS[1], long], "context"), tiny_tokenizer())
    budgets = reliance_budgets(prompts)
    assert budgets[0] == NEW_TOKENS
    assert budgets[1] > NEW_TOKENS


def test_facts_without_a_context_and_other_facts_are_refused() -> None:
    model = load_model(tiny_model("llama"), tokenizer=tiny_tokenizer(), device="cpu")
    for facts in ([conflict.remembered for conflict in CONFLICTS], CONFLICTS):
        with pytest.raises(DataError, match="expected prompts with their context, got 'Question: What is the capital"):
            read_reliance(model, make_prompts(facts, "qa"), make_prompts(facts, "qa"))
    with pytest.raises(DataError, match="both prompts must be about the same conflicts"):
        read_reliance(model, make_prompts(CONFLICTS, "context"), make_prompts(CONFLICTS[:2], "qa"))


def test_answers_that_a_tokenizer_cannot_represent_are_refused_before_anything_is_generated() -> None:
    about = {"question": "Where is it?", "memory_answers": ("Paris",)}
    fine = Conflict("it", "place", ("Bern",), context="It lies in Bern.", **about)
    bad = Conflict("it", "place", ("\u6771\u4eac",), context="It lies in \u6771\u4eac .", **about)
    other = replace(fine, memory_answers=("\u6771\u4eac",))
    for conflict in (bad, other):
        prompts = PromptSet.of(make_prompts([fine, conflict], "context"), without_bytes(unknown=True))
        with pytest.raises(BadRowsError, match="answers cannot be represented by the tokenizer") as raised:
            reliance_budgets(prompts)
        assert raised.value.indices == (1,)
