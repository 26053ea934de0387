"""Relevance against the paper's formulas and gradients in one layer, and against boosted attention in deep models."""

from __future__ import annotations

import math
import random

import pytest
import torch
from one_layer import one_layer, word_prompts, word_tokenizer
from tiny import tiny_model, tiny_prompts, tiny_tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from attnbalance import HookedModel, Prompt, load_model
from attnbalance.errors import ModelError
from attnbalance.models.edits import boost, edited
from attnbalance.models.forward import forward_rows
from attnbalance.readings.relevance import read_relevance
from attnbalance.tokens import encode, encode_answers, pad

# The model computes in float32, which is off by 6e-8 of each number: sums of some 20 numbers near 1 are off by some
# 1e-7, and never by ten times as much.
TOLERANCE = 1e-6
DEEP = ("llama", "gpt2", "gemma2", "gpt_oss")
STEP = 0.05
READINGS = ("subject", "others", "push")


def attention_only() -> LlamaForCausalLM:
    model = one_layer()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.zero_()
    return model


def hand_made(model: LlamaForCausalLM, prompt: Prompt) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """s_rel, p_rel, and the gradient of log p(a) with respect to W_KQ, in float64; the numbers of s and p."""
    attention = model.model.layers[0].self_attn
    W_Q, W_K, W_V = (getattr(attention, f"{name}_proj").weight.detach().double() for name in "qkv")
    s, p, a = word_tokenizer()(f"{prompt.text} {prompt.fact.answer}")["input_ids"]
    phi = torch.eye(len(W_V), dtype=torch.float64)
    X = torch.stack([phi[s], phi[p]], dim=1)
    W_KQ = (W_K.T @ W_Q / math.sqrt(len(W_V))).requires_grad_()
    logits = W_V @ X @ torch.softmax(X.T @ W_KQ @ phi[p], dim=0) + phi[p]  # the last: the residual stream
    (slope,) = torch.autograd.grad(logits.log_softmax(-1)[a], W_KQ)
    surprise = phi[a] - logits.detach().softmax(-1)
    return surprise @ W_V @ phi[s], surprise @ W_V @ phi[p], slope, s, p


def log_p(model: HookedModel, prompt: Prompt, head: tuple[int, int], change: float) -> float:
    """Log p(answer's first token) with `change` added to the scores of the subject's tokens in one head."""
    (encoding,) = encode([prompt], model.tokenizer)
    batch, answer = pad([encoding]), encode_answers([encoding], model.tokenizer)[0][0]
    with torch.no_grad(), edited(model, boost(math.exp(change), heads={head[0]: [head[1]]})(batch)):
        return float(forward_rows(model.model, batch, model.kernel)[1][0, -1].log_softmax(-1)[answer])


def test_in_one_layer_relevance_equals_definitions_4_3_and_4_4() -> None:
    model = attention_only()
    found = read_relevance(load_model(model, tokenizer=word_tokenizer()), word_prompts())
    for i, prompt in enumerate(word_prompts()):
        s_rel, p_rel, *_ = hand_made(model, prompt)
        assert abs(s_rel - p_rel) > 1e-3  # else the two could be exchanged
        assert float(found.subject.values[i]) == pytest.approx(float(s_rel), abs=TOLERANCE)
        assert float(found.others.values[i]) == pytest.approx(float(p_rel), abs=TOLERANCE)


def test_in_one_layer_the_gradient_of_key_and_query_is_the_push_times_the_papers_outer_product() -> None:
    model = attention_only()
    hooked = load_model(model, tokenizer=word_tokenizer())
    push = read_relevance(hooked, word_prompts()).push.values.flatten()
    W_Q, W_K = (getattr(model.model.layers[0].self_attn, f"{name}_proj").weight for name in "qk")
    signs = set()
    for i, prompt in enumerate(word_prompts()):
        s_rel, p_rel, slope, s, p = hand_made(model, prompt)
        outer = torch.zeros_like(slope)
        outer[s, p], outer[p, p] = 1, -1  # phi(s) phi(p)^T - phi(p) phi(p)^T
        torch.testing.assert_close(push[i].double() * outer, slope, atol=TOLERANCE, rtol=0)
        assert torch.sign(push[i]) == torch.sign(s_rel - p_rel)  # Theorem 4.5
        signs.add(float(torch.sign(push[i])))
        ids = torch.tensor([word_tokenizer()(f"{prompt.text} {prompt.fact.answer}")["input_ids"]])
        chosen = model(ids[:, :2]).logits[0, -1].log_softmax(-1)[ids[0, 2]]
        by_query, by_key = torch.autograd.grad(chosen, (W_Q, W_K))
        shared = push[i] * outer.float() / math.sqrt(len(W_Q))
        torch.testing.assert_close(by_query, W_K.detach() @ shared, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(by_key, W_Q.detach() @ shared.T, atol=TOLERANCE, rtol=0)
    assert signs == {-1.0, 1.0}


@pytest.mark.parametrize("family", DEEP)
def test_push_is_the_slope_of_the_answer_when_one_head_looks_more_at_the_subject(family: str) -> None:
    hooked = load_model(tiny_model(family), tokenizer=tiny_tokenizer())
    prompts = (tiny_prompts()[7], *tiny_prompts()[4:6])  # the first early in its text, outside of sliding windows
    push = read_relevance(hooked, prompts).push.values.double()
    expected = torch.zeros_like(push)
    for i, prompt in enumerate(prompts):
        for layer in range(2):
            for head in range(4):
                steps = [log_p(hooked, prompt, (layer, head), k * STEP) for k in (-2, -1, 1, 2)]
                expected[i, layer, head] = (steps[0] - 8 * steps[1] + 8 * steps[2] - steps[3]) / (12 * STEP)
    # Log p of some -10 nats is off by its seventh digit, 1e-6, which a STEP of 0.05 makes 2e-5 of a slope; differences
    # of fourth order are off by STEP^4, 6e-6 of a slope that is not far from linear. Slopes reach 0.1 to 1.
    scale = float(expected.abs().max())
    assert scale > 0.1
    torch.testing.assert_close(push, expected, atol=1e-3 * scale, rtol=0)


@pytest.mark.parametrize("family", DEEP)
def test_batch_size_and_order_change_no_relevance(family: str) -> None:
    hooked, prompts = load_model(tiny_model(family), tokenizer=tiny_tokenizer()), tiny_prompts()
    names = [prompt.prompt_id for prompt in prompts]
    expected = read_relevance(hooked, prompts, batch_size=1)
    for batch_size in (2, 9):
        shuffled = random.Random(batch_size).sample(prompts, len(prompts))
        found = read_relevance(hooked, shuffled, batch_size=batch_size)
        for name in READINGS:
            one, other = getattr(found, name), getattr(expected, name)
            assert one.prompt_ids == tuple(prompt.prompt_id for prompt in shuffled)
            assert other.prompt_ids == tuple(names)
            scale = float(other.values.abs().max())  # float32 kernels differ by some 1e-6 of it from batch to batch
            torch.testing.assert_close(one.at(names).values, other.values, atol=1e-5 * scale, rtol=0)


def test_reading_relevance_leaves_parameters_gradients_and_mode_as_they_were() -> None:
    model = tiny_model("llama").train()
    hooked = load_model(model, tokenizer=tiny_tokenizer())
    model.model.layers[0].mlp.requires_grad_(False)
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    before = read_relevance(hooked, tiny_prompts())
    with torch.no_grad():
        again = read_relevance(hooked, tiny_prompts())
    assert model.training
    assert set(flags.values()) == {True, False}
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == flags[name]
        assert torch.equal(parameter, weights[name])
        assert (parameter.grad is None) == (name != "lm_head.weight")
    assert torch.equal(model.lm_head.weight.grad, torch.ones_like(model.lm_head.weight))
    for name in READINGS:
        assert torch.equal(getattr(before, name).values, getattr(again, name).values)


def test_flags_are_put_back_after_an_error_too() -> None:
    model = tiny_model("llama")
    hooked = load_model(model, tokenizer=tiny_tokenizer())
    stop = model.model.layers[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        read_relevance(hooked, tiny_prompts())
    stop.remove()
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore:.*stands outside")
def test_a_model_whose_rows_cannot_be_edited_is_named() -> None:
    hooked = load_model(tiny_model("bloom"), tokenizer=tiny_tokenizer())
    with pytest.raises(ModelError, match="its rows can be read, not edited"):
        read_relevance(hooked, tiny_prompts())
