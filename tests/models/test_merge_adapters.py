"""Merged adapters against the model with its adapters, and against their factors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, TrainableTokensConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from tiny import VOCABULARY, tiny_model, tiny_tokenizer
from uneven import uneven

from attnbalance import load_model, transplant_weights
from attnbalance.errors import ModelError
from attnbalance.models.bridge import bridge_of
from attnbalance.models.hooked import hook
from attnbalance.models.merge_adapters import merged

pytestmark = pytest.mark.filterwarnings("ignore:.*is outside")


IDS = torch.randint(VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(0))


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


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("on", [False, True])
def test_a_bridge_is_of_the_model_as_its_adapters_are_switched(native: bool, on: bool) -> None:
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["v_proj", "down_proj"], init_lora_weights=False)
    model = tiny_model("llama")
    if native:
        model.add_adapter(config)
    else:
        model = get_peft_model(model, config)
    layers = [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(on)
    with torch.no_grad():
        expected = model(IDS).logits[:, -1:]
        assert torch.equal(expected, tiny_model("llama")(IDS).logits[:, -1:]) != on
    found, _ = bridge_of(hook(model, tiny_tokenizer(), "adapted")).run(IDS, torch.ones_like(IDS), {})
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=1e-5)  # merging rounds the sums of two matrices
    assert [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)] == layers


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


TIED = [
    ("llama", ["embed_tokens"], False),
    ("llama", ["lm_head"], True),
    ("llama", ["embed_tokens", "lm_head"], False),
    ("gpt2", ["wte"], False),
]
"""Family, modules with LoRA, and whether peft is asked to keep them tied."""


@pytest.mark.parametrize(("family", "modules", "kept_tied"), TIED)
def test_an_adapter_on_tied_embeddings_is_refused(family: str, modules: list[str], kept_tied: bool) -> None:
    config = LoraConfig(r=2, target_modules=modules, init_lora_weights=False, ensure_weight_tying=kept_tied)
    base = hook(uneven(family, tie_word_embeddings=True), tiny_tokenizer(), "base")
    adapted = get_peft_model(uneven(family, tie_word_embeddings=True), config)
    tuned = hook(adapted, tiny_tokenizer(), "tuned")
    for take_apart in (bridge_of, lambda model: transplant_weights(model, base, ())):
        with pytest.raises(ModelError, match=rf"adapter of tuned must be on .*, got .*tied .*{modules[0]}"):
            take_apart(tuned)


def test_an_adapter_on_tied_embeddings_that_is_switched_off_is_left_out() -> None:
    model = uneven("llama", tie_word_embeddings=True)
    with torch.no_grad():
        expected = model(IDS).logits[:, -1:]
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
    adapted.base_model.disable_adapter_layers()
    found, _ = bridge_of(hook(adapted, tiny_tokenizer(), "off")).run(IDS, torch.ones_like(IDS), {})
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_adapters_of_single_tokens_are_merged_into_tied_embeddings() -> None:
    config = TrainableTokensConfig(target_modules=["embed_tokens"], token_indices=IDS[0].tolist())
    model = get_peft_model(uneven("llama", tie_word_embeddings=True), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "trainable_tokens" in name:
                parameter.add_(torch.ones_like(parameter))
        expected = model(IDS).logits[:, -1:]
    found, _ = bridge_of(hook(model, tiny_tokenizer(), "tokens")).run(IDS, torch.ones_like(IDS), {})
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=1e-5)


def adapted(**options) -> PeftModel:
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)
    return get_peft_model(tiny_model("llama"), config)


def assert_merged_as_it_computes(model: PeftModel) -> None:
    hooked = hook(model.eval(), tiny_tokenizer(), "adapted")
    names = [name for name, _ in model.named_modules()]
    with torch.no_grad():
        expected = model(IDS).logits
        merged_logits = merged(hooked)(IDS).logits
    torch.testing.assert_close(merged_logits, expected, atol=5e-5, rtol=1e-5)  # merging rounds the sums of two matrices
    assert [name for name, _ in model.named_modules()] == names


@pytest.mark.parametrize("saved", ["lm_head", "embed_tokens", "norm"])
@pytest.mark.parametrize("on", [False, True])
def test_trained_copies_of_whole_modules_count_only_while_adapters_are_on(saved: str, on: bool) -> None:
    model = adapted(modules_to_save=[saved])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(torch.randn(parameter.shape))
        assert (model(IDS).logits - tiny_model("llama")(IDS).logits).abs().max() > 0.1
    if not on:
        model.base_model.disable_adapter_layers()
    assert_merged_as_it_computes(model)


@pytest.mark.parametrize("switched", ["on", "off", "merged", "tokens off", "LoRA off"])
def test_trained_tokens_count_as_they_are_switched(switched: str) -> None:
    model = adapted(trainable_token_indices=list(range(40)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "trainable_tokens_delta" in name:
                parameter.add_(torch.randn(parameter.shape))
    assert (IDS < 40).any()
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    if switched == "merged":
        model.merge_adapter()
    elif switched != "on":
        for layer in layers:
            tokens = type(layer).__name__ == "TrainableTokensLayer"
            if switched == "off" or tokens == (switched == "tokens off"):
                layer.enable_adapters(False)
    assert_merged_as_it_computes(model)


def test_adapters_that_are_off_in_some_layers_are_left_out_there() -> None:
    model = adapted()
    for module in model.base_model.model.model.layers[0].modules():
        if isinstance(module, BaseTunerLayer):
            module.enable_adapters(False)
    assert model.get_model_status().enabled == "irregular"
    assert_merged_as_it_computes(model)


@pytest.mark.parametrize("off", [False, True])
def test_of_several_adapters_those_merged_before_are_all_that_count(off: bool) -> None:
    model = adapted()
    torch.manual_seed(1)
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])
    model.merge_adapter(["default"])
    if off:
        model.base_model.disable_adapter_layers()
    assert_merged_as_it_computes(model)
