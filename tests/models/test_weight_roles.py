"""Roles of weights against the classes of modules, and against what each role can and cannot change in a model."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import torch
import transformers
from layouts import KINDS, logits_of, with_noise
from tiny import VOCABULARY, eager, tiny_config
from torch import Tensor
from transformers import PreTrainedModel
from uneven import hooked

from attnbalance import HookedModel
from attnbalance.models.weight_roles import ROLES, LayerRoles, weight_roles

pytestmark = pytest.mark.filterwarnings("ignore:.*is outside")


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> HookedModel:
    return hooked(KINDS[request.param])


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
