"""Value-weighted attention against a loop over tokens and heads on the transformers model's own hidden states."""

from __future__ import annotations

import itertools
import random
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from tiny import GROUPED, SIZES, VOCABULARY, eager, tiny_lora, tiny_model, tiny_prompts, tiny_tokenizer
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from uneven import hooked, uneven

from attnbalance import AttentionRows, HookedModel, bridge_of, load_model, read_attention, read_value_weighted_attention
from attnbalance.data.batches import pad
from attnbalance.data.tokens import encode
from attnbalance.errors import ArgumentError, DataError, ModelError
from attnbalance.models.bridge import BridgedModel

# Lengths of 0.1 to 10 are roots of sums of some 30 float32 squares, after two layers of such sums: 1e-5 of each.
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}

SPECIAL = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
KINDS: dict[str, str | PretrainedConfig] = {
    "gpt2": "gpt2",  # one fused projection, biases
    "llama": "llama",  # grouped queries
    "mistral": "mistral",
    "neox": "neox",  # fused head by head
    "qwen2": "qwen2",  # biases of values
    "qwen3": "qwen3",
    "gemma": transformers.GemmaConfig(**GROUPED, **SPECIAL, head_dim=16),  # heads wider than d_model / head
    "gemma2": "gemma2",  # a norm after attention
    "gpt_oss": "gpt_oss",  # sinks
    "phi3": transformers.Phi3Config(**GROUPED, **SPECIAL),  # q, k and v fused one after the other
}


@cache
def bridged(kind: str) -> BridgedModel:
    return bridge_of(hooked(KINDS[kind]))


@cache
def weighted(kind: str) -> AttentionRows:
    return read_value_weighted_attention(bridged(kind), tiny_prompts(), batch_size=4)


def attentions(model: PreTrainedModel) -> list[Any]:
    """The attention module of each layer."""
    modules = [module for name, module in model.named_modules() if name.split(".")[-1] in ("attn", "self_attn")]
    return modules or [module for name, module in model.named_modules() if name.endswith(".attention")]


def value_and_output(kind: str, attention: Any, config: Any) -> list[tuple[Tensor, Tensor, Tensor]]:
    """W_V, b_V and W_O of each query head, cut out of the parameters as the family lays them out."""
    heads, width = config.num_attention_heads, config.hidden_size
    if kind == "gpt2":  # Conv1D: weights multiply from the right
        W_V, b_V = attention.c_attn.weight[:, 2 * width :], attention.c_attn.bias[2 * width :]
        W_O, kv_heads = attention.c_proj.weight, heads
    elif kind == "neox":  # for each head its query, key and value
        d_head = width // heads
        fused = attention.query_key_value
        W_V = fused.weight.reshape(heads, 3, d_head, width)[:, 2].reshape(-1, width).T
        b_V = fused.bias.reshape(heads, 3, d_head)[:, 2].reshape(-1)
        W_O, kv_heads = attention.dense.weight.T, heads
    elif kind == "phi3":
        kv_heads, d_head = config.num_key_value_heads, width // heads
        W_V = attention.qkv_proj.weight[-kv_heads * d_head :].T
        b_V, W_O = torch.zeros(W_V.shape[1]), attention.o_proj.weight.T
    else:
        W_V, W_O, kv_heads = attention.v_proj.weight.T, attention.o_proj.weight.T, config.num_key_value_heads
        b_V = torch.zeros(W_V.shape[1]) if attention.v_proj.bias is None else attention.v_proj.bias
    d_head = W_V.shape[1] // kv_heads
    cut = []
    for head in range(heads):
        group, own = head // (heads // kv_heads), slice(head * d_head, (head + 1) * d_head)
        shared = slice(group * d_head, (group + 1) * d_head)
        cut.append((W_V[:, shared], b_V[shared], W_O[own]))
    return cut


def lengths_by_hand(kind: str, model: PreTrainedModel, ids: tuple[int, ...]) -> Tensor:
    """||A[q, k] (x_k W_V + b_V) W_O|| for the last token, one token and head at a time, [layer head position]."""
    inputs = list[Tensor]()

    def keep(module: object, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        inputs.append((args[0] if args else kwargs["hidden_states"])[0])

    hooks = [attention.register_forward_pre_hook(keep, with_kwargs=True) for attention in attentions(model)]
    with torch.no_grad():
        maps = model(torch.tensor([ids]), use_cache=False, output_attentions=True).attentions
    for hook in hooks:
        hook.remove()
    lengths = torch.zeros(len(maps), maps[0].shape[1], len(ids))
    for layer, attention in enumerate(attentions(model)):
        for head, (W_V, b_V, W_O) in enumerate(value_and_output(kind, attention, model.config)):
            for k in range(len(ids)):
                vector = maps[layer][0, head, -1, k] * ((inputs[layer][k] @ W_V + b_V) @ W_O)
                lengths[layer, head, k] = vector.square().sum().sqrt()
    return lengths


@pytest.mark.parametrize("kind", KINDS)
def test_each_entry_is_the_length_of_what_a_head_writes_for_a_token(kind: str) -> None:
    model, rows = eager(uneven(KINDS[kind])), weighted(kind)
    for i, encoding in enumerate(encode(tiny_prompts(), tiny_tokenizer())):
        expected = lengths_by_hand(kind, model, encoding.ids)
        torch.testing.assert_close(rows.values[i, ..., : len(encoding.ids)], expected, **TOLERANCE)
        assert not rows.values[i, ..., len(encoding.ids) :].any()
    assert rows.values.max() > 0.1


def test_an_adapter_counts_as_its_merged_weights() -> None:
    adapted = tiny_lora(tiny_model("llama"), ["v_proj", "o_proj"])
    rows = read_value_weighted_attention(bridge_of(load_model(adapted, tokenizer=tiny_tokenizer())), tiny_prompts())
    merged: Any = tiny_lora(tiny_model("llama"), ["v_proj", "o_proj"]).merge_and_unload()
    encoding = encode(tiny_prompts(), tiny_tokenizer())[0]
    expected = lengths_by_hand("llama", eager(merged), encoding.ids)
    torch.testing.assert_close(rows.values[0, ..., : len(encoding.ids)], expected, **TOLERANCE)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2", "gemma", "gemma2"])
def test_lengths_scale_with_the_values_weights(kind: str) -> None:
    """In the first layer, whose input stays: W_V and b_V times -3 give three times the length, in other layers not."""
    model, expected = uneven(KINDS[kind]), weighted(kind).values
    with torch.no_grad():
        first = attentions(model)[0]
        if kind == "gpt2":
            first.c_attn.weight[:, 64:] *= -3
            first.c_attn.bias[64:] *= -3
        else:
            for parameter in first.v_proj.parameters():
                parameter *= -3
    scaled = bridge_of(load_model(model, tokenizer=tiny_tokenizer()))
    values = read_value_weighted_attention(scaled, tiny_prompts(), batch_size=4).values
    torch.testing.assert_close(values[:, 0], 3 * expected[:, 0], **TOLERANCE)


@pytest.mark.parametrize("kind", ["gpt2", "gemma2", "gpt_oss"])
def test_batch_size_and_order_change_no_entry(kind: str) -> None:
    order = random.Random(0).sample(range(9), 9)
    for size in (1, 2, 9):
        rows = read_value_weighted_attention(bridged(kind), [tiny_prompts()[i] for i in order], batch_size=size)
        torch.testing.assert_close(rows.values, weighted(kind).values[order], **TOLERANCE)


def test_weighted_rows_are_reduced_as_rows_are_and_their_readings_say_what_they_are() -> None:
    rows = weighted("llama")
    for reduce in ("max", "sum"):
        reading = rows.to("subject", reduce)
        assert (reading.name, reading.unit) == (f"value-weighted subject attention ({reduce})", "norm")
        for i, layer, head in itertools.product(range(9), range(2), range(4)):
            inside = [float(rows.values[i, layer, head, j]) for j in rows.spans["subject"][i].nonzero()[:, 0]]
            expected = max(inside) if reduce == "max" else sum(inside)
            assert float(reading.values[i, layer, head]) == pytest.approx(expected, rel=1e-5)
    names = [(part.name, part.unit) for part in (rows.share("rest"), rows.entropy())]
    assert names == [("value-weighted rest share", "norm"), ("value-weighted attention entropy", "nats")]
    plain = read_attention(hooked("llama"), tiny_prompts())
    assert (rows.tokens, rows.layers) == (plain.tokens, plain.layers)
    assert torch.equal(rows.spans["subject"], plain.spans["subject"])


def test_prompts_whose_values_a_model_cuts_are_refused() -> None:
    """OLMo's limit lies between the largest value that the bridge was checked on and the largest one of the prompts."""

    def olmo(clip: float | None) -> HookedModel:
        sizes = SIZES | {"intermediate_size": 48} | SPECIAL
        return hooked(transformers.OlmoConfig(**sizes, clip_qkv=clip))

    whole, batch = bridge_of(olmo(None)), pad(encode(tiny_prompts(), tiny_tokenizer()))
    checked = torch.randint(VOCABULARY, (1, 7), generator=torch.Generator().manual_seed(0))
    largest = [
        max(float(whole.run(ids, mask, {f"blocks.{i}.attn.hook_v": torch.abs})[1].popitem()[1].max()) for i in range(2))
        for ids, mask in ((checked, torch.ones_like(checked)), (batch.input_ids, batch.attention_mask))
    ]
    assert largest[0] < largest[1]
    with pytest.warns(UserWarning, match="cuts values"):
        between = bridge_of(olmo(sum(largest) / 2))
    with pytest.raises(ModelError, match=r"head outputs of layer \d made from its weights differ from its own"):
        read_value_weighted_attention(between, tiny_prompts())
    assert read_value_weighted_attention(whole, tiny_prompts()).values.any()


def test_what_is_no_bridge_and_no_prompts_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"read_value_weighted_attention: model must be BridgedModel"):
        read_value_weighted_attention(hooked("llama"), tiny_prompts())  # pyright: ignore[reportArgumentType]
    with pytest.raises(DataError, match="at least one prompt"):
        read_value_weighted_attention(bridged("llama"), ())
