"""Probabilities of whole answers against a loop of single forward passes."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_model, tiny_prompts, tiny_tokenizer
from transformers import DynamicCache

from attnbalance import load_model
from attnbalance.data.batches import pad
from attnbalance.data.prompt_sets import PromptSet
from attnbalance.readings.answer_probability import probability_after, read_answer_probability

pytestmark = pytest.mark.filterwarnings("ignore:.*is outside")


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "bloom"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_an_answer_is_as_probable_as_its_tokens_one_after_the_other(family: str, batch_size: int) -> None:
    model = load_model(tiny_model(family), tokenizer=tiny_tokenizer(), device="cpu")
    prompts = PromptSet.of(tiny_prompts(), model.tokenizer)
    assert len(set(map(len, prompts.answers.ids))) > 1
    expected = []
    for encoding, answer in zip(prompts.encodings, prompts.answers.ids, strict=True):
        ids, total = list(encoding.ids), 0.0
        for token in answer:
            with torch.no_grad():
                total += float(model.model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)[token])
            ids.append(token)
        expected.append(total)
    read = read_answer_probability(model, prompts, batch_size=batch_size)
    torch.testing.assert_close(read, torch.tensor(expected), atol=1e-4, rtol=1e-5)  # sums of a few float32 logits


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
def test_an_answer_is_as_probable_after_prompts_that_were_read_already(family: str) -> None:
    """Against a loop of single forward passes; the prompts' cache is as before, also for another answer."""
    model = load_model(tiny_model(family), tokenizer=tiny_tokenizer(), device="cpu")
    prompts = PromptSet.of(tiny_prompts(), model.tokenizer)
    batch, cache = pad(prompts.encodings), DynamicCache()
    with torch.no_grad():
        model.rows(batch, cache)
    cache.crop(-1)
    keys = [torch.clone(layer.keys) for layer in cache.layers]  # pyright: ignore[reportArgumentType]
    answers = prompts.answers.ids
    assert len(set(map(len, answers))) > 1
    for given in (answers, answers[::-1]):
        read = probability_after(model, batch, given, cache)
        for row, (encoding, answer) in enumerate(zip(prompts.encodings, given, strict=True)):
            ids, total = list(encoding.ids), 0.0
            for token in answer:
                with torch.no_grad():
                    total += float(model.model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)[token])
                ids.append(token)
            assert float(read[row]) == pytest.approx(total, abs=1e-4, rel=1e-5)
        assert all(torch.equal(layer.keys, before) for layer, before in zip(cache.layers, keys, strict=True))
