"""Salience against the paper's definition in a one-layer model, and against loops over transformers' own weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from one_layer import one_layer, word_prompts, word_tokenizer
from tiny import FACTS, tiny_model, tiny_tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from attnbalance import load_model
from attnbalance.errors import DataError, ModelError
from attnbalance.models.bridge import BridgedModel, bridge_of
from attnbalance.prompts import make_prompts
from attnbalance.readings.contrast import Contrasts, make_contrasts
from attnbalance.readings.salience import read_mlp_salience, read_stored_answers, read_value_salience, top_neurons

# Float32 keeps seven digits and sums of some 100 products lose one: relative to the largest entry. A wrong slice, norm
# or gain shows as 1e-1 and more in these models.
TOLERANCE = 1e-5
EXACT = 1e-6  # one product each, and a mean: nothing but the last digit of numbers near 1 is lost
DENSE = ("llama", "gpt2", "gemma2")


def near(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    assert found.shape == expected.shape
    scale = float(expected.abs().max())
    assert scale > 0
    torch.testing.assert_close(found, expected, atol=tolerance * scale, rtol=0)


def planted() -> tuple[PreTrainedModel, Contrasts]:
    return one_layer(), make_contrasts(word_prompts(), word_tokenizer())


def opened(model: PreTrainedModel, contrasts: Contrasts) -> BridgedModel:
    tokenizer = word_tokenizer() if len(contrasts.encodings[0].ids) == 2 else tiny_tokenizer()
    return bridge_of(load_model(model, tokenizer=tokenizer))


def random_model(family: str) -> PreTrainedModel:
    """A tiny model whose gains and biases are no longer all ones and zeros."""
    model, noise = tiny_model(family), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=noise)
    return model


def contrasts_of() -> Contrasts:
    """The questions of tests/tiny.py as two relations of 5 and 4 answers, several tokens to a subject."""
    facts = [replace(fact, relation=("odd", "even")[i % 2]) for i, fact in enumerate(FACTS)]
    return make_contrasts(make_prompts(facts), tiny_tokenizer())


def layers_of(model: PreTrainedModel) -> list:
    return list(model.transformer.h if "GPT2" in type(model).__name__ else model.model.layers)


def direction(model: PreTrainedModel, contrasts: Contrasts) -> Tensor:
    """Answer minus mean of the others, in front of the final norm at scale 1."""
    rows = []
    for prompt, answer, others in zip(contrasts.prompts, contrasts.answer, contrasts.others, strict=True):
        U = model.lm_head.weight[list(contrasts.candidates[prompt.fact.relation])]
        rows.append(U[answer] - sum(U[k] for k in others) / len(others))
    found = torch.stack(rows)
    if "GPT2" in type(model).__name__:
        found = found * model.transformer.ln_f.weight
        return found - found.mean(-1, keepdim=True)
    return found * (model.model.norm.weight + ("Gemma" in type(model).__name__))


def value_output(layer: torch.nn.Module, head: int) -> tuple[Tensor, Tensor]:
    """W_V [value, d_model] and W_O [d_model, value] of one of 4 heads of size 8; the others have 2 heads of values."""
    if hasattr(layer, "attn"):
        here = slice(64 + 8 * head, 72 + 8 * head)
        return layer.attn.c_attn.weight[:, here].T, layer.attn.c_proj.weight[8 * head : 8 * head + 8].T
    group, attention = head // 2, layer.self_attn
    W_O = attention.o_proj.weight[:, 8 * head : 8 * head + 8]
    if hasattr(layer, "pre_feedforward_layernorm"):
        W_O = (1 + layer.post_attention_layernorm.weight)[:, None] * W_O
    return attention.v_proj.weight[8 * group : 8 * group + 8], W_O


def mlp_of(layer: torch.nn.Module, x: Tensor) -> Tensor:
    if hasattr(layer, "ln_2"):
        return layer.mlp(layer.ln_2(x))
    if hasattr(layer, "pre_feedforward_layernorm"):
        return layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(x)))
    found = layer.mlp(layer.post_attention_layernorm(x)[None])
    return (found[0] if isinstance(found, tuple) else found)[0]


def subjects(model: PreTrainedModel, contrasts: Contrasts, at: str) -> Tensor:
    ids = torch.tensor([one.ids[one.spans["subject"][-1]] for one in contrasts.encodings])
    x = model.get_input_embeddings()(ids)
    return x + mlp_of(layers_of(model)[0], x) if at == "extended" else x


def in_context(
    model: PreTrainedModel, contrasts: Contrasts, part: Callable[[torch.nn.Module], torch.nn.Module], inputs: bool
) -> Tensor:
    """What goes into or comes out of a part of each layer at the subject's last token, one prompt at a time."""
    seen: list[Tensor] = []

    def keep(_: object, args: tuple[Tensor, ...], output: Tensor) -> None:
        found = args[0] if inputs else output[0] if isinstance(output, tuple) else output
        seen.append(found.reshape(-1, found.shape[-1])[place])

    hooks = [part(layer).register_forward_hook(keep) for layer in layers_of(model)]
    for one in contrasts.encodings:
        place = one.spans["subject"][-1]
        model(input_ids=torch.tensor([one.ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(seen).view(len(contrasts), len(hooks), -1)


@torch.no_grad()
def test_in_one_layer_value_salience_is_the_papers_definition_set_against_the_other_answers() -> None:
    model, contrasts = planted()
    found = read_value_salience(opened(model, contrasts), contrasts, at="embedding")
    W_V, phi = model.model.layers[0].self_attn.v_proj.weight, torch.eye(model.config.vocab_size)
    expected = []
    for one, answer, others in zip(contrasts.encodings, contrasts.answer, contrasts.others, strict=True):
        tokens = contrasts.candidates[one.prompt.fact.relation]
        S = [phi[a] @ W_V @ phi[one.ids[0]] for a in tokens]
        expected.append(S[answer] - sum(S[k] for k in others) / len(others))
    near(found.values[:, 0, 0], torch.stack(expected), EXACT)
    assert found.prompt_ids == tuple(prompt.prompt_id for prompt in contrasts.prompts)


@torch.no_grad()
def test_in_one_layer_mlp_salience_is_the_sum_over_neurons_of_activation_times_value() -> None:
    model, contrasts = planted()
    found = read_mlp_salience(opened(model, contrasts), contrasts, at="embedding")
    mlp, expected = model.model.layers[0].mlp, []
    for one, answer, others in zip(contrasts.encodings, contrasts.answer, contrasts.others, strict=True):
        tokens, total, s = contrasts.candidates[one.prompt.fact.relation], 0.0, one.ids[0]
        for n in range(12):
            gate = mlp.gate_proj.weight[n, s]
            value = mlp.down_proj.weight[:, n]
            readout = value[tokens[answer]] - sum(value[tokens[k]] for k in others) / len(others)
            total += float(gate * torch.sigmoid(gate) * mlp.up_proj.weight[n, s] * readout)
        expected.append(total)
    near(found.values[:, 0, 0], torch.tensor(expected), EXACT)


@pytest.mark.parametrize("at", ["embedding", "extended"])
@pytest.mark.parametrize("family", [*DENSE, "gpt_oss"])
@torch.no_grad()
def test_salience_without_context_equals_a_loop_over_the_models_own_weights(family: str, at: str) -> None:
    model, contrasts = random_model(family), contrasts_of()
    x, readout = subjects(model, contrasts, at), direction(model, contrasts)
    expected = torch.zeros(len(contrasts), 2, 4)
    for i, layer in enumerate(layers_of(model)):
        normed = (layer.ln_1 if family == "gpt2" else layer.input_layernorm)(x)
        for head in range(4):
            W_V, W_O = value_output(layer, head)
            for p in range(len(contrasts)):
                expected[p, i, head] = readout[p] @ (W_O @ (W_V @ normed[p]))
    bridged = opened(model, contrasts)
    near(read_value_salience(bridged, contrasts, at=at).values, expected)
    written = torch.stack([mlp_of(layer, x) for layer in layers_of(model)], dim=1)
    near(read_mlp_salience(bridged, contrasts, at=at).values[..., 0], (written * readout[:, None]).sum(-1))


@pytest.mark.parametrize("family", [*DENSE, "gpt_oss"])
@torch.no_grad()
def test_mlp_salience_in_context_is_what_the_mlp_writes_at_the_subjects_last_token(family: str) -> None:
    model, contrasts = random_model(family), contrasts_of()
    last = "post_feedforward_layernorm" if family == "gemma2" else "mlp"
    written = in_context(model, contrasts, lambda layer: getattr(layer, last), inputs=False)
    expected = (written * direction(model, contrasts)[:, None]).sum(-1)
    for batch_size in (1, 4):
        found = read_mlp_salience(opened(model, contrasts), contrasts, at="context", batch_size=batch_size)
        near(found.values[..., 0], expected)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@torch.no_grad()
def test_all_neurons_add_up_to_mlp_salience_and_the_best_come_first(family: str) -> None:
    model, contrasts = random_model(family), contrasts_of()
    bridged, layers = opened(model, contrasts), layers_of(model)
    neurons = top_neurons(bridged, contrasts, n=10**6, batch_size=4)
    bias = torch.stack([layer.mlp.c_proj.bias for layer in layers]) if family == "gpt2" else torch.zeros(2, 32)
    readout = direction(model, contrasts)
    total = torch.tensor([sum(one.salience for one in found) for found in neurons]) + (readout @ bias.T).sum(-1)
    near(total, read_mlp_salience(bridged, contrasts, at="context").values.sum((1, 2)))
    last = "c_proj" if family == "gpt2" else "down_proj"
    active = in_context(model, contrasts, lambda layer: getattr(layer.mlp, last), inputs=True)
    for p, found in enumerate(neurons):
        assert len({(one.layer, one.neuron) for one in found}) == len(found) == active[0].numel()
        assert [one.salience for one in found] == sorted((one.salience for one in found), reverse=True)
        for one in (found[0], found[-1]):
            weight = getattr(layers[one.layer].mlp, last).weight
            value = weight[one.neuron] if family == "gpt2" else weight[:, one.neuron]
            assert one.activation == pytest.approx(float(active[p, one.layer, one.neuron]), rel=1e-4)
            assert one.readout == pytest.approx(float(value @ readout[p]), rel=1e-4, abs=1e-5)
            assert one.salience == pytest.approx(one.activation * one.readout, rel=1e-5)
    assert top_neurons(bridged, contrasts, n=3, batch_size=4) == [found[:3] for found in neurons]


def test_a_mixture_of_experts_has_no_neurons_to_name() -> None:
    contrasts = contrasts_of()
    with pytest.raises(ModelError, match="mixture of experts"):
        top_neurons(opened(tiny_model("gpt_oss"), contrasts), contrasts)


def test_answers_planted_in_the_values_rank_first_at_their_subject_and_not_at_another() -> None:
    model, contrasts = planted()
    W_V = model.model.layers[0].self_attn.v_proj.weight
    with torch.no_grad():
        W_V.zero_()
        for one, token in zip(contrasts.encodings, contrasts.tokens, strict=True):
            W_V[token, one.ids[0]] = 1.0
    found = read_stored_answers(opened(model, contrasts), contrasts)
    assert found.rank.tolist() == [1] * 10
    assert found.control[:6].tolist() == [2] * 6  # there the other subject's answer alone scores higher
    assert (found.control[6:] > 1).all()  # as it does for sports, where golf is planted twice
    assert found.candidates.tolist() == [6] * 6 + [3] * 4


@torch.no_grad()
def test_stored_answers_rank_the_summed_values_of_all_heads_whatever_the_batch_size() -> None:
    model, contrasts = random_model("llama"), contrasts_of()
    values = in_context(model, contrasts, lambda layer: layer.self_attn.v_proj, inputs=False)
    state = torch.zeros(len(contrasts), 32)
    for i, layer in enumerate(layers_of(model)):
        grouped = values[:, i].view(-1, 2, 1, 8).expand(-1, 2, 2, 8).reshape(-1, 32)
        state += layer.self_attn.o_proj(grouped)
    scores = (state * model.model.norm.weight) @ model.lm_head.weight.T
    expected = []
    for p, (prompt, answer) in enumerate(zip(contrasts.prompts, contrasts.answer, strict=True)):
        rows = [i for i, other in enumerate(contrasts.prompts) if other.fact.relation == prompt.fact.relation]
        tokens = list(contrasts.candidates[prompt.fact.relation])
        above = scores[p, tokens] - scores[rows][:, tokens].mean(0)
        expected.append(int((above >= above[answer]).sum()))  # no two are equal here, and every other one is wrong
    assert len(set(expected)) > 2
    found = [read_stored_answers(opened(model, contrasts), contrasts, batch_size=size) for size in (1, 4, 9)]
    for one in found:
        assert one.rank.tolist() == expected
        assert one.control.tolist() == found[0].control.tolist()
        assert one.candidates.tolist() == [len(contrasts.candidates[p.fact.relation]) for p in contrasts.prompts]


@pytest.mark.parametrize("read", [read_value_salience, read_mlp_salience])
def test_an_unknown_place_to_read_a_subject_at_is_named(read: Callable) -> None:
    contrasts = contrasts_of()
    with pytest.raises(DataError, match="embedding or extended, got 'middle'"):
        read(opened(tiny_model("llama"), contrasts), contrasts, at="middle")
