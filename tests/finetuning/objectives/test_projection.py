"""Gradients without what takes attention off the subject, against arithmetic by hand and small steps of descent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from gradient_rules import ALONE, adapted, random
from objective_oracle import forward
from tiny import FACTS, tiny_model, tiny_tokenizer
from torch import Tensor, nn

from attnbalance import HookedModel
from attnbalance.finetuning.examples import Example, make_examples
from attnbalance.finetuning.objectives.gradients import GradientRules, without_harm
from attnbalance.finetuning.objectives.parse import parse_objective
from attnbalance.finetuning.parameters import select_weights, train_only
from attnbalance.models.hooked import hook


def dot(first: list[Tensor], second: list[Tensor]) -> float:
    return sum(float((a.double() * b.double()).sum()) for a, b in zip(first, second, strict=True))


def test_projection_by_hand() -> None:
    # g . t = 3 * 1 + 1 * 2 = 5 over t . t = 5 gives g - t
    projected = without_harm([torch.tensor([3.0, 1.0])], [torch.tensor([1.0, 2.0])])
    assert projected[0].tolist() == [2.0, -1.0]
    two = without_harm([torch.tensor([3.0]), torch.tensor([[1.0]])], [torch.tensor([1.0]), torch.tensor([[2.0]])])
    assert [tensor.tolist() for tensor in two] == [[2.0], [[-1.0]]]  # one vector over all tensors


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
    projected = without_harm(gradient, toward)
    # float32 entries of some 1, 17 of them
    assert dot(projected, toward) == pytest.approx(0, abs=1e-5)
    taken = [a - b for a, b in zip(gradient, projected, strict=True)]
    cosine = dot(taken, toward) / (dot(taken, taken) * dot(toward, toward)) ** 0.5
    assert cosine == pytest.approx(1, abs=1e-6)
    for a, b in zip(without_harm(projected, toward), projected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
    for a, b in zip(without_harm(gradient, [7 * t for t in toward]), projected, strict=True):  # its length says nothing
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def slopes_of(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]


def mean_share(model: HookedModel, examples: list[Example]) -> float:
    """The mean subject share, as a plain loop over examples, layers and heads in Python's floats."""
    with torch.no_grad():
        forward_pass = forward(model, examples)
    assert forward_pass.rows is not None
    shares = [
        sum(p for p, inside in zip(head, span, strict=True) if inside)
        for rows, span in zip(forward_pass.rows.tolist(), forward_pass.spans["subject"].tolist(), strict=True)
        for layer in rows
        for head in layer
    ]
    return sum(shares) / len(shares)


def harmful_examples(model: HookedModel, watched: list[nn.Parameter]) -> list[Example]:
    """Examples whose cross-entropy takes attention off their subject when W_Q and W_K descend it."""
    harmful = []
    for example in make_examples(FACTS, model.tokenizer):
        forward_pass = forward(model, [example])
        share, loss = forward_pass.share("subject").mean(), forward_pass.losses().mean()
        up = torch.autograd.grad(share, watched, retain_graph=True)
        if dot(list(torch.autograd.grad(loss, watched)), list(up)) > 0:
            harmful.append(example)
    return harmful


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
        with displaced(parameters, [-step / size * part for part in descent]):
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
    forward_pass = forward(model, examples)
    rules.collect(forward_pass, float(len(examples)))
    forward_pass.losses().mean().backward()
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
    with displaced(watched, [-0.01 / size * tensor for tensor in plain]):
        assert mean_share(model, examples) < before
    for parameter in model.model.parameters():
        if parameter.grad is not None and not any(parameter is tensor for tensor in watched):
            assert torch.equal(parameter.grad, others[id(parameter)])


def test_what_is_protected_is_the_gradient_of_the_mean_share_over_the_whole_step() -> None:
    model, watched = prepared("full")
    examples = make_examples(FACTS[:5], model.tokenizer)
    share = forward(model, examples).share("subject").mean()
    expected = torch.autograd.grad(share, watched)
    rules = GradientRules(model.model, parse_objective("ce + project"), None)
    for part in (examples[:2], examples[2:]):  # two batches that one step accumulates
        rules.collect(forward(model, part), float(len(examples)))
    index = {id(p): k for k, p in enumerate(rules.projected)}
    assert rules.toward is not None
    for parameter, wanted in zip(watched, expected, strict=True):
        # slopes of some 0.1 in float32, from two batches in place of one
        torch.testing.assert_close(rules.toward[index[id(parameter)]], wanted, atol=1e-6, rtol=1e-5)
        assert wanted.abs().max() > 1e-3
    rules.apply(ALONE)
    assert rules.toward is None  # the next step begins anew


def test_gradients_that_raise_the_share_are_not_touched() -> None:
    model, _ = prepared("full")
    examples = make_examples(FACTS[:4], model.tokenizer)
    rules = GradientRules(model.model, parse_objective("ce + project"), None)
    forward_pass = forward(model, examples)
    rules.collect(forward_pass, float(len(examples)))
    (-forward_pass.share("subject").mean()).backward()
    before = slopes_of(rules.projected)
    rules.apply(ALONE)
    for parameter, old in zip(rules.projected, before, strict=True):
        assert torch.equal(parameter.grad, old)


def test_fused_projections_are_changed_in_their_queries_and_keys_alone() -> None:
    model = hook(tiny_model("gpt2"), tiny_tokenizer(), "gpt2")
    examples = make_examples(FACTS[:4], model.tokenizer)
    rules = GradientRules(model.model, parse_objective("ce + project"), None)
    forward_pass = forward(model, examples)
    rules.collect(forward_pass, float(len(examples)))
    forward_pass.share("subject").mean().backward()  # descending this is nothing but harm
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
    forward_pass = forward(model, examples)
    rules.collect(forward_pass, float(len(examples)))
    (forward_pass.share("subject").mean() + 0.1 * forward_pass.losses().mean()).backward()  # descending it does harm
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
