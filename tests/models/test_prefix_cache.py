"""Caches of prefixes: what is kept, and which models prove that they can go on from it."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tiny import (
    ALL_KEYS,
    FACTS,
    INTERFACE,
    OUTSIDE,
    SINKS,
    VOCABULARY,
    count_passes,
    eager,
    tiny_config,
    tiny_model,
    tiny_tokenizer,
)
from torch.nn import Module
from transformers import AutoModelForCausalLM, PreTrainedModel

from attnbalance.data.prompts import make_prompts
from attnbalance.data.tokens import encode
from attnbalance.errors import ModelError
from attnbalance.families.tiny_models import build
from attnbalance.models.generate import generate
from attnbalance.models.hooked import hook
from attnbalance.models.load import load_model
from attnbalance.models.prefix_cache import copies, read_prefix, same_after_prefix, same_with_cache

WARNING = pytest.mark.filterwarnings("ignore:.*is outside")
PREFIX, RESTS = [5, 9, 7, 30, 8, 12, 40], [[3, 4, 6], [50, 2, 9]]


@WARNING
@pytest.mark.parametrize("family", [*INTERFACE, *SINKS, *OUTSIDE])
def test_a_cache_of_all_keys_is_kept_and_no_other(family: str) -> None:
    model = tiny_model(family)
    cache = read_prefix(model, PREFIX)
    assert (cache is not None) == (family in ALL_KEYS)
    kernel = hook(model, tiny_tokenizer(), family).kernel
    assert same_after_prefix(model, kernel) == (family in ALL_KEYS)


@WARNING
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_neo"])
def test_caches_of_answers_are_trusted_where_they_are_right(family: str) -> None:
    assert same_with_cache(tiny_model(family))


@pytest.mark.parametrize("family", ["zamba2", "nemotron_h"])
def test_a_cache_that_answers_otherwise_than_whole_passes_is_not_used(family: str) -> None:
    """Families of transformers 5.23 whose recurrent states do not continue what they have read (by 1% of a logit)."""
    model = build(family, False)
    assert not same_with_cache(model)
    torch.manual_seed(0)
    model.resize_token_embeddings(VOCABULARY, mean_resizing=False)
    hooked = hook(model, tiny_tokenizer(), family)
    assert not hooked.answers_from_cache
    prompts, passes = make_prompts(FACTS[:3]), count_passes(model)
    answers = generate(hooked, prompts, max_new_tokens=12, batch_size=2)
    lengths = [len(encoding.ids) for encoding in encode(prompts, hooked.tokenizer)]
    assert min(shape[1] for shape in passes) >= min(lengths)  # no token is read after a cache
    for encoding, answer in zip(encode(prompts, hooked.tokenizer), answers, strict=True):
        ids = list(encoding.ids)
        for _ in range(12):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        said = ids[len(encoding.ids) :]
        stops = [i for i, token in enumerate(said) if token == hooked.tokenizer.eos_token_id]
        assert answer == hooked.tokenizer.decode(said[: min(stops, default=12)], skip_special_tokens=True)
    with pytest.raises(ModelError, match=f"{family}'s answers with its cache differ from those without"):
        generate(hooked, prompts, max_new_tokens=2, batch_size=2, edit=lambda _: lambda _, row: row)


@pytest.mark.parametrize("window", [8, 24, 48, -4, -100])
def test_a_cache_of_a_window_is_trusted_only_where_attention_has_that_window(window: int) -> None:
    """Transformers keeps only a window's keys wherever `sliding_window` is named, but Llama attends to all tokens.

    With a negative window the cache cannot be used at all.
    """
    mistral, model = (
        AutoModelForCausalLM.from_config(tiny_config(family, sliding_window=window)).eval()
        for family in ("mistral", "llama")
    )
    assert window < 0 or same_with_cache(mistral)
    assert not same_with_cache(model)
    hooked = load_model(model, tokenizer=tiny_tokenizer())
    prompts = make_prompts(FACTS[:3], "Long ago, in the days of old, in the north of the land: {question}")
    answers = generate(hooked, prompts, max_new_tokens=6, batch_size=2)
    for encoding, answer in zip(encode(prompts, hooked.tokenizer), answers, strict=True):
        assert len(encoding.ids) < 90
        ids = torch.tensor([encoding.ids])
        for _ in range(6):
            with torch.no_grad():
                ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        assert answer == hooked.tokenizer.decode(ids[0, len(encoding.ids) :], skip_special_tokens=True)


@pytest.mark.parametrize("other", ["sliding_attention", "chunked_attention"])
def test_a_cache_of_layers_with_windows_that_the_family_ignores_is_not_used(other: str) -> None:
    """Its two lengths of keys break a padded batch; prompts of one length were answered from a cut cache."""
    config = tiny_config("llama", sliding_window=8, attention_chunk_size=8)
    config.layer_types = ["full_attention", other][: config.num_hidden_layers]
    model = AutoModelForCausalLM.from_config(config).eval()
    hooked = load_model(model, tokenizer=tiny_tokenizer())
    (prompt,) = make_prompts(FACTS[:1], "Long ago, in the days of old, in the north of the land: {question}")
    (answer,) = generate(hooked, [prompt], max_new_tokens=8, batch_size=1)
    (encoding,) = encode([prompt], hooked.tokenizer)
    ids = torch.tensor([encoding.ids])
    for _ in range(8):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert answer == hooked.tokenizer.decode(ids[0, len(encoding.ids) :], skip_special_tokens=True)
    assert not hooked.answers_from_cache


def test_a_cache_is_trusted_if_rounding_decides_between_two_tokens() -> None:
    """A sliding window in 16 bits: noise as of another kernel, half the tolerance, changes which token is likelier."""
    parted = 0
    for seed in range(6):
        model = tiny_model("mistral").to(torch.bfloat16)
        noise, chosen = torch.Generator().manual_seed(seed), list[torch.Tensor]()

        def disturb(_module: Module, _inputs: object, logits: torch.Tensor) -> torch.Tensor:
            scale = 0.0125 * (1 + logits.abs().max())
            noisy = logits + scale * torch.rand(logits.shape, generator=noise).mul(2).sub(1)  # noqa: B023
            chosen.append(noisy[:, -1].argmax(-1))  # noqa: B023
            return noisy.to(logits.dtype)

        model.lm_head.register_forward_hook(disturb)
        assert same_with_cache(model)
        whole, cached = torch.stack(chosen[-8:-4]), torch.stack(chosen[-4:])  # four tokens each way
        parted += not torch.equal(cached, whole)
    assert parted  # else the noise decided nothing


def test_a_token_that_is_masked_in_all_logits_leaves_the_cache_to_be_judged() -> None:
    for noise, trusted in ((0.0, True), (0.3, False)):
        model, generator = tiny_model("mistral"), torch.Generator().manual_seed(0)

        def mask(_module: Module, _inputs: object, logits: torch.Tensor) -> torch.Tensor:
            logits = logits + noise * torch.randn(logits.shape, generator=generator)  # noqa: B023
            return logits.index_fill(-1, torch.tensor([3]), -math.inf)

        model.lm_head.register_forward_hook(mask)
        assert same_with_cache(model) == trusted


def test_a_model_of_nan_logits_is_not_blamed_on_its_cache() -> None:
    model = tiny_model("mistral")
    model.lm_head.register_forward_hook(lambda _module, _inputs, logits: torch.full_like(logits, math.nan))
    assert same_with_cache(model)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
def test_logits_after_copies_of_a_cache_are_those_of_whole_prompts(family: str) -> None:
    model, oracle = tiny_model(family), eager(tiny_model(family))
    cache = read_prefix(model, PREFIX)
    assert cache is not None
    before = copy.deepcopy(cache)
    with torch.no_grad():
        mask = torch.ones(2, len(PREFIX) + 3, dtype=torch.long)
        after = model(torch.tensor(RESTS), attention_mask=mask, past_key_values=copies(cache, 2)).logits
        whole = oracle(torch.tensor([PREFIX + rest for rest in RESTS]), use_cache=False).logits[:, len(PREFIX) :]
    torch.testing.assert_close(after, whole, atol=5e-5, rtol=1e-5)  # logits of 1 to 10 in float32, in another order
    assert cache.get_seq_length() == len(PREFIX)
    for layer, own in zip(cache.layers, before.layers, strict=True):
        assert torch.equal(layer.keys, own.keys)
        assert torch.equal(layer.values, own.values)


def without_positions(model: PreTrainedModel) -> None:
    """Tokens after a cache begin at position 0 again."""
    forward = model.model.forward

    def restarted(**inputs: object) -> object:
        ids = inputs["input_ids"]
        assert isinstance(ids, torch.Tensor)
        return forward(**(inputs | {"position_ids": torch.arange(ids.shape[1])[None]}))

    model.model.forward = restarted  # pyright: ignore[reportAttributeAccessIssue]


def without_cache(model: PreTrainedModel) -> None:
    """A family whose pass does not take the keys of another."""
    forward = model.model.forward

    def refusing(**inputs: object) -> object:
        if getattr(inputs.get("past_key_values"), "get_seq_length", int)():
            raise NotImplementedError("no cache")
        return forward(**inputs)

    model.model.forward = refusing  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("broken", [without_positions, without_cache])
def test_a_model_whose_passes_go_on_otherwise_is_read_whole(broken) -> None:
    model = tiny_model("llama")
    hooked = hook(model, tiny_tokenizer(), "llama")
    broken(model)
    assert read_prefix(model, PREFIX) is not None
    assert not hooked.shares_prefixes


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_models_of_other_precision_prove_themselves_too(dtype: torch.dtype) -> None:
    hooked = hook(tiny_model("llama").to(dtype), tiny_tokenizer(), "llama")
    assert hooked.shares_prefixes
    without_positions(hooked.model)  # pyright: ignore[reportArgumentType]
    assert not same_after_prefix(hooked.model, hooked.kernel)
