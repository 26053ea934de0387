"""Models whose attention changes from a length on are read rightly on both sides of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from tiny import (
    FACTS,
    GROUPED,
    LATENT,
    eager,
    tiny_prompts,
    tiny_tokenizer,
)

from attnbalance import load_model, make_prompts, read_attention
from attnbalance.data.batches import pad
from attnbalance.data.tokens import encode
from attnbalance.errors import BadRowsError, ModelError
from attnbalance.models.generate import generate
from attnbalance.models.length_thresholds import cache_limits, length_thresholds
from attnbalance.models.shared_prefixes import with_prefixes

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
}


EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}


SPARSE = GROUPED | LATENT | EXPERTS | {"v_head_dim": 8, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 16}


THRESHOLDS = {
    "DeepseekV32": SPARSE | {"first_k_dense_replace": 1},
    "GlmMoeDsa": SPARSE | {"first_k_dense_replace": 1},
    "MiniMaxM3VLText": GROUPED
    | {"head_dim": 8, "index_n_heads": 2, "index_head_dim": 8, "index_block_size": 8, "index_topk_blocks": 2}
    | {"layer_types": ["full_attention", "minimax_m3_sparse"], "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen4ExpText": GROUPED
    | {"head_dim": 8, "indexer_budget": 16, "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16}
    | {"indexer_compress_ratio": 4, "layer_types": ["indexed_attention", "indexed_attention"]},
    "Phi3": GROUPED | {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16, "pad_token_id": None},
    "Llama4Text": GROUPED
    | {"head_dim": 8, "floor_scale": 16, "no_rope_layers": [1, 0], "intermediate_size_mlp": 48}
    | {"num_local_experts": 2, "attention_chunk_size": 64},
}
"""Families whose attention is another from a length on that their configuration names, here 8 or 16 tokens."""


def threshold_model(kind: str) -> transformers.PreTrainedModel:
    config = getattr(transformers, f"{kind}Config")(**THRESHOLDS[kind])
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("kind", THRESHOLDS)
def test_rows_and_logits_beyond_a_threshold_equal_eager_attention_whatever_the_company(kind: str) -> None:
    model = threshold_model(kind)
    oracle, tokenizer = eager(model), tiny_tokenizer()
    hooked = load_model(model, tokenizer=tokenizer)
    assert (hooked.kernel, hooked.alike_from) == ("sdpa", 8 if kind == "MiniMaxM3VLText" else 16)
    prompts = tiny_prompts()
    encodings = encode(prompts, tokenizer)
    lengths = sorted(len(encoding.ids) for encoding in encodings)
    assert lengths[0] < 16 < lengths[-1]  # both sides of the threshold, in what would be one batch
    found = read_attention(hooked, prompts, batch_size=len(prompts))
    for values, encoding in zip(found.values, encodings, strict=True):
        ids = torch.tensor([encoding.ids])
        with torch.no_grad():
            whole = oracle(input_ids=ids, output_attentions=True, use_cache=False)
            logits = model(input_ids=ids, use_cache=False).logits
        expected = torch.stack([layer[0, :, -1] for layer in whole.attentions])
        # float32 sums in another order: 1e-6; a key more or less, or another rotation, shows as 1e-2 to 1
        torch.testing.assert_close(values[..., : len(encoding.ids)], expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(logits, whole.logits, atol=1e-4, rtol=1e-4)


def answer_of_whole_passes(model: transformers.PreTrainedModel, tokenizer: Any, prompt: Sequence[int]) -> str:
    """Eight greedy tokens, or up to the end, each of a pass over all that stands before it."""
    ids, ends = torch.tensor([list(prompt)]), (tokenizer.eos_token_id, model.config.eos_token_id)
    for _ in range(8):
        with torch.no_grad():
            token = model(ids, use_cache=False).logits[:, -1:].argmax(-1)
        if int(token) in ends:
            break
        ids = torch.cat([ids, token], 1)
    return tokenizer.decode(ids[0, len(prompt) :], skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Phi3"])
@pytest.mark.parametrize(("shared", "beyond"), [(False, 2), (True, 1), (True, 5), (False, 0)])
def test_answers_that_cross_a_threshold_are_those_of_whole_passes(kind: str, shared: bool, beyond: int) -> None:
    """Transformers' cache keeps the keys as they were rotated below the threshold; only Phi-3 begins anew there."""
    tokenizer = tiny_tokenizer()
    prompts = tiny_prompts()
    if shared:  # a header that all prompts begin with, and that is read once
        prompts = make_prompts(FACTS, "Long ago, in the days of old, in the north of the land, they asked: {question}")
    lengths = [len(encoding.ids) for encoding in encode(prompts, tokenizer)]
    threshold = (max(lengths) if shared else sorted(lengths)[len(lengths) // 2]) + beyond
    rotation = LONGROPE | {"original_max_position_embeddings": threshold, "long_factor": [16.0] * 4}
    own = {"original_max_position_embeddings": threshold} if kind == "Phi3" else {}
    config = getattr(transformers, f"{kind}Config")(
        **GROUPED | {"head_dim": 8, "rope_parameters": rotation, "pad_token_id": None} | own
    )
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(6.0 if weight.dim() > 1 else 1.0)
    hooked = load_model(model, tokenizer=tokenizer)
    assert hooked.answers_from_cache
    encodings = encode(prompts, tokenizer)
    prefixes = [prefix for prefix, _ in with_prefixes(hooked, [encoding.ids for encoding in encodings])]
    assert (prefixes != [None]) == shared
    answers = generate(hooked, prompts, max_new_tokens=8, batch_size=3)
    assert answers == [answer_of_whole_passes(model, tokenizer, encoding.ids) for encoding in encodings]
    crossing = [i for i, length in enumerate(lengths) if length <= threshold < length + 7]  # the eighth is not read
    with pytest.raises(BadRowsError, match=f"cannot be edited, since they may go on beyond {threshold}") as error:
        generate(hooked, prompts, max_new_tokens=8, batch_size=3, edit=lambda _: lambda _, row: row)
    assert list(error.value.indices) == crossing
    others = [prompt for i, prompt in enumerate(prompts) if i not in crossing]
    edited = generate(hooked, others, max_new_tokens=8, batch_size=3, edit=lambda _: lambda _, row: row)
    assert edited == generate(hooked, others, max_new_tokens=8, batch_size=3)


@pytest.mark.parametrize("kind", ["DeepseekV32", "GlmMoeDsa"])
def test_answers_with_more_tokens_than_are_kept_by_score_are_those_of_whole_passes(kind: str) -> None:
    """Transformers' cache of these families gives other logits, which the check at first use may not show."""
    tokenizer, trusted = tiny_tokenizer(), 0
    prompts = make_prompts(FACTS, "Long ago, in the days of old, in the north of the land, they asked: {question}")
    encodings = encode(prompts, tokenizer)
    config = getattr(transformers, f"{kind}Config")(**THRESHOLDS[kind] | {"index_topk": 23})
    assert min(len(encoding.ids) for encoding in encodings) > 23
    for seed in range(6):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for weight in model.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=1.5 * min(weight.shape[-2:]) ** -0.5)
        hooked = load_model(model, tokenizer=tokenizer)
        trusted += hooked.answers_from_cache
        answers = generate(hooked, prompts, max_new_tokens=8, batch_size=3)
        assert answers == [answer_of_whole_passes(model, tokenizer, encoding.ids) for encoding in encodings]
        if not hooked.answers_from_cache:
            continue
        edit = {"batch_size": 3, "edit": lambda _: lambda _, row: row}
        with pytest.raises(BadRowsError, match="cannot be edited, since they may go on beyond 23 tokens"):
            generate(hooked, prompts, max_new_tokens=2, **edit)
        assert generate(hooked, prompts, max_new_tokens=1, **edit) == generate(
            hooked, prompts, max_new_tokens=1, batch_size=3
        )  # the only token is chosen after a whole pass
    assert trusted


@pytest.mark.parametrize(
    ("kind", "limits"),
    [("DeepseekV32", [16]), ("GlmMoeDsa", [16]), ("MiniMaxM3VLText", []), ("Qwen4ExpText", []), ("Llama4Text", [])],
)
def test_only_families_whose_cache_differs_lose_it(kind: str, limits: list[int]) -> None:
    assert cache_limits(threshold_model(kind).config) == ([], limits)


def test_the_caches_of_blocks_of_keys_are_kept_since_they_do_not_differ() -> None:
    """Fourteen tokens after 2 to 20, beyond the 16 keys that MiniMax-M3 here keeps: cached, and in one pass."""
    for seed in range(4):
        torch.manual_seed(seed)
        model = threshold_model("MiniMaxM3VLText")
        for weight in model.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=1.5 * min(weight.shape[-2:]) ** -0.5)
        ids = torch.randint(3, 60, (1, 34), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            whole = model(ids, use_cache=False).logits
            for start in (2, 12, 20):
                outputs = model(ids[:, :start], use_cache=True)
                for step in range(start, start + 14):
                    outputs = model(ids[:, step : step + 1], past_key_values=outputs.past_key_values, use_cache=True)
                    torch.testing.assert_close(outputs.logits[:, -1], whole[:, step], atol=1e-3, rtol=1e-3)


def test_only_rotations_that_change_with_length_cost_the_cache() -> None:
    llama3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = transformers.LlamaConfig(
        **GROUPED | {"max_position_embeddings": 2048},
        rope_parameters=llama3 | {"original_max_position_embeddings": 600},
    )
    assert length_thresholds(config).unsure == [600]
    assert cache_limits(config) == ([], [])
    layers = {"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    config = transformers.Gemma3TextConfig(**GROUPED | {"head_dim": 8}, sliding_window=600, rope_parameters=layers)
    assert cache_limits(config) == ([16], [])
    phi = {"original_max_position_embeddings": 4096, "max_position_embeddings": 8192, "rope_theta": 1e4}
    scaling = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}  # as Phi-3's own files say it
    assert cache_limits(transformers.Phi3Config.from_dict(phi | {"rope_scaling": scaling})).rotations == [4096]


def test_a_padded_batch_beyond_a_threshold_is_refused_by_the_model_itself() -> None:
    hooked = load_model(threshold_model("Phi3"), tokenizer=tiny_tokenizer())
    with pytest.raises(
        ModelError, match="can be read from 16 tokens on only in batches of prompts of one length, got a padded batch"
    ):
        hooked.rows(pad(encode(tiny_prompts(), tiny_tokenizer())))


def test_a_threshold_too_far_to_be_proven_splits_batches_there_all_the_same() -> None:
    settings = THRESHOLDS["Phi3"] | {"original_max_position_embeddings": 4096, "max_position_embeddings": 8192}
    rope = LONGROPE | {"original_max_position_embeddings": 4096}
    config = transformers.Phi3Config(**settings | {"rope_parameters": rope})
    thresholds = length_thresholds(config)
    assert thresholds.crossed == []
    assert set(thresholds.unsure) == {4096}
    hooked = load_model(transformers.AutoModelForCausalLM.from_config(config).eval(), tokenizer=tiny_tokenizer())
    assert hooked.alike_from == 4096
