"""Parts of the weights against what each part can and cannot change in a model, and against layouts written by hand."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import cpu_offload
from layouts import IDS, KINDS, logits_of, with_noise
from peft import LoraConfig
from tiny import GROUPED, SINKS, eager, tiny_config, tiny_model, tiny_tokenizer
from torch import Tensor
from torch.nn import Module
from transformers import PretrainedConfig
from uneven import hooked, uneven

from attnbalance import Fact, HookedModel, load_model
from attnbalance.data.prompts import make_prompts
from attnbalance.errors import DataError, ModelError
from attnbalance.models import weight_roles
from attnbalance.models.bridge import bridge_of
from attnbalance.models.weights import (
    PARTS,
    changed_parts,
    transplant_weights,
    transplants,
    weight_parts,
)
from attnbalance.readings.answer_tokens import make_answer_tokens
from attnbalance.readings.salience import read_mlp_salience

pytestmark = pytest.mark.filterwarnings("ignore:.*is outside")

Masks = Mapping[str, Mapping[str, Tensor]]


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> HookedModel:
    return hooked(KINDS[request.param])


@pytest.fixture(scope="module")
def masks(model: HookedModel) -> Masks:
    return weight_parts(model)


def first_maps(model: Module) -> Tensor:
    """The first layer's whole maps, of a model with eager attention."""
    with torch.no_grad():
        return model(IDS, output_attentions=True, use_cache=False).attentions[0]


def test_every_weight_belongs_to_exactly_one_part(model: HookedModel, masks: Masks) -> None:
    own = dict(model.model.named_parameters())
    assert tuple(masks) == PARTS
    assert set.union(*(set(found) for found in masks.values())) == set(own)
    for name, parameter in own.items():
        found = torch.stack([masks[part].get(name, torch.zeros(parameter.shape, dtype=torch.bool)) for part in PARTS])
        assert (found.sum(0) == 1).all(), name
    assert {name for name in own if ".mlp." in name} == set(masks["mlp"])
    assert not any("attn." in name or "attention." in name for name in masks["rest"])


def test_attention_alone_says_where_a_head_looks_and_nothing_of_what_it_reads(model: HookedModel, masks: Masks) -> None:
    # on a prompt of one token every head looks at it, with or without other weights: only what it reads is left
    before = eager(model.model)
    with torch.no_grad():
        for name, parameter in before.named_parameters():
            if name.endswith("sinks"):
                parameter.fill_(-1e4)  # else a sink takes its part of a single token's attention too
    after = with_noise(before, masks["qk"])
    change = (first_maps(after) - first_maps(before)).abs().amax((0, 2, 3))
    assert (change > 0.01).all()
    assert torch.equal(logits_of(after, IDS[:, :1]), logits_of(before, IDS[:, :1]))


@pytest.mark.parametrize("part", ["ov", "mlp"])
def test_values_and_mlps_change_what_is_read_and_not_where_the_first_layer_looks(
    model: HookedModel, masks: Masks, part: str
) -> None:
    before = eager(model.model)
    after = with_noise(before, masks[part])
    assert torch.equal(first_maps(after), first_maps(before))
    assert (logits_of(after, IDS[:, :1]) - logits_of(before, IDS[:, :1])).abs().max() > 0.01


PER_HEAD = torch.arange(96).reshape(4, 3, 8)[:, :2].flatten()
LAYOUTS = {
    "gpt2": ("transformer.h.1.attn.c_attn.bias", torch.arange(64)),
    "neox": ("gpt_neox.layers.1.attention.query_key_value.weight", PER_HEAD),
    "bloom": ("transformer.h.1.self_attention.query_key_value.bias", PER_HEAD),
    "falcon": ("transformer.h.1.self_attention.query_key_value.weight", torch.arange(32 + 8)),  # one key for all
    "phi3": ("model.layers.1.self_attn.qkv_proj.weight", torch.arange(32 + 16)),
}
"""Rows (entries of a bias) of fused projections that are queries and keys; the others are values."""


@pytest.mark.parametrize("kind", LAYOUTS)
def test_fused_projections_are_told_apart_as_their_layout_says(kind: str) -> None:
    (name, rows), model = LAYOUTS[kind], hooked(KINDS[kind])
    masks = weight_parts(model)
    expected = torch.zeros(model.model.get_parameter(name).shape, dtype=torch.bool)
    expected[rows] = True
    assert torch.equal(masks["qk"][name], expected)
    assert torch.equal(masks["ov"][name], ~expected)
    if kind == "gpt2":  # its weights stand the other way round: columns
        assert torch.equal(masks["qk"]["transformer.h.1.attn.c_attn.weight"], expected.expand(32, -1))


def test_its_own_weights_change_nothing_and_all_of_anothers_make_it_the_other(model: HookedModel, masks: Masks) -> None:
    source = hooked(model.model.config, seed=3)
    own, other = logits_of(model.model), logits_of(source.model)
    twin, other_twin = copy.deepcopy(model), copy.deepcopy(source)
    for same in transplants(model, twin, masks, [PARTS, *((part,) for part in PARTS)]):
        assert torch.equal(logits_of(same.model), own)
    every, none, some = transplants(model, source, masks, [PARTS, (), ("qk", "mlp")])
    assert torch.equal(logits_of(every.model), other)
    assert torch.equal(logits_of(none.model), own)
    assert not torch.equal(logits_of(some.model), own)
    assert changed_parts(model, some, masks) == ("qk", "mlp")
    assert some.name == f"{model.name} with qk and mlp of {source.name}"
    for each, was in ((model, twin), (source, other_twin)):  # neither is changed
        pairs = zip(each.model.state_dict().items(), was.model.state_dict().items(), strict=True)
        assert all(name == other and torch.equal(now, before) for (name, now), (other, before) in pairs)


ROPE = {"rope_type": "default", "rope_theta": 50.0}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"rope_parameters": ROPE}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
        ("llama", {"rms_norm_eps": 0.1}),
        ("mistral", {"sliding_window": None}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    ],
)
def test_a_configuration_goes_with_the_rest_and_all_parts_make_the_other_model(
    family: str, changes: dict[str, object]
) -> None:
    first, second = hooked(family), hooked(family, **changes)
    masks = weight_parts(first)
    own, other = logits_of(first.model), logits_of(second.model)
    assert (other - own).abs().max() > 0.1
    assert changed_parts(first, second, masks) == ("rest",)
    assert changed_parts(first, copy.deepcopy(first), masks) == ()
    every, rest, without = transplants(first, second, masks, [PARTS, ("rest",), ("qk", "ov", "mlp")])
    assert torch.equal(logits_of(every.model), other)
    assert torch.equal(logits_of(rest.model), other)
    assert torch.equal(logits_of(without.model), own)


@pytest.mark.parametrize("buffer", ["model.rotary_emb.inv_freq", "gate.e_score_correction_bias"])
def test_buffers_go_with_the_rest(buffer: str) -> None:
    config = transformers.Glm4MoeConfig(
        **GROUPED,
        head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=0,
        pad_token_id=None,
    )
    first = hooked(config)
    second = copy.deepcopy(first)
    for name, values in second.model.named_buffers():
        if name.endswith(buffer):
            values.mul_(3.0).add_(torch.arange(len(values)) % 2)
    own, other = logits_of(first.model), logits_of(second.model)
    assert (other - own).abs().max() > 0.01
    masks = weight_parts(first)
    assert changed_parts(first, second, masks) == ("rest",)
    every, rest, without = transplants(first, second, masks, [PARTS, ("rest",), ("qk", "ov", "mlp")])
    assert torch.equal(logits_of(every.model), other)
    assert torch.equal(logits_of(rest.model), other)
    assert torch.equal(logits_of(without.model), own)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_frequencies_that_follow_the_length_of_the_last_prompt_are_no_difference(kind: str) -> None:
    settings = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4} if kind == "longrope" else {}
    config = tiny_config("llama", rope_parameters=settings | factors, max_position_embeddings=64)
    first = hooked(config)
    second = copy.deepcopy(first)
    with torch.no_grad():
        first.model(torch.arange(8)[None])
        second.model(torch.arange(60)[None] % 50)
        second.model(torch.arange(80)[None] % 50)
    frequencies = [dict(model.model.named_buffers())["model.rotary_emb.inv_freq"] for model in (first, second)]
    assert not torch.equal(*frequencies)
    masks = weight_parts(first)
    assert changed_parts(first, second, masks) == ()
    second.model.get_buffer("model.rotary_emb.original_inv_freq").mul_(2)
    assert changed_parts(first, second, masks) == ("rest",)


@pytest.mark.parametrize("family", SINKS)
def test_sinks_are_attention(family: str) -> None:
    masks = weight_parts(hooked(family))
    assert masks["qk"]["model.layers.1.self_attn.sinks"].all()


def test_adapters_are_merged_before_weights_are_exchanged(llama_folder: Path, lora_folder: Path) -> None:
    base, tuned = load_model(llama_folder, device="cpu"), load_model(llama_folder, adapter=lora_folder, device="cpu")
    expected = logits_of(base.model)
    assert changed_parts(base, tuned, weight_parts(tuned)) == ("qk", "ov")
    assert not torch.equal(logits_of(transplant_weights(tuned, base, ("qk",)).model), expected)
    assert torch.equal(logits_of(transplant_weights(tuned, base, ("qk", "ov")).model), expected)


def test_adapters_that_transformers_holds_are_merged_before_weights_are_exchanged() -> None:
    """The oracle merges by hand, and copies W_Q from one plain model into the other."""

    def adapted(seed: int) -> tuple[Any, Any]:
        own, plain = tiny_model("llama"), tiny_model("llama")
        torch.manual_seed(seed)
        own.add_adapter(LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        with torch.no_grad():
            for i, layer in enumerate(own.model.layers):
                for name in ("q_proj", "v_proj"):
                    lora = getattr(layer.self_attn, name)
                    delta = 2 * lora.lora_B["default"].weight @ lora.lora_A["default"].weight
                    getattr(plain.model.layers[i].self_attn, name).weight += delta
        return own.eval(), plain

    (a, plain_a), (b, plain_b) = adapted(1), adapted(2)
    hooked_a, hooked_b = (load_model(each, tokenizer=tiny_tokenizer()) for each in (a, b))
    torch.testing.assert_close(logits_of(a), logits_of(plain_a), atol=1e-5, rtol=1e-5)
    expected = copy.deepcopy(plain_a)
    for layer, donor in zip(expected.model.layers, plain_b.model.layers, strict=True):
        layer.self_attn.q_proj.weight = donor.self_attn.q_proj.weight
    assert (logits_of(expected) - logits_of(plain_a)).abs().max() > 1e-3
    transplanted = logits_of(transplant_weights(hooked_a, hooked_b, ("qk",)).model)
    torch.testing.assert_close(transplanted, logits_of(expected), atol=1e-5, rtol=1e-5)  # merged in float32 as well
    rest = logits_of(transplant_weights(hooked_a, hooked_b, ("rest",)).model)
    torch.testing.assert_close(rest, logits_of(plain_a), atol=1e-5, rtol=1e-5)


def test_what_cannot_be_exchanged_is_named() -> None:
    model = hooked("llama")
    with pytest.raises(DataError, match=r"parts must be among qk, ov, mlp, rest, got 'heads'"):
        transplant_weights(model, model, ("heads",))
    for changes, name in (
        ({"intermediate_size": 40}, r"model\.layers\.0\.mlp\.down_proj\.weight is \(32, 48\) and \(32, 40\)"),
        ({"num_hidden_layers": 1}, r"model\.layers\.1\.input_layernorm\.weight is \(32,\) and None"),
    ):
        with pytest.raises(ModelError, match=rf"models of different shapes \(first: {name}\)"):
            transplant_weights(model, hooked("llama", **changes), PARTS)
    offloaded = uneven("llama")
    cpu_offload(offloaded, torch.device("cpu"))
    with pytest.raises(ModelError, match=r"is not wholly in memory \(offloaded\); load it on one device"):
        transplant_weights(model, load_model(offloaded, tokenizer=tiny_tokenizer()), PARTS)


UNKNOWN: tuple[PretrainedConfig, ...] = (
    transformers.Lfm2Config(
        **(GROUPED | {"num_hidden_layers": 3}), layer_types=["conv", "full_attention", "conv"], pad_token_id=None
    ),
    tiny_config("falcon", new_decoder_architecture=True, num_kv_heads=2),
)


@pytest.mark.parametrize("config", UNKNOWN, ids=lambda config: config.model_type)
def test_a_model_whose_layers_cannot_be_told_apart_is_refused(config: PretrainedConfig) -> None:
    with pytest.raises(ModelError, match=r"(Lfm2|Falcon)ForCausalLM"):
        weight_parts(hooked(config))


def test_gates_between_values_and_output_are_ov() -> None:
    """No attention row of their layer depends on them; the oracle is the rows of plain eager attention."""
    config = transformers.BitNetConfig(**(GROUPED | {"num_hidden_layers": 1}))
    torch.manual_seed(0)
    first = transformers.BitNetForCausalLM(config).eval()
    other = copy.deepcopy(first)
    with torch.no_grad():
        other.model.layers[0].self_attn.attn_sub_norm.weight.mul_(2.0)
        maps = [eager(model)(IDS, output_attentions=True).attentions[0] for model in (first, other)]
    assert torch.equal(*maps)
    assert not torch.equal(logits_of(first), logits_of(other))
    a, b = (load_model(model, tokenizer=tiny_tokenizer()) for model in (first, other))
    assert changed_parts(a, b, weight_parts(a)) == ("ov",)
    assert torch.equal(logits_of(transplant_weights(a, b, ("ov",)).model), logits_of(other))
    assert torch.equal(logits_of(transplant_weights(a, b, ("qk",)).model), logits_of(first))


def granite() -> HookedModel:
    """Granite 4's dense layout: a `shared_mlp` beside attention."""
    sizes = {name: size for name, size in GROUPED.items() if name != "intermediate_size"}
    config = transformers.GraniteMoeHybridConfig(
        **sizes, layer_types=["attention", "attention"], num_local_experts=0, shared_intermediate_size=48,
        mamba_n_heads=8, mamba_d_head=8, position_embedding_type="rope",
    )  # fmt: skip
    return load_model(transformers.GraniteMoeHybridForCausalLM(config).eval(), tokenizer=tiny_tokenizer())


def test_mlps_that_transformerlens_does_not_know_are_told_by_name_and_their_salience_is_refused() -> None:
    model = granite()
    named = {name for name, _ in model.model.named_parameters() if "shared_mlp" in name}
    assert len(named) == 4
    assert set(weight_parts(model)["mlp"]) == named
    prompts = make_prompts([Fact("Ann", "sport", ("golf",)), Fact("Bo", "sport", ("polo",))])
    with pytest.raises(ModelError, match=r"layer 0 holds .*shared_mlp.* in no MLP that TransformerLens knows"):
        read_mlp_salience(bridge_of(model), make_answer_tokens(prompts, model.tokenizer))


def test_experts_beside_a_dense_mlp_are_mlps() -> None:
    """Gemma 4 has both in a layer; its bridge knows the dense one alone."""
    config = transformers.Gemma4TextConfig(
        **(GROUPED | {"head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 0}), enable_moe_block=True,
        num_experts=2, top_k_experts=1, moe_intermediate_size=16, num_kv_shared_layers=0,
        layer_types=["full_attention"] * 2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = load_model(transformers.Gemma4ForCausalLM(config).eval(), tokenizer=tiny_tokenizer())
    parts = weight_parts(model)
    moved = {name for name, _ in model.model.named_parameters() if ".experts." in name or ".router." in name}
    assert moved
    assert moved <= set(parts["mlp"])
    assert not [name for name in parts["mlp"] if "norm" in name]


def test_an_unknown_matrix_of_a_layer_is_refused_by_name() -> None:
    model = granite()
    for block in model.model.model.layers:  # pyright: ignore
        block.add_module("odd", torch.nn.Linear(32, 32))
    with pytest.raises(ModelError, match=r"odd\.weight is in no attention, MLP or Mamba that is known"):
        weight_parts(model)


def test_an_unknown_part_of_attention_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(weight_roles.INSIDE, "sinks")
    with pytest.raises(ModelError, match="sinks of its attention is no projection, norm, gate or sink that is known"):
        weight_parts(hooked("gpt_oss"))
