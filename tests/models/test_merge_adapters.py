"""Merged adapters against the model with its adapters, and against their factors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from tiny import VOCABULARY, tiny_model, tiny_tokenizer

from attnbalance import load_model
from attnbalance.models.bridge import bridge_of
from attnbalance.models.hooked import hook

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
