"""Rules of gradients against numpy, autograd and small steps of descent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import FACTS, tiny_model, tiny_tokenizer
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnbalance import HookedModel
from attnbalance.errors import DataError, ModelError
from attnbalance.finetuning.examples import INPUTS, QUERY, SPAN, Example, collate, make_examples
from attnbalance.finetuning.objectives.forward_pass import ForwardPass
from attnbalance.finetuning.objectives.gradients import GradientRules, low_rank, without_harm
from attnbalance.finetuning.objectives.parse import parse_objective
from attnbalance.finetuning.parameters import select_weights, train_only
from attnbalance.models.forward import rows_of_output
from attnbalance.models.hooked import hook

ALONE = SimpleNamespace(reduce=lambda tensor, how: tensor)
"""Stands for accelerate in one process, where a mean over processes is the tensor itself."""

SCALE = 3.0
"""What adapters of these tests are multiplied by: lora_alpha 6 over rank 2."""


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# Low rank ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(7, 5), (5, 7), (6, 6), (1, 4)])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_low_rank_is_the_start_of_numpys_singular_value_decomposition(shape: tuple[int, int], rank: int) -> None:
    gradient = random(*shape)
    U, S, Vh = np.linalg.svd(gradient.double().numpy(), full_matrices=False)
    expected = sum(S[k] * np.outer(U[:, k], Vh[k]) for k in range(min(rank, *shape)))
    found = low_rank(gradient, rank)
    # Entries of some 1; float32 turns singular vectors by 1e-7 of the values over their distance, some 1 to 10 here.
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5, rtol=0)
    assert np.linalg.matrix_rank(found.double().numpy(), tol=1e-4) == min(rank, *shape)


@pytest.mark.parametrize("rank", [5, 6, 100])
def test_a_rank_that_no_matrix_exceeds_is_the_identity(rank: int) -> None:
    assert torch.equal(low_rank(random(7, 5), rank), random(7, 5))


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


# Projection ----------------------------------------------------------------------------------------------------------


def dot(first: list[Tensor], second: list[Tensor]) -> float:
    return sum(float((a.double() * b.double()).sum()) for a, b in zip(first, second, strict=True))


def test_projection_by_hand() -> None:
    # g . t = 3 * 1 + 1 * 2 = 5 over t . t = 5 gives g - t
    found = without_harm([torch.tensor([3.0, 1.0])], [torch.tensor([1.0, 2.0])])
    assert found[0].tolist() == [2.0, -1.0]
    two = without_harm([torch.tensor([3.0]), torch.tensor([[1.0]])], [torch.tensor([1.0]), torch.tensor([[2.0]])])
    assert [one.tolist() for one in two] == [[2.0], [[-1.0]]]  # one vector over all tensors


def test_what_does_no_harm_is_left_as_it_is() -> None:
    toward = [random(4, 3), random(5)]
    for gradient in ([-t for t in toward], [torch.zeros_like(t) for t in toward]):
        assert all(torch.equal(a, b) for a, b in zip(without_harm(gradient, toward), gradient, strict=True))
    nothing = [torch.zeros_like(t) for t in toward]
    assert all(torch.equal(a, b) for a, b in zip(without_harm(toward, nothing), toward, strict=True))


def test_projection_leaves_no_harm_takes_nothing_else_and_is_done_after_once() -> None:
    toward = [random(4, 3), random(5, seed=1)]
    gradient = [t + random(*t.shape, seed=9) for t in toward]
    assert dot(gradient, toward) > 1
    found = without_harm(gradient, toward)
    # float32 entries of some 1, 17 of them
    assert dot(found, toward) == pytest.approx(0, abs=1e-5)
    taken = [a - b for a, b in zip(gradient, found, strict=True)]
    cosine = dot(taken, toward) / (dot(taken, taken) * dot(toward, toward)) ** 0.5
    assert cosine == pytest.approx(1, abs=1e-6)
    for a, b in zip(without_harm(found, toward), found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
    for a, b in zip(without_harm(gradient, [7 * t for t in toward]), found, strict=True):  # its length says nothing
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


# Rules in models -----------------------------------------------------------------------------------------------------


def adapted(family: str, targets: list[str]) -> PeftModel:
    torch.manual_seed(4)
    settings = LoraConfig(r=2, lora_alpha=6, target_modules=targets, init_lora_weights=False)
    model = get_peft_model(tiny_model(family), settings)
    assert isinstance(model, PeftModel)
    return model


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
        place = "base_model.model." + name.removesuffix(".weight")
        if f"{place}.lora_A.default.weight" not in own:
            continue  # biases are not adapted
        A, B = (own[f"{place}.lora_{factor}.default.weight"] for factor in "AB")
        wanted |= {f"{place}.lora_{factor}.default.weight": p for factor, p in (("A", A), ("B", B))}
        kept = own[f"{place}.base_layer.weight"]
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


@pytest.mark.parametrize("text", ["ce + weight-anchor", "ce + 2*project"])
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


# Projection in models ------------------------------------------------------------------------------------------------


def forward(model: HookedModel, examples: list[Example]) -> ForwardPass:
    batch = collate(examples, model.pad_id)
    inputs = {name: batch[name] for name in INPUTS}
    output = model.model(**inputs, **{QUERY: batch[QUERY]}, output_attentions=True, use_cache=False)
    example, place = (batch["labels"][:, 1:] != -100).nonzero().unbind(-1)
    rows = rows_of_output(output, model.kernel, batch[QUERY], batch["attention_mask"] != 0)
    spans = {name.removeprefix(SPAN): part for name, part in batch.items() if name.startswith(SPAN)}
    logits, labels = output.logits[example, place], batch["labels"][example, place + 1]
    return ForwardPass(logits, labels, example, len(examples), rows, None, spans, {})


def slopes_of(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]


def mean_share(model: HookedModel, examples: list[Example]) -> float:
    """The mean subject share, as a plain loop over examples, layers and heads in Python's floats."""
    with torch.no_grad():
        found = forward(model, examples)
    assert found.rows is not None
    shares = [
        sum(p for p, inside in zip(head, span, strict=True) if inside)
        for rows, span in zip(found.rows.tolist(), found.spans["subject"].tolist(), strict=True)
        for layer in rows
        for head in layer
    ]
    return sum(shares) / len(shares)


def harmful_examples(model: HookedModel, watched: list[nn.Parameter]) -> list[Example]:
    """Examples whose cross-entropy takes attention off their subject when W_Q and W_K descend it."""
    found = []
    for example in make_examples(FACTS, model.tokenizer):
        one = forward(model, [example])
        share, loss = one.share("subject").mean(), one.losses().mean()
        up = torch.autograd.grad(share, watched, retain_graph=True)
        if dot(list(torch.autograd.grad(loss, watched)), list(up)) > 0:
            found.append(example)
    return found


@contextmanager
def displaced(parameters: list[nn.Parameter], by: list[Tensor]) -> Iterator[None]:
    kept = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter, step in zip(parameters, by, strict=True):
            parameter += step
        yield
        for parameter, old in zip(parameters, kept, strict=True):
            parameter.copy_(old)


def slope(model: HookedModel, examples: list[Example], parameters: list[nn.Parameter], descent: list[Tensor]) -> float:
    """How fast the mean share changes along a step of descent of unit length: central difference."""
    size = dot(descent, descent) ** 0.5
    shares = []
    for step in (0.01, -0.01):
        with displaced(parameters, [-step / size * one for one in descent]):
            shares.append(mean_share(model, examples))
    return (shares[0] - shares[1]) / 0.02


def prepared(kind: str) -> tuple[HookedModel, list[nn.Parameter]]:
    """A hooked model, full or with adapters on W_Q and W_K alone, and what is trained of W_Q and W_K."""
    model: nn.Module = tiny_model("llama") if kind == "full" else adapted("llama", ["q_proj", "k_proj"])
    watched = [p for name, p in model.named_parameters() if p.requires_grad and ("q_proj" in name or "k_proj" in name)]
    assert len(watched) == (4 if kind == "full" else 8)
    return hook(model, tiny_tokenizer(), kind), watched


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_projected_step_leaves_the_subjects_share_where_it_would_fall_without(kind: str) -> None:
    model, watched = prepared(kind)
    examples = harmful_examples(model, watched)
    assert len(examples) >= 2
    rules = GradientRules(model.model, parse_objective("ce + project"), None)
    assert {id(p) for p in rules.projected} == {id(p) for p in watched}
    found = forward(model, examples)
    rules.collect(found, float(len(examples)))
    found.losses().mean().backward()
    plain = slopes_of(watched)
    others = {id(p): p.grad.clone() for p in model.model.parameters() if p.grad is not None}
    rules.apply(ALONE)
    projected = slopes_of(watched)
    falling = slope(model, examples, watched, plain)
    # Central differences over 0.01 of shares that are off by 1e-8 each know slopes to 1e-5, and their third order
    # adds some 1e-4 of the curvature; the slope that the rule takes away is a hundred times as large.
    assert falling < -0.003
    assert abs(slope(model, examples, watched, projected)) < -0.01 * falling
    assert dot(projected, projected) > 0.1 * dot(plain, plain)  # and it still descends the loss
    size = dot(plain, plain) ** 0.5
    before = mean_share(model, examples)
    with displaced(watched, [-0.01 / size * one for one in plain]):
        assert mean_share(model, examples) < before
    for parameter in model.model.parameters():
        if parameter.grad is not None and not any(parameter is one for one in watched):
            assert torch.equal(parameter.grad, others[id(parameter)])


def test_what_is_protected_is_the_gradient_of_the_mean_share_over_the_whole_step() -> None:
    model, watched = prepared("full")
    examples = make_examples(FACTS[:5], model.tokenizer)
    share = forward(model, examples).share("subject").mean()
    expected = torch.autograd.grad(share, watched)
    rules = GradientRules(model.model, parse_objective("ce + project"), None)
    for part in (examples[:2], examples[2:]):  # two batches that one step accumulates
        rules.collect(forward(model, part), float(len(examples)))
    place = {id(p): k for k, p in enumerate(rules.projected)}
    assert rules.toward is not None
    for parameter, wanted in zip(watched, expected, strict=True):
        # slopes of some 0.1 in float32, from two batches in place of one
        torch.testing.assert_close(rules.toward[place[id(parameter)]], wanted, atol=1e-6, rtol=1e-5)
        assert wanted.abs().max() > 1e-3
    rules.apply(ALONE)
    assert rules.toward is None  # the next step begins anew


def test_gradients_that_raise_the_share_are_not_touched() -> None:
    model, _ = prepared("full")
    examples = make_examples(FACTS[:4], model.tokenizer)
    rules = GradientRules(model.model, parse_objective("ce + project"), None)
    found = forward(model, examples)
    rules.collect(found, float(len(examples)))
    (-found.share("subject").mean()).backward()
    before = slopes_of(rules.projected)
    rules.apply(ALONE)
    for parameter, old in zip(rules.projected, before, strict=True):
        assert torch.equal(parameter.grad, old)


def test_fused_projections_are_changed_in_their_queries_and_keys_alone() -> None:
    model = hook(tiny_model("gpt2"), tiny_tokenizer(), "gpt2")
    examples = make_examples(FACTS[:4], model.tokenizer)
    rules = GradientRules(model.model, parse_objective("ce + project"), None)
    found = forward(model, examples)
    rules.collect(found, float(len(examples)))
    found.share("subject").mean().backward()  # descending this is nothing but harm
    before = slopes_of(rules.projected)
    rules.apply(ALONE)
    for new, old in zip(slopes_of(rules.projected), before, strict=True):
        assert torch.equal(new[..., 64:], old[..., 64:])  # values
        # all of it is taken away: what is left is rounding of slopes of some 0.1
        torch.testing.assert_close(new[..., :64], torch.zeros_like(old[..., :64]), atol=1e-6, rtol=0)
    assert max(float(old[..., :64].abs().max()) for old in before) > 1e-2
    assert max(float(old[..., 64:].abs().max()) for old in before) > 1e-3


def test_entries_that_are_not_trained_take_no_part_in_the_projection() -> None:
    plain = tiny_model("llama")
    frozen = train_only(plain, select_weights(plain, "q@0.1,1.2"))
    model = hook(plain, tiny_tokenizer(), "two heads")
    watched = [layer.self_attn.q_proj.weight for layer in plain.model.layers]
    examples = make_examples(FACTS, model.tokenizer)
    rules = GradientRules(plain, parse_objective("ce + project"), None)
    found = forward(model, examples)
    rules.collect(found, float(len(examples)))
    (found.share("subject").mean() + 0.1 * found.losses().mean()).backward()  # descending it does harm
    frozen.mask_gradients(plain)
    masked = slopes_of(watched)
    rules.apply(ALONE)
    for layer, head in ((0, 1), (1, 2)):
        others = [h for h in range(4) if h != head]
        assert not watched[layer].grad.view(4, 8, 32)[others].any()
        assert watched[layer].grad.view(4, 8, 32)[head].any()
    projected = slopes_of(watched)
    falling = slope(model, examples, watched, masked)
    assert falling < -0.003
    assert abs(slope(model, examples, watched, projected)) < -0.01 * falling  # as above


def test_several_processes_share_what_is_protected() -> None:
    model, _ = prepared("full")
    rules = GradientRules(model.model, parse_objective("ce + project"), None)
    rules.toward = [torch.zeros_like(p) for p in rules.projected]
    other = [torch.ones_like(p) for p in rules.projected]  # what another process has found
    asked = []

    def reduce(tensor: Tensor, how: str) -> Tensor:
        asked.append(how)
        return (tensor + other[len(asked) - 1]) / 2

    for parameter in rules.projected:
        parameter.grad = torch.ones_like(parameter)
    rules.apply(SimpleNamespace(reduce=reduce))
    assert asked == ["mean"] * len(other)
    for parameter in rules.projected:
        torch.testing.assert_close(parameter.grad, torch.zeros_like(parameter), atol=1e-6, rtol=0)
