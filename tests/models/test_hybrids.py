"""Hybrids made in place against copies whose weights were exchanged one by one."""

from __future__ import annotations

import copy
from itertools import combinations

import pytest
import torch
import transformers
from tiny import GROUPED, VOCABULARY, tiny_config
from torch import Tensor
from transformers import PretrainedConfig
from uneven import hooked

from attnbalance import HookedModel
from attnbalance.errors import ModelError
from attnbalance.models.bridge import BridgedModel, bridge_of
from attnbalance.models.hybrids import hybrids_of
from attnbalance.models.weights import PARTS, transplants, weight_parts

pytestmark = pytest.mark.filterwarnings("ignore:.*is outside")

KINDS = {
    "phi3": transformers.Phi3Config(**GROUPED, pad_token_id=None),
    "glm4_moe": transformers.Glm4MoeConfig(
        **GROUPED,
        head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        pad_token_id=None,
    ),
} | {family: tiny_config(family) for family in ("llama", "gpt2", "neox", "gemma2", "gpt_oss", "falcon", "bloom")}
"""Fused projections of several layouts, an MLP of experts with a router's bias, tied and untied embeddings."""

IDS = torch.randint(VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(0))
# Logits are sums of some 100 float32 products, in another order here and there: off by some 1e-6 of the largest.
TOLERANCE = 1e-5


def logits(model: HookedModel) -> Tensor:
    with torch.no_grad():
        return model.model(IDS, use_cache=False).logits[:, -1]


def bridged_logits(model: BridgedModel) -> Tensor:
    with torch.no_grad():
        return model.run(IDS, torch.ones_like(IDS), {})[0][:, -1]


def near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=TOLERANCE * float(expected.abs().max()), rtol=0)


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest) -> tuple[HookedModel, HookedModel]:
    """Two models of one family in all of whose parts something differs, also what is no weight."""
    config: PretrainedConfig = KINDS[request.param]
    first, second = hooked(config), hooked(config, seed=3)
    for name, buffer in second.model.named_buffers():
        if "correction" in name:
            buffer.copy_(torch.arange(buffer.numel(), dtype=buffer.dtype))
    return first, second


def test_hybrids_in_place_are_what_copies_with_exchanged_weights_are(pair: tuple[HookedModel, HookedModel]) -> None:
    first, second = pair
    hybrids = hybrids_of(first, second)
    assert hybrids.differing == PARTS
    combinations_of_parts = [some for size in range(5) for some in combinations(PARTS, size)]
    copies = transplants(first, second, weight_parts(first), combinations_of_parts)
    seen = []
    for some, whole in zip(combinations_of_parts, copies, strict=True):
        with hybrids.taking(some) as hybrid:
            near(bridged_logits(hybrid), logits(whole))
            seen.append(bridged_logits(hybrid))
            if len(some) == 2 and "rest" in some:
                stacked = bridge_of(whole).weights
                for name in ("W_O", "b_O", "W_V", "W_U", "b_U", "W_Q", "b_K"):
                    assert torch.equal(getattr(hybrid.weights, name), getattr(stacked, name))
    assert all((one - other).abs().max() > 0.01 for one, other in combinations(seen, 2))
    near(seen[0], logits(first))  # none and all of the parts are the two models themselves
    near(seen[-1], logits(second))


def test_a_hybrid_leaves_both_bridges_as_they_were() -> None:
    first, second = hooked("gpt2"), hooked("gpt2", seed=3)
    hybrids = hybrids_of(first, second)
    before = [bridged_logits(one) for one in (hybrids.before, hybrids.after)]
    with pytest.raises(KeyboardInterrupt), hybrids.taking(("mlp", "rest")) as hybrid:
        assert not torch.equal(bridged_logits(hybrid), before[1])
        raise KeyboardInterrupt
    for one, expected in zip((hybrids.before, hybrids.after), before, strict=True):
        assert torch.equal(bridged_logits(one), expected)


def test_models_that_differ_in_a_buffer_or_a_setting_alone_differ_in_the_rest() -> None:
    first = hooked("llama")
    assert hybrids_of(first, copy.deepcopy(first)).differing == ()
    assert hybrids_of(first, hooked("llama", rms_norm_eps=0.1)).differing == ("rest",)
    second = copy.deepcopy(first)
    dict(second.model.named_buffers())["model.rotary_emb.inv_freq"].mul_(2)
    assert hybrids_of(first, second).differing == ("rest",)


def test_models_of_different_heads_or_classes_are_refused_by_name() -> None:
    first = hooked("mistral", head_dim=8)
    for other, why in (
        (
            hooked("mistral", num_attention_heads=2, num_key_value_heads=1, head_dim=16),
            "num_attention_heads is 4 and 2",
        ),
        (hooked("llama"), "a MistralForCausalLM and a LlamaForCausalLM"),
    ):
        with pytest.raises(ModelError, match=rf"of different shapes \({why}"):
            hybrids_of(first, other)


def test_two_factors_of_what_layers_write_are_refused_and_one_is_not() -> None:
    """Bridges put Granite's factor into weights, where a change of it would count as theirs."""
    first, same, other = (
        hooked(transformers.GraniteConfig(**GROUPED, residual_multiplier=factor, pad_token_id=None))
        for factor in (0.5, 0.5, 0.3)
    )
    assert hybrids_of(first, same).differing == ()
    with pytest.raises(ModelError, match=r"must have one residual_multiplier, got 0\.5 and 0\.3"):
        hybrids_of(first, other)
