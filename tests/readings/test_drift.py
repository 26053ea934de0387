"""Drift against plain transformers, one text at a time, token by token."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from tiny import GROUPED, POSITIONS, eager, tiny_model, tiny_tokenizer
from tokenizers import Tokenizer
from torch.nn.functional import kl_div
from transformers import (
    AutoModelForCausalLM,
    Phi3Config,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from attnbalance import HookedModel
from attnbalance.errors import DataError
from attnbalance.models.hooked import hook
from attnbalance.readings.drift import read_drift

TEXTS = ("Question: In what country is Zürich?", "Rust", "Who was the composer of Ode to Joy? Nobody knows", "a b")

# Divergences of some 0.1 nats: sums of 420 products of float32 log-probabilities down to -20, each off by some
# 1e-6 from batch to batch.
TOLERANCE = 1e-5


@cache
def models(family: str) -> tuple[HookedModel, HookedModel, PreTrainedModel, PreTrainedModel]:
    """A model that was moved, its base, and both with plain eager attention."""
    base, model = tiny_model(family), tiny_model(family)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    plain = eager(model), eager(base)
    return hook(model, tiny_tokenizer("bos"), "model"), hook(base, tiny_tokenizer("bos"), "base"), *plain


def log_probabilities(model: PreTrainedModel, text: str) -> torch.Tensor:
    ids = tiny_tokenizer("bos")(text)["input_ids"][:POSITIONS]
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)


def test_the_rounding_of_another_dtype_is_drift_and_warned_of() -> None:
    base = hook(tiny_model("llama"), tiny_tokenizer("bos"), "base")
    rounded = hook(tiny_model("llama").bfloat16(), tiny_tokenizer("bos"), "rounded")
    with pytest.warns(UserWarning, match="in bfloat16 and its base in float32, so that their"):
        assert read_drift(rounded, base, TEXTS).mean() > 0
    assert rounded.dtype == "bfloat16"


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_drift_is_the_mean_divergence_over_the_tokens_of_each_text(family: str) -> None:
    model, base, plain_model, plain_base = models(family)
    found, apart = read_drift(model, base, TEXTS, batch_size=3).tolist(), list[float]()
    for text, value in zip(TEXTS, found, strict=True):
        p, q = log_probabilities(plain_base, text), log_probabilities(plain_model, text)
        naive = [
            sum(math.exp(a) * (a - b) for a, b in zip(before, after, strict=True))
            for before, after in zip(p.tolist(), q.tolist(), strict=True)
        ]
        assert value == pytest.approx(sum(naive) / len(naive), abs=TOLERANCE)
        assert value == pytest.approx(float(kl_div(q, p, reduction="batchmean", log_target=True)), abs=TOLERANCE)
        apart.append(abs(value - float(kl_div(p, q, reduction="batchmean", log_target=True))))
        assert value > 0.001
    assert max(apart) > 10 * TOLERANCE  # the other direction would be another number


def test_a_model_has_not_drifted_from_itself() -> None:
    for one in models("llama")[:2]:
        assert read_drift(one, one, TEXTS).tolist() == [0.0] * len(TEXTS)


def test_a_model_drifts_farther_the_farther_it_is_moved() -> None:
    base = models("llama")[1]
    drifts = []
    for size in (0.001, 0.01, 0.1):
        torch.manual_seed(2)
        moved = tiny_model("llama")
        with torch.no_grad():
            for parameter in moved.parameters():
                parameter += size * torch.randn_like(parameter)
        drifts.append(float(read_drift(hook(moved, base.tokenizer, "moved"), base, TEXTS).mean()))
    assert 0 < drifts[0] < drifts[1] / 10 < drifts[2] / 100  # to lowest order it grows with the square


def test_neither_batch_size_nor_order_changes_a_drift() -> None:
    model, base = models("llama")[:2]
    whole = read_drift(model, base, TEXTS).tolist()
    assert read_drift(model, base, TEXTS, batch_size=1).tolist() == pytest.approx(whole, abs=TOLERANCE)
    assert read_drift(model, base, TEXTS[::-1], batch_size=3).tolist() == pytest.approx(whole[::-1], abs=TOLERANCE)
    assert len(set(whole)) == len(TEXTS)


def test_company_does_not_change_a_drift_in_a_family_that_attends_otherwise_from_a_length_on() -> None:
    rotation = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
    rotation |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    special = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    config = Phi3Config(**GROUPED, **special, rope_parameters=rotation, original_max_position_embeddings=16)
    torch.manual_seed(0)
    plain = [AutoModelForCausalLM.from_config(config).eval() for _ in range(2)]
    model, base = (hook(each, tiny_tokenizer("bos"), "phi3") for each in plain)
    lengths = [len(model.tokenizer(text)["input_ids"]) for text in TEXTS]
    assert model.alike_from == 16
    assert min(lengths) < 16 < max(lengths)
    for bounded in (model, replace(model, alike_from=None)):  # the base's own limit is enough
        found = read_drift(bounded, base, TEXTS).tolist()
        for text, value in zip(TEXTS, found, strict=True):
            q, p = (log_probabilities(eager(each), text) for each in plain)
            expected = float(kl_div(q, p, reduction="batchmean", log_target=True))
            assert value == pytest.approx(expected, abs=1e-4)  # another rotation shows as 1e-2 to 1


def test_texts_are_cut_at_the_models_positions() -> None:
    model, base, plain_model, plain_base = models("gpt2")
    text = "Who was the composer? " * 40
    assert len(base.tokenizer(text)["input_ids"]) > POSITIONS
    p, q = log_probabilities(plain_base, text), log_probabilities(plain_model, text)
    expected = float(kl_div(q, p, reduction="batchmean", log_target=True))
    assert len(p) == POSITIONS
    assert read_drift(model, base, ["Rust", text])[1].item() == pytest.approx(expected, abs=TOLERANCE)
    shorter = replace(base, max_positions=5)
    first = float(kl_div(q[:5], p[:5], reduction="batchmean", log_target=True))
    assert read_drift(model, shorter, [text])[0].item() == pytest.approx(first, abs=TOLERANCE)


def test_models_stay_in_their_mode_and_get_no_gradients() -> None:
    model, base = models("llama")[:2]
    model.model.train()
    found = read_drift(model, base, TEXTS)
    assert model.model.training
    assert not found.requires_grad
    assert not base.model.training
    model.model.eval()


@pytest.mark.parametrize(("texts", "count"), [((), 0), (("Rust", ""), 2)])
def test_no_texts_and_empty_ones_are_refused(texts: tuple[str, ...], count: int) -> None:
    model, base = models("llama")[:2]
    with pytest.raises(DataError, match=f"at least one text, and no empty text, got {count}"):
        read_drift(model, base, texts)


def tokenized(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    return tokenizer(list(TEXTS))["input_ids"]


def test_models_with_different_tokenizers_are_refused() -> None:
    model, base = models("llama")[:2]
    renamed = json.loads(tiny_tokenizer("bos").backend_tokenizer.to_str())  # pyright: ignore[reportOptionalMemberAccess]
    vocabulary = renamed["model"]["vocab"]
    used = {index for ids in tokenized(tiny_tokenizer("bos")) for index in ids}
    unused = [token for token, index in vocabulary.items() if index not in used and token.isalpha()]
    vocabulary[unused[0]], vocabulary[unused[1]] = vocabulary[unused[1]], vocabulary[unused[0]]
    swapped = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(renamed)))
    assert tokenized(swapped) == tokenized(tiny_tokenizer("bos"))
    for other in (tiny_tokenizer(), swapped):
        with pytest.raises(DataError, match="different tokenizers"):
            read_drift(replace(model, tokenizer=other), base, TEXTS)


def test_an_added_token_that_no_text_holds_changes_no_drift() -> None:
    model, base = models("llama")[:2]
    more = tiny_tokenizer("bos")
    more.add_tokens(["a token of no text"])
    found = read_drift(replace(model, tokenizer=more), base, TEXTS)
    assert torch.equal(found, read_drift(model, base, TEXTS))


def test_predictions_over_vocabularies_of_two_sizes_are_refused() -> None:
    model, base = models("llama")[:2]
    larger = tiny_model("llama")
    larger.resize_token_embeddings(larger.config.vocab_size + 1)
    with pytest.raises(DataError, match=r"the same number of tokens, got \d+ and \d+"):
        read_drift(hook(larger, model.tokenizer, "larger"), base, TEXTS)
