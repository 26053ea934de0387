"""Parts of the weights against what each part can and cannot change in a model, and against layouts written by hand."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest
import torch
import transformers
from tiny import FAMILIES, GROUPED, SINKS, VOCABULARY, eager, tiny_config
from torch import Tensor
from torch.nn import Module
from transformers import PretrainedConfig, PreTrainedModel
from uneven import hooked

from attnbalance import HookedModel, load_model
from attnbalance.errors import DataError, ModelError
from attnbalance.models.parts import (
    PARTS,
    ROLES,
    LayerRoles,
    changed_parts,
    transplant_weights,
    transplants,
    weight_parts,
    weight_roles,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*stands outside")

IDS = torch.randint(VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(0))
BLOCKS = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None}
KINDS = {
    "phi3": transformers.Phi3Config(**GROUPED, pad_token_id=None),
    "falcon of many heads": tiny_config("falcon", multi_query=False),
    "gptj": transformers.GPTJConfig(n_embd=32, n_layer=2, n_head=4, rotary_dim=4, vocab_size=VOCABULARY),
    "granite": transformers.GraniteConfig(**GROUPED, residual_multiplier=0.5, logits_scaling=2.0, pad_token_id=None),
    "olmo2": transformers.Olmo2Config(**GROUPED, pad_token_id=None, eos_token_id=None),
    "codegen": transformers.CodeGenConfig(**BLOCKS, rotary_dim=4),
    "bigcode": transformers.GPTBigCodeConfig(**BLOCKS),
} | {family: tiny_config(family) for family in FAMILIES}
"""Fused projections of several layouts, and scales that the ledger does not know."""
Masks = Mapping[str, Mapping[str, Tensor]]


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> HookedModel:
    return hooked(KINDS[request.param])


@pytest.fixture(scope="module")
def masks(model: HookedModel) -> Masks:
    return weight_parts(model)


def with_noise(model: PreTrainedModel, mask: Mapping[str, Tensor]) -> PreTrainedModel:
    """A copy with noise on the entries of one part."""
    twin = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            if name in mask:
                parameter.add_(0.3 * torch.randn_like(parameter) * mask[name])
    return twin


def logits_of(model: Module, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


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
    after = with_noise(before, masks["attention"])
    change = (first_maps(after) - first_maps(before)).abs().amax((0, 2, 3))
    assert (change > 0.01).all()
    assert torch.equal(logits_of(after, IDS[:, :1]), logits_of(before, IDS[:, :1]))


@pytest.mark.parametrize("part", ["values", "mlp"])
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
    assert torch.equal(masks["attention"][name], expected)
    assert torch.equal(masks["values"][name], ~expected)
    if kind == "gpt2":  # its weights stand the other way round: columns
        assert torch.equal(masks["attention"]["transformer.h.1.attn.c_attn.weight"], expected.expand(32, -1))


def test_its_own_weights_change_nothing_and_all_of_anothers_make_it_the_other(model: HookedModel, masks: Masks) -> None:
    source = hooked(model.model.config, seed=3)
    own, other = logits_of(model.model), logits_of(source.model)
    twin, other_twin = copy.deepcopy(model), copy.deepcopy(source)
    for same in transplants(model, twin, masks, [PARTS, *((part,) for part in PARTS)]):
        assert torch.equal(logits_of(same.model), own)
    every, none, some = transplants(model, source, masks, [PARTS, (), ("attention", "mlp")])
    assert torch.equal(logits_of(every.model), other)
    assert torch.equal(logits_of(none.model), own)
    assert not torch.equal(logits_of(some.model), own)
    assert changed_parts(model, some, masks) == ("attention", "mlp")
    assert some.name == f"{model.name} with attention and mlp of {source.name}"
    for each, was in ((model, twin), (source, other_twin)):  # neither is changed
        pairs = zip(each.model.state_dict().items(), was.model.state_dict().items(), strict=True)
        assert all(name == other and torch.equal(now, before) for (name, now), (other, before) in pairs)


@pytest.mark.parametrize("family", SINKS)
def test_sinks_are_attention(family: str) -> None:
    masks = weight_parts(hooked(family))
    assert masks["attention"]["model.layers.1.self_attn.sinks"].all()


def test_adapters_are_merged_before_weights_are_exchanged(llama_folder: Path, lora_folder: Path) -> None:
    base, tuned = load_model(llama_folder, device="cpu"), load_model(llama_folder, adapter=lora_folder, device="cpu")
    expected = logits_of(base.model)
    assert changed_parts(base, tuned, weight_parts(tuned)) == ("attention", "values")
    assert not torch.equal(logits_of(transplant_weights(tuned, base, ("attention",)).model), expected)
    assert torch.equal(logits_of(transplant_weights(tuned, base, ("attention", "values")).model), expected)


def test_what_cannot_be_exchanged_is_named() -> None:
    model = hooked("llama")
    with pytest.raises(DataError, match=r"no part 'heads' of the weights; there are attention, values, mlp, rest"):
        transplant_weights(model, model, ("heads",))
    for changes, name in (
        ({"intermediate_size": 40}, r"model\.layers\.0\.mlp\.down_proj\.weight is \(32, 48\) and \(32, 40\)"),
        ({"num_hidden_layers": 1}, r"model\.layers\.1\.input_layernorm\.weight is \(32,\) and None"),
    ):
        with pytest.raises(ModelError, match=rf"models of different shapes \(first: {name}\)"):
            transplant_weights(model, hooked("llama", **changes), PARTS)


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


def entries(roles: LayerRoles, role: str, heads: Collection[int] | None = None) -> dict[str, Tensor]:
    return roles.masks({role: heads})


def test_the_roles_in_a_layer_cover_its_weights_once(model: HookedModel) -> None:
    own, layers = dict(model.model.named_parameters()), weight_roles(model.model)
    assert len(layers) == 2
    assert not set(layers[0].shapes) & set(layers[1].shapes)
    # the class of a module that holds a layer, not TransformerLens, says what belongs to it
    places = [name for name, module in model.model.named_modules() if isinstance(module, torch.nn.ModuleList)]
    for i, layer in enumerate(layers):
        inside = {name for name in own if any(name.startswith(f"{place}.{i}.") for place in places[:1])}
        assert set(layer.shapes) == inside
        for name in inside:
            found = [entries(layer, role).get(name, torch.zeros(own[name].shape, dtype=torch.bool)) for role in ROLES]
            assert (torch.stack(found).sum(0) == 1).all(), name


def test_heads_share_out_projections_and_nothing_else(model: HookedModel) -> None:
    for layer in weight_roles(model.model):
        for role in ("q", "k", "v", "o"):
            whole = entries(layer, role)
            each = [entries(layer, role, {head}) for head in range(4)]
            groups = 4 if role in "qo" else layer.n_kv_heads
            for name, mask in whole.items():
                shares = [found[name] for found in each if name in found]
                if not shares:
                    assert "norm" in name or (role == "o" and mask.dim() == 1)
                    continue
                assert torch.equal(torch.stack(shares).any(0), mask)
                assert (torch.stack(shares).sum(0)[mask] == 4 // groups).all()  # a group's heads have it in common
        assert not any(layer.masks({role: range(4) for role in ("row", "mlp", "rest")}))


def first_inputs(before: PreTrainedModel, name: str) -> Tensor:
    """What the first module whose name ends so is given."""
    seen: list[Tensor] = []
    module = next(module for place, module in before.named_modules() if place.endswith(name))
    handle = module.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach().clone()))
    logits_of(before)
    handle.remove()
    return seen[0]


OUTPUTS = ("c_proj", "o_proj", "out_proj", "attention.dense", "self_attention.dense")


@pytest.mark.parametrize("role", ["q", "k", "v"])
def test_a_head_s_weights_change_that_head_alone(model: HookedModel, role: str) -> None:
    # what heads give stands side by side before the output projection: [prompt position (head d_head)]
    before = eager(model.model)
    layer = weight_roles(before)[0]
    place = next(place for place, _ in before.named_modules() if place.endswith(OUTPUTS))
    given = first_inputs(before, place)
    after = first_inputs(with_noise(before, entries(layer, role, {2})), place)
    changed = (after - given).unflatten(-1, (4, -1)).abs().amax((0, 1, 3)) > 1e-4
    shared = 4 // layer.n_kv_heads if role in "kv" else 1
    if before.config.model_type == "olmo2" and role in "qk":
        shared = 4  # its norms of queries and keys go over all heads together
    assert changed.tolist() == [head // shared == 2 // shared for head in range(4)]


def test_weights_of_an_output_projection_belong_to_the_head_that_they_read(model: HookedModel) -> None:
    before = eager(model.model)
    place = next(place for place, _ in before.named_modules() if place.endswith(OUTPUTS))
    given = first_inputs(before, place)
    after = with_noise(before, entries(weight_roles(before)[0], "o", {2}))
    change = after.get_submodule(place)(given) - before.get_submodule(place)(given)
    assert change.abs().max() > 0.01
    others = given.unflatten(-1, (4, -1)).clone()
    others[:, :, 2] = 0
    others = others.flatten(-2)
    assert torch.equal(after.get_submodule(place)(others), before.get_submodule(place)(others))


def test_norms_of_queries_and_keys_go_with_them_and_an_mlp_without_a_module_is_one() -> None:
    layer = weight_roles(hooked("qwen3").model)[1]
    assert set(entries(layer, "q")) == {f"model.layers.1.self_attn.{name}.weight" for name in ("q_proj", "q_norm")}
    assert set(entries(layer, "k")) == {f"model.layers.1.self_attn.{name}.weight" for name in ("k_proj", "k_norm")}
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 2}
    config = transformers.OPTConfig(**sizes, num_attention_heads=4, vocab_size=VOCABULARY)
    found = weight_roles(transformers.AutoModelForCausalLM.from_config(config))[0]
    names = {f"{name}.{kind}" for name in ("fc1", "fc2") for kind in ("weight", "bias")}
    assert set(entries(found, "mlp")) == {f"model.decoder.layers.0.{name}" for name in names}


def test_roles_cost_no_memory_and_need_no_weights() -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(tiny_config("llama"))
    for layer in weight_roles(model):
        for role in ROLES:
            for mask in entries(layer, role).values():
                assert mask.untyped_storage().nbytes() <= max(mask.shape)
