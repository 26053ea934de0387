"""Attention rows against transformers' own eager attention maps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import FAMILIES, INTERFACE, SINKS, WINDOW, eager, tiny_model, tiny_prompts, tiny_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from attnbalance import load_facts, load_model, read_attention
from attnbalance.data.batches import pad
from attnbalance.data.prompts import make_prompts
from attnbalance.data.tokens import encode
from attnbalance.models.rows import IMPLEMENTATION, query_row, register

# Float32 sums of some 100 products differ by order of summation: 1e-6 between kernels. A wrong mask, scale, softcap or
# position shows as 1e-2 and more in these models, whose attention is far from uniform. The issue asks for 1e-5.
TOLERANCE = 1e-5
FAMILY_WARNING = pytest.mark.filterwarnings("ignore:.*is outside")


def eager_row(model: PreTrainedModel, ids: tuple[int, ...]) -> torch.Tensor:
    """The last row [layer, head, position] of eager maps of one prompt alone: no padding, mask or position ids."""
    with torch.no_grad():
        maps = model(input_ids=torch.tensor([ids]), output_attentions=True, use_cache=False).attentions
    return torch.stack([one[0, :, -1] for one in maps])


@FAMILY_WARNING
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_equal_eager_attention_on_one_prompt_at_a_time(family: str) -> None:
    model, tokenizer = tiny_model(family), tiny_tokenizer()
    oracle = eager(model)
    found = read_attention(load_model(model, tokenizer=tokenizer), tiny_prompts(), batch_size=4)
    for values, one in zip(found.values, encode(tiny_prompts(), tokenizer), strict=True):
        expected = eager_row(oracle, one.ids)
        torch.testing.assert_close(values[..., : len(one.ids)], expected, atol=TOLERANCE, rtol=0)
        assert not values[..., len(one.ids) :].any()


@FAMILY_WARNING
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_sum_to_one_except_for_what_sinks_take(family: str) -> None:
    found = read_attention(load_model(tiny_model(family), tokenizer=tiny_tokenizer()), tiny_prompts())
    total = found.values.sum(-1)
    assert found.values.min() >= 0
    if family in SINKS:
        assert total.max() <= 1 + TOLERANCE
        assert total.min() < 0.99
    else:
        torch.testing.assert_close(total, torch.ones_like(total), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("family", "layer"), [("mistral", 0), ("mistral", 1), ("gemma2", 0), ("gpt_oss", 0)])
def test_rows_are_zero_before_the_sliding_window(family: str, layer: int) -> None:
    found = read_attention(load_model(tiny_model(family), tokenizer=tiny_tokenizer()), tiny_prompts())
    for values, tokens in zip(found.values, found.tokens, strict=True):
        inside = slice(len(tokens) - WINDOW, len(tokens))
        assert not values[layer, :, : inside.start].any()
        assert (values[layer, :, inside] > 0).all()


@pytest.mark.parametrize("family", [*INTERFACE, *SINKS])
def test_gradients_of_a_row_equal_those_of_eager_attention(family: str) -> None:
    model, tokenizer = tiny_model(family), tiny_tokenizer()
    oracle = eager(model)
    hooked = load_model(model, tokenizer=tokenizer)
    one = encode(tiny_prompts()[:1], tokenizer)
    subject = list(one[0].spans["subject"])
    hooked.rows(pad(one))[..., subject].pow(2).sum().backward()
    maps = oracle(input_ids=torch.tensor([one[0].ids]), output_attentions=True, use_cache=False).attentions
    torch.stack([each[0, :, -1] for each in maps])[..., subject].pow(2).sum().backward()
    compared = 0
    for (name, parameter), (_, expected) in zip(model.named_parameters(), oracle.named_parameters(), strict=True):
        if expected.grad is None or parameter.grad is None:
            assert not any(p.grad is not None and p.grad.any() for p in (parameter, expected)), name
            continue
        # Float32 keeps seven digits, and sums over tokens and layers in another order lose one (3e-6 on some CPUs, for
        # the embeddings of qwen2); a wrong factor moves the largest entry by 1e-2 and more.
        scale = max(1.0, float(expected.grad.abs().max()))
        torch.testing.assert_close(parameter.grad, expected.grad, atol=1e-5 * scale, rtol=1e-5)
        compared += bool(expected.grad.any())
    assert compared >= 5


def test_the_hooked_model_gives_the_logits_of_the_plain_one() -> None:
    for family in INTERFACE:
        model = tiny_model(family)
        oracle = eager(model)
        ids = torch.tensor([encode(tiny_prompts()[:1], tiny_tokenizer())[0].ids])
        load_model(model, tokenizer=tiny_tokenizer())
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, oracle(ids).logits, atol=1e-4, rtol=1e-5)


def test_a_trained_models_rows_equal_eager_attention_on_popqa(stories: Path, popqa: Path) -> None:
    prompts = make_prompts(load_facts(f"popqa:{popqa}", limit=40))
    hooked = load_model(stories)
    oracle = eager(AutoModelForCausalLM.from_pretrained(stories))
    found = read_attention(hooked, prompts, batch_size=16)
    for values, one in zip(found.values, encode(prompts, hooked.tokenizer), strict=True):
        expected = eager_row(oracle, one.ids)
        torch.testing.assert_close(values[..., : len(one.ids)], expected, atol=TOLERANCE, rtol=0)


def test_bfloat16_rows_are_near_those_of_float32() -> None:
    # bfloat16 keeps 8 bits: probabilities of this size are off by up to 0.05, and by far more if a mask were wrong
    prompts, tokenizer = make_prompts([p.fact for p in tiny_prompts()[:3]], "plain"), tiny_tokenizer()
    for family in ("llama", "gemma2"):
        exact = read_attention(load_model(tiny_model(family), tokenizer=tokenizer), prompts)
        rough = read_attention(load_model(tiny_model(family), tokenizer=tokenizer, dtype="bfloat16"), prompts)
        assert rough.values.dtype == torch.float32
        assert (rough.values - exact.values).abs().max() < 0.1
        assert (rough.values - exact.values).abs().mean() < 0.01


def test_the_attention_function_compiles_as_one_graph() -> None:
    register()
    model = tiny_model("llama")
    model.set_attn_implementation(IMPLEMENTATION)
    ids, index = torch.arange(2, 14).view(2, 6), torch.tensor([5, 3])

    def rows(input_ids: torch.Tensor, query_index: torch.Tensor) -> torch.Tensor:
        output = model(input_ids=input_ids, query_index=query_index, output_attentions=True, use_cache=False)
        return torch.stack(output.attentions, dim=1)

    with torch.no_grad():
        expected = rows(ids, index)  # run first: transformers puts its collectors in place under a lock, once
        torch.testing.assert_close(torch.compile(rows, backend="eager", fullgraph=True)(ids, index), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_rows_of_16_bit_queries_and_keys_have_float32_scores(dtype: torch.dtype, autocast: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(3, heads, 40, 32, generator=generator).mul(2).to(dtype) for heads in (4, 2))
    index = torch.tensor([39, 12, 0])
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        found = query_row(torch.nn.Module(), query, key, None, index, scaling=32**-0.5)
    for i, last in enumerate(index.tolist()):
        keys = key[i].double().repeat_interleave(2, 0)[:, : last + 1]
        expected = torch.einsum("hd,hkd->hk", query[i, :, last].double(), keys).mul(32**-0.5).softmax(-1)
        # float32 sums of 32 products near 10: 1e-6 in a score; scores in 16 bits are off by up to 0.02
        torch.testing.assert_close(found[i, :, : last + 1].double(), expected, atol=1e-5, rtol=0)
        assert not found[i, :, last + 1 :].any()


def test_the_trainers_count_of_labels_passes_through_attention() -> None:
    model, ids = tiny_model("llama"), torch.arange(2, 14).view(2, 6)
    load_model(model, tokenizer=tiny_tokenizer())
    plain = model(input_ids=ids, labels=ids).logits
    assert torch.equal(model(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(10)).logits, plain)
