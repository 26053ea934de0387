"""Salience against the paper's definition in a one-layer model, and against loops over transformers' own weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from one_layer import one_layer, word_prompts, word_tokenizer
from tiny import FACTS, GROUPED, tiny_model, tiny_tokenizer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from attnbalance import Fact, load_model
from attnbalance.data.prompts import make_prompts
from attnbalance.errors import DataError, ModelError
from attnbalance.models.bridge import BridgedModel, bridge_of
from attnbalance.readings import salience
from attnbalance.readings.answer_tokens import AnswerTokens, make_answer_tokens
from attnbalance.readings.salience import read_mlp_salience, read_readout_ranks, read_value_salience, top_neurons

# Float32 keeps seven digits and sums of some 100 products lose one: relative to the largest entry. A wrong slice, norm
# or gain shows as 1e-1 and more in these models.
TOLERANCE = 1e-5
EXACT = 1e-6  # sums of at most 12 numbers: nothing but the last digit is lost
FAMILIES = ("llama", "gpt2", "gemma2", "gpt_oss")


def near(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    scale = float(expected.abs().max())
    assert scale > 0
    torch.testing.assert_close(found, expected, atol=tolerance * scale, rtol=0)


def opened(model: PreTrainedModel, answer_tokens: AnswerTokens) -> BridgedModel:
    tokenizer = word_tokenizer() if len(answer_tokens.encodings[0].ids) == 2 else tiny_tokenizer()
    return bridge_of(load_model(model, tokenizer=tokenizer))


def random_model(family: str) -> Any:
    """A tiny model whose gains and biases are no longer all ones and zeros."""
    model, noise = tiny_model(family), torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=noise)
    return model


@pytest.fixture(scope="module")
def answer_tokens() -> AnswerTokens:
    """The questions of tests/tiny.py as two relations of 5 and 4 answers; subjects have several tokens."""
    facts = [replace(fact, relation=("odd", "even")[i % 2]) for i, fact in enumerate(FACTS)]
    return make_answer_tokens(make_prompts(facts), tiny_tokenizer())


@pytest.fixture(scope="module")
def words() -> AnswerTokens:
    return make_answer_tokens(word_prompts(), word_tokenizer())


def against_others(scores: Callable[[int, int], Any], answer_tokens: AnswerTokens) -> Tensor:
    """Of scores(prompt, token), that of the answer's token minus the mean of the others'."""
    found = []
    for p, (answer, others) in enumerate(zip(answer_tokens.answer, answer_tokens.others, strict=True)):
        tokens = answer_tokens.candidates[answer_tokens.prompts[p].fact.relation]
        found.append(scores(p, tokens[answer]) - sum(scores(p, tokens[k]) for k in others) / len(others))
    return torch.stack(found)


def direction(model: Any, answer_tokens: AnswerTokens) -> Tensor:
    """The logit difference's direction before the final norm at scale 1."""
    found = against_others(lambda _, token: model.lm_head.weight[token], answer_tokens)
    if hasattr(model, "transformer"):  # a layer norm takes the mean off
        return found * model.transformer.ln_f.weight - (found * model.transformer.ln_f.weight).mean(-1, keepdim=True)
    return found * (model.model.norm.weight + ("Gemma" in type(model).__name__))


def layers_of(model: Any) -> list[Any]:
    return list(model.transformer.h if hasattr(model, "transformer") else model.model.layers)


def value_outputs(layer: Any, x: Tensor) -> list[Tensor]:
    """What each of 4 heads of size 8 adds if all attend to a token with the normed residual stream x.

    In all families but GPT-2, two heads share their W_V.
    """
    if hasattr(layer, "attn"):
        W_V, W_O = layer.attn.c_attn.weight[:, 64:], layer.attn.c_proj.weight
        return [x @ W_V[:, own] @ W_O[own] for own in (slice(8 * i, 8 * i + 8) for i in range(4))]
    W_V, W_O = layer.self_attn.v_proj.weight, layer.self_attn.o_proj.weight
    written = [W_O[:, 8 * i : 8 * i + 8] @ (W_V[8 * (i // 2) : 8 * (i // 2) + 8] @ x) for i in range(4)]
    if not hasattr(layer, "pre_feedforward_layernorm"):
        return written
    norm = layer.post_attention_layernorm
    scale = (sum(written).square().mean() + norm.eps).sqrt()
    return [each / scale * (1 + norm.weight) for each in written]


def mlp_of(layer: Any, x: Tensor) -> Tensor:
    """What a layer's MLP writes where the residual stream is x."""
    if hasattr(layer, "pre_feedforward_layernorm"):
        return layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(x)))
    found = layer.mlp((layer.ln_2 if hasattr(layer, "ln_2") else layer.post_attention_layernorm)(x)[None])
    return (found[0] if isinstance(found, tuple) else found)[0]


def in_context(model: Any, answer_tokens: AnswerTokens, part: str, inputs: bool = False) -> Tensor:
    """What goes into or comes out of a part of each layer at the subject's last token, one prompt at a time."""
    seen: list[Tensor] = []

    def keep(_: object, args: tuple[Tensor, ...], output: Tensor) -> None:
        found = args[0] if inputs else output[0] if isinstance(output, tuple) else output
        seen.append(found.reshape(-1, found.shape[-1])[place])

    hooks = [layer.get_submodule(part).register_forward_hook(keep) for layer in layers_of(model)]
    for one in answer_tokens.encodings:
        place = one.spans["subject"][-1]
        model(input_ids=torch.tensor([one.ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(seen).view(len(answer_tokens), len(hooks), -1)


@torch.no_grad()
def test_in_one_layer_value_salience_is_the_papers_definition_set_against_the_other_answers(
    words: AnswerTokens,
) -> None:
    model = one_layer()
    found = read_value_salience(opened(model, words), words, at="embedding")
    W_V, phi = model.get_parameter("model.layers.0.self_attn.v_proj.weight"), torch.eye(model.config.vocab_size)
    S = [[phi[a] @ W_V @ phi[one.ids[0]] for a in range(len(phi))] for one in words.encodings]
    near(found.values[:, 0, 0], against_others(lambda p, a: S[p][a], words), EXACT)
    assert found.prompt_ids == tuple(prompt.prompt_id for prompt in words.prompts)


@torch.no_grad()
def test_in_one_layer_mlp_salience_is_the_sum_over_neurons_of_activation_times_value(words: AnswerTokens) -> None:
    model = one_layer()
    found = read_mlp_salience(opened(model, words), words, at="embedding")
    mlp, total = model.model.layers[0].mlp, torch.zeros(len(words), dtype=torch.float64)
    for n in range(12):
        gate, up = mlp.gate_proj.weight[n].double(), mlp.up_proj.weight[n].double()
        activation = torch.stack(
            [gate[s] * torch.sigmoid(gate[s]) * up[s] for s in (e.ids[0] for e in words.encodings)]
        )
        total += activation * against_others(lambda _, a, n=n: mlp.down_proj.weight[a, n].double(), words)
    near(found.values[:, 0, 0], total.float(), EXACT)


@pytest.mark.parametrize("at", ["embedding", "extended"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_salience_without_context_equals_a_loop_over_the_models_own_weights(
    answer_tokens: AnswerTokens, family: str, at: str
) -> None:
    model = random_model(family)
    x = model.get_input_embeddings()(
        torch.tensor([one.ids[one.spans["subject"][-1]] for one in answer_tokens.encodings])
    )
    x = x + mlp_of(layers_of(model)[0], x) if at == "extended" else x
    readout, expected = direction(model, answer_tokens), torch.zeros(len(answer_tokens), 2, 4)
    for i, layer in enumerate(layers_of(model)):
        normed = (layer.ln_1 if family == "gpt2" else layer.input_layernorm)(x)
        for p in range(len(answer_tokens)):
            expected[p, i] = torch.stack(value_outputs(layer, normed[p])) @ readout[p]
    bridged = opened(model, answer_tokens)
    near(read_value_salience(bridged, answer_tokens, at=at).values, expected)
    written = torch.stack([mlp_of(layer, x) for layer in layers_of(model)], dim=1)
    near(read_mlp_salience(bridged, answer_tokens, at=at).values[..., 0], (written * readout[:, None]).sum(-1))


@torch.no_grad()
def test_a_size_of_weights_that_a_norm_after_them_divides_out_changes_no_reading(answer_tokens: AnswerTokens) -> None:
    readings, neurons, ranks = [], [], []
    for factor in (1, 10):
        model = random_model("gemma2")
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight *= factor
        layer.mlp.down_proj.weight *= factor
        bridged = opened(model, answer_tokens)
        saliences = [read(bridged, answer_tokens) for read in (read_value_salience, read_mlp_salience)]
        readings.append(torch.cat([reading.values for reading in saliences], dim=2))
        best = top_neurons(bridged, answer_tokens, n=96)
        neurons.append([[neuron.salience for neuron in of_prompt] for of_prompt in best])
        ranks.append(read_readout_ranks(bridged, answer_tokens))
    near(readings[1], readings[0], 1e-4)  # the norms' epsilon, 1e-6, counts ten times less
    near(*map(torch.tensor, neurons), 1e-4)  # pyright: ignore[reportArgumentType]
    assert ranks[0].rank.tolist() == ranks[1].rank.tolist()
    assert len(set(ranks[0].rank.tolist())) > 2


@pytest.mark.parametrize(("family", "scale"), [("cohere", {"logit_scale": 0.25}), ("granite", {"logits_scaling": 4.0})])
def test_a_familys_scale_of_logits_is_in_every_value(
    answer_tokens: AnswerTokens, family: str, scale: dict[str, float]
) -> None:
    config, values = AutoConfig.for_model(family, **GROUPED, pad_token_id=None, **dict.fromkeys(scale, 1.0)), []
    model = AutoModelForCausalLM.from_config(config).eval()
    for change in ({}, scale):  # the same weights
        model.config.update(change)
        for name, value in change.items():
            setattr(model, name, value)
        bridged = opened(model, answer_tokens)
        values.append(
            [read(bridged, answer_tokens, at="extended").values for read in (read_value_salience, read_mlp_salience)]
        )
    for unscaled, scaled in zip(*values, strict=True):
        near(scaled, unscaled / 4)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_mlp_salience_in_context_is_what_the_mlp_writes_at_the_subjects_last_token(
    answer_tokens: AnswerTokens, family: str
) -> None:
    model = random_model(family)
    written = in_context(model, answer_tokens, "post_feedforward_layernorm" if family == "gemma2" else "mlp")
    expected, bridged = (written * direction(model, answer_tokens)[:, None]).sum(-1), opened(model, answer_tokens)
    for size in (1, 4):
        near(read_mlp_salience(bridged, answer_tokens, at="context", batch_size=size).values[..., 0], expected)


@torch.no_grad()
def test_a_factor_of_what_layers_add_is_in_salience_and_leaves_the_model_as_it_was(answer_tokens: AnswerTokens) -> None:
    config = AutoConfig.for_model("granite", **GROUPED, pad_token_id=None, residual_multiplier=0.22)
    model = AutoModelForCausalLM.from_config(config).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    bridged = opened(model, answer_tokens)
    expected = 0.22 * (in_context(model, answer_tokens, "mlp") * direction(model, answer_tokens)[:, None]).sum(-1)
    near(read_mlp_salience(bridged, answer_tokens, at="context").values[..., 0], expected)
    assert model.config.residual_multiplier == model.model.layers[0].residual_multiplier == 0.22
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("family", "last"), [("llama", "mlp.down_proj"), ("gpt2", "mlp.c_proj"), ("gemma2", "mlp.down_proj")]
)
@torch.no_grad()
def test_all_neurons_add_up_to_mlp_salience_and_the_best_come_first(
    answer_tokens: AnswerTokens, family: str, last: str
) -> None:
    model = random_model(family)
    bridged, readout = opened(model, answer_tokens), direction(model, answer_tokens)
    output = [layer.get_submodule(last) for layer in layers_of(model)]
    neurons = top_neurons(bridged, answer_tokens, n=10**6, batch_size=4)
    total = torch.tensor([sum(one.salience for one in found) for found in neurons])
    bias = sum((readout @ one.bias for one in output if one.bias is not None), torch.zeros(len(answer_tokens)))
    assert bool(bias.any()) == (family == "gpt2")
    near(total + bias, read_mlp_salience(bridged, answer_tokens, at="context").values.sum((1, 2)))
    active = in_context(model, answer_tokens, last, inputs=True)
    for p, found in enumerate(neurons):
        assert len({(one.layer, one.neuron) for one in found}) == len(found) == active[p].numel()
        assert [one.salience for one in found] == sorted((one.salience for one in found), reverse=True)
        for one in (found[0], found[-1]):
            weight = output[one.layer].weight if family == "gpt2" else output[one.layer].weight.T
            assert one.activation == pytest.approx(float(active[p, one.layer, one.neuron]), rel=1e-4)
            read = readout[p]
            if family == "gemma2":
                norm = layers_of(model)[one.layer].post_feedforward_layernorm
                scale = (output[one.layer](active[p, one.layer]).square().mean() + norm.eps).sqrt()
                read = read * (1 + norm.weight) / scale
            assert one.readout == pytest.approx(float(weight[one.neuron] @ read), rel=1e-4, abs=1e-5)
            assert one.salience == pytest.approx(one.activation * one.readout, rel=1e-5)
    assert top_neurons(bridged, answer_tokens, n=3, batch_size=4) == [found[:3] for found in neurons]


def test_numbers_of_neurons_and_of_ranks_are_not_negative(answer_tokens: AnswerTokens) -> None:
    bridged = opened(tiny_model("llama"), answer_tokens)
    with pytest.raises(DataError, match="n must be >= 1, got -1"):
        top_neurons(bridged, answer_tokens, n=-1)
    ranks = read_readout_ranks(bridged, answer_tokens)
    assert not ranks.chance(0).any()
    with pytest.raises(DataError, match="top must be >= 0, got -1"):
        ranks.chance(-1)


def test_a_mixture_of_experts_has_no_neurons_to_name(answer_tokens: AnswerTokens) -> None:
    with pytest.raises(ModelError, match="mixture of experts"):
        top_neurons(opened(tiny_model("gpt_oss"), answer_tokens), answer_tokens)


def test_answers_planted_in_the_values_rank_first_at_their_subject_and_not_at_another(words: AnswerTokens) -> None:
    model = one_layer()
    W_V = model.model.layers[0].self_attn.v_proj.weight.data.zero_()
    for one, token in zip(words.encodings, words.tokens, strict=True):
        W_V[token, one.ids[0]] = 1.0
    found = read_readout_ranks(opened(model, words), words)
    assert found.rank.tolist() == [1] * 10
    assert found.control[:6].tolist() == [2] * 6  # there the other subject's answer alone scores higher
    assert (found.control[6:] > 1).all()  # as it does for sports, where golf is planted twice
    assert found.candidates.tolist() == [6] * 6 + [3] * 4


@torch.no_grad()
def test_a_control_is_at_a_subject_for_whom_the_answer_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liz accepts Tom's answer too, though her first one is wrong for Tom. At her alone it is read out."""
    facts = (("Tom", "Paris"), ("Liz", "Rome", "Paris"), ("Ben", "Rome"), ("Sue", "Oslo"))
    prompts = make_prompts([Fact(name, "city", tuple(answers)) for name, *answers in facts])
    network = random_model("llama")
    tokens = make_answer_tokens(prompts, tiny_tokenizer())
    model = opened(network, tokens)
    unembed = model.weights.W_U[:, list(tokens.candidates["city"])]
    scores = torch.zeros(4, 3)
    scores[:, tokens.answer[0]] = torch.tensor([-10.0, 10.0, -10.0, -10.0])
    monkeypatch.setattr(salience, "_read_out", lambda *arguments: scores @ torch.linalg.pinv(unembed))
    ranks = [read_readout_ranks(model, tokens, seed=seed) for seed in range(20)]
    assert {int(rank.control[0]) for rank in ranks} == {3}


@torch.no_grad()
def test_the_control_is_another_subject() -> None:
    """Two questions about one subject have other answers, which makes it no control of itself."""
    facts = [
        Fact(name, "pet", (answer,), question=f"Which {thing} of {name}?")
        for name, thing, answer in (("Ann", "first", "cat"), ("Ann", "second", "dog"), ("Bob", "first", "cow"))
    ]
    answer_tokens = make_answer_tokens(make_prompts(facts), tiny_tokenizer())
    bridged = opened(random_model("llama"), answer_tokens)
    read_readout_ranks(bridged, answer_tokens)
    with pytest.raises(DataError, match="no other subject of relation 'pet' has another answer"):
        read_readout_ranks(bridged, answer_tokens.at([0, 1]))


@torch.no_grad()
def test_a_part_of_a_relation_cannot_be_ranked(answer_tokens: AnswerTokens) -> None:
    with pytest.raises(DataError, match="pass all prompts of a relation together"):
        read_readout_ranks(opened(random_model("llama"), answer_tokens), answer_tokens.at([0]))


def test_stored_answers_rank_the_summed_values_of_all_heads_whatever_the_batch_size(
    answer_tokens: AnswerTokens,
) -> None:
    model = random_model("llama")
    values, state = in_context(model, answer_tokens, "self_attn.v_proj"), torch.zeros(len(answer_tokens), 32)
    for i, layer in enumerate(layers_of(model)):  # two heads to a value
        state += layer.self_attn.o_proj(values[:, i].view(-1, 2, 1, 8).expand(-1, 2, 2, 8).reshape(-1, 32))
    scores = (state * model.model.norm.weight) @ model.lm_head.weight.T
    relations, expected = [prompt.fact.relation for prompt in answer_tokens.prompts], []
    for p, answer in enumerate(answer_tokens.answer):
        tokens = list(answer_tokens.candidates[relations[p]])
        above = scores[p, tokens] - scores[[relation == relations[p] for relation in relations]][:, tokens].mean(0)
        expected.append(1 + int((above[list(answer_tokens.others[p])] > above[answer]).sum()))
    assert len(set(expected)) > 2
    bridged = opened(model, answer_tokens)
    found = [read_readout_ranks(bridged, answer_tokens, batch_size=size) for size in (1, 4, 9)]
    for one in found:
        assert one.rank.tolist() == expected
        assert one.control.tolist() == found[0].control.tolist()
        assert one.candidates.tolist() == [1 + len(others) for others in answer_tokens.others]


@pytest.mark.parametrize("read", [read_value_salience, read_mlp_salience])
def test_an_unknown_place_to_read_a_subject_at_is_named(answer_tokens: AnswerTokens, read: Callable) -> None:
    with pytest.raises(DataError, match="embedding or extended, got 'middle'"):
        read(opened(tiny_model("llama"), answer_tokens), answer_tokens, at="middle")


def test_the_one_answer_without_a_bare_space_has_a_control_too(stories: Path) -> None:
    """Its rival is the bare space, which is no prompt's answer: the control is at any subject of another answer."""
    model = load_model(stories)
    answers = {"Tim": "the", "Ann": "1945", "Bob": "2003", "Lily": "1987", "Sam": "2011", "Max": "1950"}
    prompts = make_prompts([Fact(subject, "born", (year,)) for subject, year in answers.items()])
    ranks = read_readout_ranks(bridge_of(model), make_answer_tokens(prompts, model.tokenizer))
    assert ranks.candidates[0] == 2
    assert (ranks.control >= 1).all()
    assert (ranks.control <= ranks.candidates).all()
