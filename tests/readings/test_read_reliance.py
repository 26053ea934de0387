"""Asking models about conflicts: against plain loops and eager attention on tiny models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conflict_facts import CONFLICTS
from tiny import argmax_loop, count_passes, eager, tiny_model, tiny_tokenizer, without_bytes

from attnbalance import load_model
from attnbalance.data.conflicts import Conflict
from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.prompts import make_prompts
from attnbalance.errors import BadRowsError, DataError, ModelError
from attnbalance.models.hooked import HookedModel
from attnbalance.readings.answer_probability import read_answer_probability
from attnbalance.readings.read_reliance import NEW_TOKENS, read_reliance, reliance_budgets


def offsets_of(text: str) -> list[tuple[int, int]]:
    """The characters of each token of a text, by the tokenizer's own count."""
    return tiny_tokenizer()(text, return_offsets_mapping=True)["offset_mapping"]


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
        country = CONFLICTS[i].subject
        for kind, answer in (("context answer", f"New{country}"), ("memory answer", f"Old{country}")):
            start, offsets = encoding.prompt.text.index(answer), offsets_of(encoding.prompt.text)
            inside = [j for j, (first, end) in enumerate(offsets) if first < start + len(answer) and end > start]
            expected = torch.stack([layer[0, :, -1, inside].sum(-1) for layer in maps])
            torch.testing.assert_close(read.attention[kind].values[i], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_answers_are_looked_for_where_the_context_says_both(family: str) -> None:
    """The second context says the remembered answer nowhere; of the others, none does."""
    network = tiny_model(family)
    network.config.max_position_embeddings = 256
    model = load_model(network, tokenizer=tiny_tokenizer(), device="cpu")
    silent = replace(CONFLICTS[1], context="The government of Spain went to NewSpain.")
    asked, alone = (make_prompts([CONFLICTS[0], silent, CONFLICTS[2]], template) for template in ("context", "qa"))
    whole = read_reliance(model, asked, alone)
    for kind in ("context answer", "memory answer"):
        assert whole.attention[kind].prompt_ids == ("capital/France", "capital/Italy")
        assert whole.attention[kind].name == f"{kind} attention (sum)"
        assert bool((whole.attention[kind].values <= whole.attention["context"].values[[0, 2]] + 1e-6).all())
    assert sorted(read_reliance(model, asked[1:2], alone[1:2]).attention) == ["context", "rest", "subject"]


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
        total = sum(read.attention[role].values[i] for role in ("context", "subject", "rest"))
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
