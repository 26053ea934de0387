"""A bridge's weights against what the transformers model itself computes, caught by hooks of torch."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tiny import FAMILIES, VOCABULARY, eager, tiny_tokenizer
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel
from uneven import hooked, uneven

from attnbalance import load_model
from attnbalance.errors import ModelError
from attnbalance.models import bridge as bridges
from attnbalance.models.bridge import bridge_of
from attnbalance.models.bridge_weights import Weights

pytestmark = pytest.mark.filterwarnings("ignore:.*is outside")


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


@pytest.mark.parametrize("by", [0.01, torch.nan])
@pytest.mark.parametrize(("field", "what"), [("W_V", "values"), ("b_V", "values"), ("W_O", "head outputs")])
def test_weights_that_do_not_reproduce_the_model_are_refused(
    field: str, what: str, by: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, user = bridges.weights_of, hooked("qwen2")

    def wrong(bridge: object) -> Weights:
        weights = right(bridge)
        damaged = getattr(weights, field).clone()
        damaged[1, 2] += by
        return dataclasses.replace(weights, **{field: damaged})

    bridge_of(user)
    monkeypatch.setattr(bridges, "weights_of", wrong)
    with pytest.raises(ModelError, match=f"Qwen2ForCausalLM: {what} of layer 1 made from its weights differ from"):
        bridge_of(user)


def test_half_precision_is_copied_into_float32() -> None:
    model = uneven("llama").to(torch.bfloat16)
    weights = bridge_of(load_model(model, tokenizer=tiny_tokenizer())).weights
    own = model.model.layers[1].self_attn.q_proj.weight.float()
    assert weights.W_Q.dtype == torch.float32
    assert torch.equal(weights.W_Q[1], own.T.reshape(32, 4, 8).transpose(0, 1))
