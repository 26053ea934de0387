"""Rules of gradients against numpy, autograd and small steps of descent."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gradient_rules import ALONE, adapted, random
from tiny import tiny_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnbalance.errors import DataError, ModelError
from attnbalance.finetuning.objectives.gradients import GradientRules, low_rank
from attnbalance.finetuning.objectives.parse import parse_objective

SCALE = 3.0
"""What adapters of these tests are multiplied by: lora_alpha 6 over rank 2."""


# Low rank ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(7, 5), (5, 7), (6, 6), (1, 4)])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_low_rank_is_the_start_of_numpys_singular_value_decomposition(shape: tuple[int, int], rank: int) -> None:
    gradient = random(*shape)
    U, S, Vh = np.linalg.svd(gradient.double().numpy(), full_matrices=False)
    expected = sum(S[k] * np.outer(U[:, k], Vh[k]) for k in range(min(rank, *shape)))
    nearest = low_rank(gradient, rank)
    # Entries of some 1; float32 turns singular vectors by 1e-7 of the values over their distance, some 1 to 10 here.
    np.testing.assert_allclose(nearest.numpy(), expected, atol=1e-5, rtol=0)
    assert np.linalg.matrix_rank(nearest.double().numpy(), tol=1e-4) == min(rank, *shape)


@pytest.mark.parametrize("rank", [5, 6, 100])
def test_a_rank_that_no_matrix_exceeds_is_the_identity(rank: int) -> None:
    assert torch.equal(low_rank(random(7, 5), rank), random(7, 5))


def test_experts_that_share_one_tensor_get_a_rank_each() -> None:
    model = tiny_model("gpt_oss")
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape)
    before = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    GradientRules(model, parse_objective("ce"), 2).apply(None)
    stacked = [name for name, gradient in before.items() if gradient.dim() == 3]
    assert stacked
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        if name in stacked:
            assert set(torch.linalg.matrix_rank(parameter.grad).tolist()) == {2}
            torch.testing.assert_close(parameter.grad[1], low_rank(before[name][1], 2))
        elif parameter.dim() == 1:
            assert torch.equal(parameter.grad, before[name])


def test_a_rank_that_limits_no_trained_matrix_is_refused() -> None:
    """The MLP's matrices are 32 x 48; LoRA's are as narrow as its rank."""
    model = tiny_model("llama")
    highest = max(min(p.shape) for p in model.parameters() if p.dim() > 1)
    GradientRules(model, parse_objective("ce"), highest - 1)
    with pytest.raises(DataError, match=f"`gradient_rank` {highest} limits no gradient: the highest .* is {highest};"):
        GradientRules(model, parse_objective("ce"), highest)
    lora = adapted("llama", ["v_proj"])
    GradientRules(lora, parse_objective("ce"), 1)
    with pytest.raises(DataError, match="2 limits no gradient: the highest rank of a trained matrix is 2;"):
        GradientRules(lora, parse_objective("ce"), 2)


def test_a_matrix_of_low_rank_is_kept_and_the_dtype_too() -> None:
    matrix = torch.outer(random(7), random(5, seed=1))
    torch.testing.assert_close(low_rank(matrix, 1), matrix, atol=1e-6, rtol=0)
    half = low_rank(random(7, 5).bfloat16(), 1)
    assert half.dtype == torch.bfloat16
    # eight bits: off by 1 in 256
    torch.testing.assert_close(half.float(), low_rank(random(7, 5).bfloat16().float(), 1), rtol=1 / 128, atol=1e-6)


def test_no_matrix_of_that_rank_is_nearer() -> None:
    gradient = random(7, 5)
    left = (gradient - low_rank(gradient, 2)).square().sum()
    S = np.linalg.svd(gradient.numpy(), compute_uv=False)
    assert float(left) == pytest.approx(float((S[2:] ** 2).sum()), rel=1e-5)  # Eckart & Young
    for seed in range(20):
        other = random(7, 2, seed=seed) @ random(2, 5, seed=seed + 100)
        assert (gradient - other).square().sum() > left


# Rules in models -----------------------------------------------------------------------------------------------------


def moved(model: nn.Module) -> None:
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)


def queries_and_keys(model: PreTrainedModel, family: str) -> dict[str, Tensor]:
    """Masks of the entries of W_Q and W_K (and their biases), by the layouts of the modeling files."""
    masks = {}
    for name, parameter in model.named_parameters():
        mask = torch.zeros_like(parameter, dtype=torch.bool)
        if family == "llama" and (".q_proj." in name or ".k_proj." in name):
            mask[:] = True
        elif family == "gpt2" and ".c_attn." in name:
            mask[..., :64] = True  # a Conv1D [d_model, queries | keys | values], of 32 each
        elif family == "neox" and ".query_key_value." in name:
            for head in range(4):  # a head has its 8 queries, 8 keys and 8 values one behind the other
                mask[24 * head : 24 * head + 16] = True
        if mask.any():
            masks[name] = mask
    return masks


@pytest.mark.parametrize("family", ["llama", "gpt2", "neox"])
def test_the_weight_anchor_is_the_gradient_of_the_squared_distance_written_out(family: str) -> None:
    model = tiny_model(family)
    rules = GradientRules(model, parse_objective("ce + 0.7*weight-anchor"), None)
    masks = queries_and_keys(model, family)
    assert len(masks) >= 2
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    rules.apply(ALONE)
    assert not any(p.grad is not None and p.grad.any() for p in model.parameters())  # at its target there is no pull
    model.zero_grad()
    moved(model)
    own = dict(model.named_parameters())
    distance = sum(((own[name] - before[name])[mask] ** 2).sum() for name, mask in masks.items())
    expected = torch.autograd.grad(0.7 * distance, [own[name] for name in masks])  # pyright: ignore
    rules.apply(ALONE)
    for name, slope in zip(masks, expected, strict=True):
        # 2 x 0.7 x 0.1 or so, in float32
        torch.testing.assert_close(own[name].grad, slope, atol=1e-7, rtol=1e-6)
        assert slope[masks[name]].abs().min() > 0
    assert all(parameter.grad is None for name, parameter in own.items() if name not in masks)


def test_the_weight_anchor_is_added_to_the_gradient_that_is_there() -> None:
    model = tiny_model("llama")
    rules = GradientRules(model, parse_objective("ce + weight-anchor"), None)
    start = model.model.layers[0].self_attn.q_proj.weight.detach().clone()
    moved(model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.25)
    rules.apply(ALONE)
    query, value = (getattr(model.model.layers[0].self_attn, name).weight for name in ("q_proj", "v_proj"))
    torch.testing.assert_close(query.grad, 0.25 + 2 * (query.detach() - start), atol=1e-6, rtol=0)
    assert torch.equal(value.grad, torch.full_like(value, 0.25))


@pytest.mark.parametrize(
    ("family", "targets"),
    [("llama", ["q_proj", "k_proj", "v_proj"]), ("gpt2", ["c_attn"]), ("neox", ["query_key_value"])],
)
def test_under_lora_the_weight_anchor_is_that_of_the_merged_weights(family: str, targets: list[str]) -> None:
    model = adapted(family, targets)
    rules = GradientRules(model, parse_objective("ce + 0.7*weight-anchor"), None)
    own = dict(model.named_parameters())
    wanted: dict[str, Tensor] = {}
    distance = torch.zeros(())
    for name, mask in queries_and_keys(tiny_model(family), family).items():
        module = "base_model.model." + name.removesuffix(".weight")
        if f"{module}.lora_A.default.weight" not in own:
            continue  # biases are not adapted
        A, B = (own[f"{module}.lora_{factor}.default.weight"] for factor in "AB")
        wanted |= {f"{module}.lora_{factor}.default.weight": p for factor, p in (("A", A), ("B", B))}
        kept = own[f"{module}.base_layer.weight"]
        merged = kept + SCALE * (
            torch.einsum("ri,or->io", A, B) if family == "gpt2" else torch.einsum("ri,or->oi", A, B)
        )
        distance = distance + ((merged - kept)[mask] ** 2).sum()
    assert len(wanted) == (8 if family == "llama" else 4)
    expected = torch.autograd.grad(0.7 * distance, list(wanted.values()), allow_unused=True)
    rules.apply(ALONE)
    for (name, parameter), slope in zip(wanted.items(), expected, strict=True):
        # merged weights of some 1 lose the product's last digit: 1e-7 of 1, times 2 x 0.7 x 3 x factors below 1
        torch.testing.assert_close(parameter.grad, slope, atol=5e-6, rtol=1e-5, msg=name)
        assert slope.abs().max() > 0.01
    assert all(parameter.grad is None for name, parameter in own.items() if name not in wanted)


def test_a_rank_limits_matrices_and_leaves_vectors() -> None:
    model = tiny_model("gpt2")
    rules = GradientRules(model, parse_objective("ce"), 1)
    given = {}
    for k, (name, parameter) in enumerate(model.named_parameters()):
        given[name] = random(*parameter.shape, seed=k)
        if parameter.dim() == 2:  # one direction well above the others, so that float32 finds it to 1e-6
            given[name] += torch.outer(random(len(parameter), seed=k + 100), random(parameter.shape[1], seed=k + 200))
        parameter.grad = given[name].clone()
    rules.apply(ALONE)
    kinds = set()
    for name, parameter in model.named_parameters():
        kinds.add(parameter.dim())
        if parameter.dim() == 2:
            U, S, Vh = np.linalg.svd(given[name].double().numpy(), full_matrices=False)
            np.testing.assert_allclose(parameter.grad, S[0] * np.outer(U[:, 0], Vh[0]), atol=2e-5, rtol=0)
        else:
            assert torch.equal(parameter.grad, given[name])
    assert kinds == {1, 2}


@pytest.mark.parametrize("rank", [0, -3])
def test_a_rank_below_one_is_refused(rank: int) -> None:
    with pytest.raises(DataError, match=f"`gradient_rank` must be a whole number >= 1, got {rank}"):
        GradientRules(tiny_model("llama"), parse_objective("ce"), rank)


@pytest.mark.parametrize("text", ["ce + weight-anchor", "ce + project"])
def test_a_model_whose_queries_and_keys_are_frozen_is_refused(text: str) -> None:
    model = tiny_model("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" not in name and "k_proj" not in name)
    with pytest.raises(ModelError, match="acts on W_Q and W_K, but neither is trained"):
        GradientRules(model, parse_objective(text), None)
    with pytest.raises(ModelError, match="neither is trained"):
        GradientRules(adapted("llama", ["v_proj", "o_proj"]), parse_objective(text), None)
    GradientRules(model, parse_objective("ce"), 1)  # which needs none of them


def test_without_rules_gradients_stay_as_they_are() -> None:
    model = tiny_model("llama")
    rules = GradientRules(model, parse_objective("ce + floor"), None)
    assert rules.projected == []
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    rules.apply(ALONE)
    assert all(torch.equal(parameter.grad, torch.ones_like(parameter)) for parameter in model.parameters())
