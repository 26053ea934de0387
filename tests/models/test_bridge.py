"""Models through TransformerLens against what the transformers model itself computes, caught by hooks of torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import transformers
from tiny import FAMILIES, GROUPED, VOCABULARY, eager, tiny_model, tiny_prompts, tiny_tokenizer
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel
from uneven import hooked, uneven

from attnbalance import load_model
from attnbalance.errors import ModelError
from attnbalance.models import bridge as bridges
from attnbalance.models.bridge import bridge_of
from attnbalance.tokens import encode, pad

pytestmark = pytest.mark.filterwarnings("ignore:.*stands outside")

# Float32 sums of 32 products of entries up to 10, in another order: 1e-6. A wrong head or bias shows as 0.1 and more.
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
IDS = torch.randint(VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(0))


def caught(model: PreTrainedModel, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One layer's normed input, its maps, and what goes into its output projection and comes out of it."""
    outputs = ("o_proj", "c_proj", "dense", "out_proj")
    names = [name for name, _ in model.named_modules() if "att" in name and name.endswith(outputs)]
    output, attention = names[layer], names[layer].rpartition(".")[0]
    kept: dict[str, Tensor] = {}

    def keep_input(module: Module, args: tuple, kwargs: dict) -> None:
        kept["x"] = args[0] if args else kwargs["hidden_states"]

    def keep_output(module: Module, args: tuple, result: Tensor) -> None:
        kept["z"], kept["out"] = args[0], result

    handles = [
        model.get_submodule(attention).register_forward_pre_hook(keep_input, with_kwargs=True),
        model.get_submodule(output).register_forward_hook(keep_output),
    ]
    with torch.no_grad():
        maps = model(IDS, output_attentions=True, use_cache=False).attentions[layer]
    for handle in handles:
        handle.remove()
    return kept["x"], maps, kept["z"], kept["out"]


@pytest.mark.parametrize("family", FAMILIES)
def test_value_and_output_weights_make_the_head_outputs_of_the_transformers_model(family: str) -> None:
    oracle, weights = eager(uneven(family)), bridge_of(hooked(family)).weights
    for layer in range(2):
        x, maps, z, out = caught(oracle, layer)
        heads = maps @ (torch.einsum("bpd,hdk->bhpk", x, weights.W_V[layer]) + weights.b_V[layer][:, None])
        torch.testing.assert_close(heads.transpose(1, 2).reshape(2, 11, -1), z.reshape(2, 11, -1), **CLOSE)
        written = torch.einsum("bhqk,hkd->bqd", heads, weights.W_O[layer]) + weights.b_O[layer]
        torch.testing.assert_close(written, out.reshape(written.shape), **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bridge_leaves_the_users_model_as_it_was(family: str) -> None:
    user = hooked(family)
    model, batch = user.model, pad(encode(tiny_prompts(), user.tokenizer))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modules = {name: type(module) for name, module in model.named_modules()}
    with torch.no_grad():
        rows, logits = user.rows(batch), model(IDS).logits
        bridge_of(user).weights.W_O.zero_()  # neither the user's weights nor a view of them
        assert torch.equal(model(IDS).logits, logits)
        assert torch.equal(user.rows(batch), rows)
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert {name: type(module) for name, module in model.named_modules()} == modules
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("family", "path", "place"),
    [
        ("gpt2", ("ln_final",), "transformer.ln_f"),
        ("neox", (1, "ln1"), "gpt_neox.layers.1.input_layernorm"),
        ("llama", ("ln_final",), "model.norm"),
        ("gemma2", ("ln_final",), "model.norm"),
        ("gemma2", (1, "ln1_post"), "model.layers.1.post_attention_layernorm"),
    ],
)
def test_a_norm_at_a_fixed_scale_is_what_autograd_says_it_is(family: str, path: tuple, place: str) -> None:
    model, norm = uneven(family), bridge_of(hooked(family)).norm(*path)
    own = model.get_submodule(place)
    state = own.state_dict()
    weight, bias = state["weight"] + (family == "gemma2"), state.get("bias", torch.zeros(32))
    x, direction = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    x = x.requires_grad_()
    centred = x - x.mean(-1, keepdim=True) if "bias" in state else x
    scale = (centred.square().mean(-1) + getattr(own, "eps", 1e-6)).sqrt().detach()
    read = ((centred / scale[:, None] * weight + bias) * direction).sum(-1)
    torch.testing.assert_close(read, (own(x) * direction).sum(-1), **CLOSE)  # the formula above is the module's
    (gradient,) = torch.autograd.grad(read.sum(), x)
    with torch.no_grad():
        torch.testing.assert_close(norm.scale(x, own(x)), scale, atol=0, rtol=1e-5)
        before, constant = norm.backward(direction, scale)
        torch.testing.assert_close(before, gradient, **CLOSE)
        torch.testing.assert_close((before * x).sum(-1) + constant, read, **CLOSE)


def test_where_a_model_has_no_such_norm_it_is_the_identity() -> None:
    norm, x = bridge_of(hooked("gpt2")).norm(0, "ln1_post"), torch.randn(3, 32)
    before, constant = norm.backward(x, norm.scale(x, x))
    assert norm.identity
    assert torch.equal(before, x)
    assert not constant.any()


def test_padding_on_the_left_changes_no_logit() -> None:
    every = encode(tiny_prompts(), tiny_tokenizer())
    batch = pad(every)
    for family in ("gpt2", "llama", "bloom"):
        found, _ = bridge_of(hooked(family)).run(batch.input_ids, batch.attention_mask, {})
        for logits, one in zip(found, every, strict=True):
            with torch.no_grad():
                expected = eager(uneven(family))(torch.tensor([one.ids]), use_cache=False).logits[0]
            torch.testing.assert_close(logits, expected[-1:], **CLOSE)


def test_adapters_are_merged_into_the_bridge_and_not_into_the_users_model(
    llama_folder: Path, lora_folder: Path
) -> None:
    model = load_model(llama_folder, adapter=lora_folder, device="cpu")
    names = [name for name, _ in model.model.named_parameters()]
    found, _ = bridge_of(model).run(IDS, torch.ones_like(IDS), {})
    with torch.no_grad():
        expected = model.model(IDS).logits[:, -1:]
        assert (expected - tiny_model("llama")(IDS).logits[:, -1:]).abs().max() > 0.1
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=1e-5)  # merging rounds the sums of two matrices
    assert [name for name, _ in model.model.named_parameters()] == names


@pytest.mark.parametrize("by", [0.01, torch.nan])
@pytest.mark.parametrize(("field", "what"), [("W_V", "values"), ("b_V", "values"), ("W_O", "head outputs")])
def test_weights_that_do_not_reproduce_the_model_are_refused(
    field: str, what: str, by: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, user = bridges._weights, hooked("qwen2")

    def wrong(bridge: object) -> bridges.Weights:
        weights = right(bridge)
        damaged = getattr(weights, field).clone()
        damaged[1, 2] += by
        return dataclasses.replace(weights, **{field: damaged})

    bridge_of(user)
    monkeypatch.setattr(bridges, "_weights", wrong)
    with pytest.raises(ModelError, match=f"Qwen2ForCausalLM: {what} of layer 1 made from its weights differ from"):
        bridge_of(user)


def test_logits_that_are_not_the_users_models_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    user = hooked("llama")
    monkeypatch.setattr(bridges, "merged", lambda _: uneven("llama", rms_norm_eps=0.1))
    with pytest.raises(ModelError, match="logits made from its weights differ"):
        bridge_of(user)


def test_dropout_of_a_model_in_training_does_not_reach_the_proof() -> None:
    user = load_model(uneven("gpt2").train(), tokenizer=tiny_tokenizer())
    found, _ = bridge_of(user).run(IDS, torch.ones_like(IDS), {})
    with torch.no_grad():
        torch.testing.assert_close(found, uneven("gpt2")(IDS).logits[:, -1:], **CLOSE)
    assert user.model.training


def test_half_precision_is_copied_into_float32() -> None:
    model = uneven("llama").to(torch.bfloat16)
    weights = bridge_of(load_model(model, tokenizer=tiny_tokenizer())).weights
    own = model.model.layers[1].self_attn.q_proj.weight.float()
    assert weights.W_Q.dtype == torch.float32
    assert torch.equal(weights.W_Q[1], own.T.reshape(32, 4, 8).transpose(0, 1))


def test_a_model_with_layers_without_attention_is_refused() -> None:
    kinds = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
    with pytest.raises(ModelError, match="Lfm2ForCausalLM has layers without attention"):
        bridge_of(hooked(transformers.Lfm2Config(**(GROUPED | kinds))))


def test_hooks_that_a_family_lacks_are_named() -> None:
    with pytest.raises(ModelError, match=r"has no blocks\.0\.ln1_post\.hook_out in TransformerLens"):
        bridge_of(hooked("gpt2")).run(IDS, torch.ones_like(IDS), {"blocks.0.ln1_post.hook_out": lambda x: x})


def test_a_small_adapter_on_a_16_bit_model_is_not_rounded_away(llama_folder: Path, lora_folder: Path) -> None:
    model = load_model(llama_folder, adapter=lora_folder, dtype="bfloat16", device="cpu")
    with torch.no_grad():
        for name, parameter in model.model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(1e-3)
    base = load_model(llama_folder, dtype="bfloat16", device="cpu")
    found = bridge_of(model).weights.W_V - bridge_of(base).weights.W_V
    layer = model.model.base_model.model.model.layers[1].self_attn.v_proj
    delta = (layer.lora_B["default"].weight.float() @ layer.lora_A["default"].weight.float()) * layer.scaling["default"]
    grouped = delta.T.reshape(32, 2, 8).transpose(0, 1).repeat_interleave(2, dim=0)  # kv_head d_model d_head, repeated
    torch.testing.assert_close(found[1], grouped, atol=1e-2 * float(delta.abs().max()), rtol=0)
