"""Relevance against the paper's formulas and gradients in one layer, and against boosted attention in deep models."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import transformers
from one_layer import one_layer, word_prompts, word_tokenizer
from tiny import GROUPED, eager, tiny_model, tiny_prompts, tiny_tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.diffllama import modeling_diffllama

from attnbalance import Fact, HookedModel, Prompt, load_model, read_attention
from attnbalance.data.batches import pad
from attnbalance.data.prompts import make_prompts
from attnbalance.data.tokens import encode, encode_answers
from attnbalance.errors import DataError, ModelError
from attnbalance.models.forward import forward_rows
from attnbalance.models.interventions import boost_attention, edited
from attnbalance.readings.relevance import read_relevance

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


def slopes_behind(model: HookedModel, prompt: Prompt, skipped: int) -> Tensor:
    """The push by differences, of the answer's token number `skipped` (from 0), those before it behind the prompt.

    For each layer and head: the slope of that token's log-probability where a number is added to the scores of the
    subject's tokens.
    """
    (encoding,) = encode([prompt], model.tokenizer)
    whole = model.tokenizer(f"{prompt.text} {prompt.fact.answer}")["input_ids"]
    at = len(encoding.ids) + skipped
    batch = pad([replace(encoding, ids=tuple(whole[:at]), tokens=("",) * at)])
    found = torch.zeros(2, 4, dtype=torch.float64)
    for layer in range(2):
        for head in range(4):
            steps = []
            for k in (-2, -1, 1, 2):
                with torch.no_grad(), edited(model, boost_attention(math.exp(k * STEP), heads={layer: [head]})(batch)):
                    logits = forward_rows(model.model, batch, model.kernel)[1]
                steps.append(float(logits[0, -1].log_softmax(-1)[whole[at]]))
            found[layer, head] = (steps[0] - 8 * steps[1] + 8 * steps[2] - steps[3]) / (12 * STEP)
    return found


def bare(model: HookedModel, prompt: Prompt) -> int:
    """How many of the answer's first tokens are nothing but a space."""
    tokens = encode_answers(encode([prompt], model.tokenizer), model.tokenizer)[0]
    return next(i for i, token in enumerate(tokens) if str(model.tokenizer.decode([token])).strip())


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
    expected = torch.stack([slopes_behind(hooked, prompt, bare(hooked, prompt)) for prompt in prompts])
    # Log p of some -10 nats is off by its seventh digit, 1e-6, which a STEP of 0.05 makes 2e-5 of a slope; differences
    # of fourth order are off by STEP^4, 6e-6 of a slope that is not far from linear. Slopes reach 0.1 to 1.
    scale = float(expected.abs().max())
    assert scale > 0.1
    torch.testing.assert_close(push, expected, atol=1e-3 * scale, rtol=0)


def spaced(answers: Sequence[str], relation: str = "year") -> list[Prompt]:
    """The same question for facts of one subject each that a SentencePiece tokenizer begins with a bare "▁"."""
    facts = [
        Fact("Ada Lovelace", relation, (answer,), None, "What is Ada Lovelace's occupation?") for answer in answers
    ]
    return list(make_prompts(facts))


@pytest.mark.parametrize(
    ("answers", "skipped"),
    [
        (("1900", "2019", "314"), (1, 1, 1)),  # "▁" is all that they share
        (("1900", "china"), (1, 0)),  # "▁" and "▁c": shared by none, but the bare one still tells nothing
        (("1900", "1984", "1977"), (3, 3, 3)),  # "▁", "1" and "9"
        (("1900",), (1,)),  # no other answer to be told from
    ],
)
def test_relevance_is_read_at_the_first_token_that_tells_answers_apart(
    answers: Sequence[str], skipped: Sequence[int]
) -> None:
    hooked = load_model(tiny_model("llama"), tokenizer=tiny_tokenizer("metaspace"))
    prompts = spaced(answers)
    push = read_relevance(hooked, prompts).push.values.double()
    expected = torch.stack([slopes_behind(hooked, *pair) for pair in zip(prompts, skipped, strict=True)])
    scale = float(expected.abs().max())
    assert scale > 0.05
    torch.testing.assert_close(push, expected, atol=1e-3 * scale, rtol=0)  # as above
    for one, other in pairwise(push):
        assert (one - other).abs().max() > 0.01 * scale


def test_answers_of_further_prompts_decide_which_token_tells_apart_and_their_relevance_is_not_read() -> None:
    hooked = load_model(tiny_model("llama"), tokenizer=tiny_tokenizer("metaspace"))
    prompts = spaced(("1900", "1984", "2019"))
    found = read_relevance(hooked, prompts[:1], among=prompts[1:2]).push  # "▁", "1" and "9" are shared
    wider = read_relevance(hooked, prompts[:1], among=prompts[1:]).push  # "▁" alone is
    for push, skipped in ((found, 3), (wider, 1)):
        expected = slopes_behind(hooked, prompts[0], skipped)[None]
        assert push.prompt_ids == (prompts[0].prompt_id,)
        scale = float(expected.abs().max())
        torch.testing.assert_close(push.values.double(), expected, atol=1e-3 * scale, rtol=0)  # as above
    assert not torch.allclose(found.values, wider.values, atol=0.01 * scale)


def test_relevance_among_others_does_not_depend_on_what_is_read_with_it() -> None:
    hooked = load_model(tiny_model("llama"), tokenizer=tiny_tokenizer("metaspace"))
    prompts = spaced(("1900", "1984", "1977", "2019", "314"))
    together = read_relevance(hooked, [*prompts[:2], prompts[3]], among=prompts[2:3]).push.values.double()
    skipped = (3, 3, 1)  # the token after "▁19"; "2" is told from "1" after the bare "▁"
    expected = torch.stack(
        [slopes_behind(hooked, prompts[i], count) for i, count in zip((0, 1, 3), skipped, strict=True)]
    )
    scale = float(expected.abs().max())
    torch.testing.assert_close(together, expected, atol=1e-3 * scale, rtol=0)  # as above
    wider = read_relevance(hooked, prompts[:2], among=[*prompts[:2], *prompts[2:]]).push.values.double()
    assert (wider - together[:2]).abs().max() > 0.01 * scale  # what it is compared with does matter


def naive(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, rivals: Sequence[str]) -> Tensor:
    """The three readings by layer and head, from the gradient that plain eager attention gives its probabilities."""
    asked = tokenizer(prompt.text, return_offsets_mapping=True)
    wholes = [tokenizer(f"{prompt.text} {answer}")["input_ids"] for answer in (prompt.fact.answer, *rivals)]
    at = len(asked["input_ids"])
    assert all(whole[:at] == asked["input_ids"] for whole in wholes)
    if rivals:
        at += next(
            i for i, tokens in enumerate(zip(*(whole[at:] for whole in wholes), strict=False)) if len(set(tokens)) > 1
        )
    while not tokenizer.decode([wholes[0][at]]).strip():
        at += 1
    output = model(input_ids=torch.tensor([wholes[0][:at]]), output_attentions=True, use_cache=False)
    slopes = torch.autograd.grad(output.logits[0, -1].log_softmax(-1)[wholes[0][at]], output.attentions)
    rows, slopes = (torch.stack([matrix[0, :, -1] for matrix in matrices]) for matrices in (output.attentions, slopes))
    first, last = prompt.spans["subject"]
    inside = torch.zeros(at, dtype=torch.bool)
    inside[[i for i, (start, end) in enumerate(asked["offset_mapping"]) if start < last and end > first]] = True
    subject, others = ((rows * slopes)[..., part].sum(-1) / rows[..., part].sum(-1) for part in (inside, ~inside))
    attention = rows[..., inside].sum(-1, keepdim=True)
    push = (slopes * rows * (inside.float() - attention)).sum(-1)  # the slope of a softmax, token by token
    return torch.stack([subject, others, push]).detach()


@pytest.mark.parametrize(("family", "kind"), [("llama", "metaspace"), ("gpt2", "plain"), ("gpt2", "bos")])
def test_relevance_among_others_in_padded_batches_is_the_gradient_of_plain_eager_attention(
    family: str, kind: str
) -> None:
    model, tokenizer = tiny_model(family), tiny_tokenizer(kind)
    years = spaced(("1900", "1984", "2019", "1977"))
    prompts = [tiny_prompts()[7], years[0], *tiny_prompts()[1:3], years[1], tiny_prompts()[8]]
    found = read_relevance(load_model(model, tokenizer=tokenizer), prompts, among=years[2:], batch_size=4)
    assert len({len(encoding.ids) for encoding in encode(prompts, tokenizer)}) > 3
    alone = read_relevance(load_model(model, tokenizer=tokenizer), prompts)
    assert not torch.allclose(found.push.values[1], alone.push.values[1], rtol=0.1)  # another token tells it apart
    for i, prompt in enumerate(prompts):
        rivals = [year.fact.answer for year in years[2:] if year.fact.relation == prompt.fact.relation]
        expected = naive(eager(model), tokenizer, prompt, rivals)
        for name, values in zip(READINGS, expected, strict=True):
            # float32 through two layers, padded or not, with either kernel: some 1e-6 of the largest
            scale = float(values.abs().max())
            torch.testing.assert_close(getattr(found, name).values[i], values, atol=2e-5 * scale, rtol=0)


@pytest.mark.parametrize(
    ("years", "alike"),
    [(("1999", "1815", "1742", "2001"), 3), (("1999", "1815", "1742", "1001"), 0), (("1999", "1999", "2001", "3"), 0)],
)
def test_answers_that_share_the_token_that_is_read_are_counted(years: tuple[str, ...], alike: int) -> None:
    tokenizer, prompts = tiny_tokenizer("metaspace"), spaced(years)
    model = load_model(tiny_model("llama"), tokenizer=tokenizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        push = read_relevance(model, prompts).push.values
        read_relevance(model, prompts[:1], among=prompts[1:])
    told = [str(warning.message) for warning in caught if "relevance is read at one token" in str(warning.message)]
    assert [text.partition(":")[2].split()[:3] for text in told] == (
        [["3", "of", "4"], ["1", "of", "1"]] if alike else []
    )
    assert push.isfinite().all()


@pytest.mark.parametrize(("among", "alike"), [(("2001", "314"), 0), (("2001", "1777"), 2), (("2001", "1999"), 1)])
def test_tokens_shared_with_answers_that_are_read_too_are_not_counted_among_others(
    among: tuple[str, ...], alike: int
) -> None:
    tokenizer, prompts = tiny_tokenizer("metaspace"), spaced(("1999", "1815", *among))
    model = load_model(tiny_model("llama"), tokenizer=tokenizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read_relevance(model, prompts[:2], among=prompts[2:])
    told = [str(warning.message) for warning in caught if "relevance is read at one token" in str(warning.message)]
    assert [text.partition(":")[2].split()[:3] for text in told] == ([[str(alike), "of", "2"]] if alike else [])


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


def test_no_prompts_and_numbers_that_are_not_finite_are_refused() -> None:
    model = load_model(tiny_model("llama"), tokenizer=tiny_tokenizer())
    with pytest.raises(DataError, match="at least one prompt"):
        read_relevance(model, [])
    with torch.inference_mode(), pytest.raises(ModelError, match="outside torch.inference_mode"):
        read_relevance(model, tiny_prompts())
    with torch.no_grad():
        model.model.get_parameter("lm_head.weight")[3, 0] = math.nan
    with pytest.raises(ModelError, match="NaN or infinite"):
        read_relevance(model, tiny_prompts())


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


@pytest.mark.filterwarnings("ignore:.*is outside")
def test_a_model_whose_rows_cannot_be_edited_is_named() -> None:
    hooked = load_model(tiny_model("bloom"), tokenizer=tiny_tokenizer())
    with pytest.raises(ModelError, match="its rows can be read, not edited"):
        read_relevance(hooked, tiny_prompts())


def test_a_layer_that_calls_its_attention_twice_has_the_slope_of_both_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.DiffLlamaConfig(**GROUPED, pad_token_id=None)  # pyright: ignore[reportArgumentType]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    oracle, prompts, tokenizer = eager(model), tiny_prompts()[:3], tiny_tokenizer()
    found = read_relevance(load_model(model, tokenizer=tokenizer), prompts)
    added: dict[int, Tensor] = {}

    def attention(module, query, key, value, attention_mask, scaling, **_):  # eager attention, with room for a change
        repeat = module.num_key_value_groups
        keys, values = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        weights = (query @ keys.transpose(2, 3) * scaling + attention_mask).softmax(-1)
        change = added.setdefault(module.layer_idx, torch.zeros_like(weights[:, :, -1], requires_grad=True))
        weights = torch.cat([weights[:, :, :-1], (weights[:, :, -1] + change)[:, :, None]], 2)
        return (weights @ values).transpose(1, 2), weights

    monkeypatch.setattr(modeling_diffllama, "eager_attention_forward", attention)
    encodings = encode(prompts, tokenizer)
    for i, (encoding, answer) in enumerate(zip(encodings, encode_answers(encodings, tokenizer), strict=True)):
        added.clear()
        output = oracle(input_ids=torch.tensor([encoding.ids]), output_attentions=True, use_cache=False)
        output.logits[0, -1].log_softmax(-1)[answer[0]].backward()
        inside = list(encoding.spans["subject"])
        for layer in (0, 1):
            slope, row = added[layer].grad[0], output.attentions[layer][0, :, -1].detach()  # pyright: ignore[reportOptionalSubscript]
            expected = (row * slope)[:, inside].sum(-1) / row[:, inside].sum(-1)
            # float32 through two layers of this size: 1e-6 of the largest; half the slope is missing with one call
            torch.testing.assert_close(found.subject.values[i, layer], expected, atol=1e-5, rtol=1e-4)


def test_layers_that_repeat_a_number_are_refused_by_name_and_still_read() -> None:
    model = tiny_model("llama")
    model.model.layers[1].self_attn.layer_idx = 0
    hooked = load_model(model, tokenizer=tiny_tokenizer())
    assert read_attention(hooked, tiny_prompts()).layers == (0, 1)
    with pytest.raises(ModelError, match="LlamaForCausalLM runs several attentions under one layer number"):
        read_relevance(hooked, tiny_prompts())
