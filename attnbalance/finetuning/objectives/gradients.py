"""Rules that change a gradient before the optimizer uses it: projection, weight anchor, low rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from attnbalance.errors import DataError, ModelError
from attnbalance.finetuning.objectives.forward_pass import ForwardPass
from attnbalance.finetuning.objectives.objective import SUBJECT_ROWS, Needs, Objective, TermKind
from attnbalance.finetuning.parameters import select_weights
from attnbalance.models.forward import base_of

WEIGHT_ANCHOR = TermKind("weight-anchor", None, Needs(initial_weights=True))
PROJECT = TermKind("project", None, SUBJECT_ROWS)


def low_rank(gradient: Float[Tensor, "... row column"], rank: int) -> Float[Tensor, "... row column"]:
    """The best approximation of each matrix by one of this rank (Eckart & Young), in the gradient's dtype.

    Xu & Chen (2025, appendix H) finetune with rank 1 and show that it keeps the question format, which is the largest
    direction, and drops what single facts add. Each step costs a singular value decomposition of every matrix.
    """
    if min(gradient.shape[-2:]) <= rank:
        return gradient
    U, S, Vh = torch.linalg.svd(gradient.float(), full_matrices=False)
    return ((U[..., :rank] * S[..., None, :rank]) @ Vh[..., :rank, :]).to(gradient.dtype)


def without_harm(
    gradient: Sequence[Float[Tensor, ...]], toward: Sequence[Float[Tensor, ...]]
) -> list[Float[Tensor, ...]]:
    """A gradient without the part whose descent lowers a number; `toward` is that number's own gradient.

    Descent along the gradient g lowers the number if g . t > 0. The result is then g - (g . t / t . t) t, whose descent
    leaves the number unchanged to first order (the projection of gradient surgery, Yu et al. 2020); otherwise g itself.
    Both are taken as one vector over all tensors.
    """
    along = sum(((g.double() * t.double()).sum() for g, t in zip(gradient, toward, strict=True)), start=torch.zeros(()))
    size = sum((t.double().square().sum() for t in toward), start=torch.zeros(()))
    if not float(along) > 0 or not float(size) > 0:
        return list(gradient)
    step = float(along / size)
    return [g - step * t.to(g) for g, t in zip(gradient, toward, strict=True)]


@dataclass(frozen=True)
class _Whole:
    """A trained parameter that holds queries or keys."""

    parameter: nn.Parameter
    """The parameter."""
    mask: Bool[Tensor, ...] | None
    """Its entries that hold queries or keys; None: all."""
    start: Tensor
    """Its value before training."""


@dataclass(frozen=True)
class _Adapted:
    """An adapter on a parameter that holds queries or keys: it adds scale B A."""

    A: nn.Parameter
    """The factor of the inputs."""
    B: nn.Parameter
    """The factor of the outputs."""
    scale: float
    """The factor of the product."""
    transposed: bool
    """Whether the product is transposed before it is added."""
    mask: Bool[Tensor, ...] | None
    """The parameter's entries that hold queries or keys; None: all."""

    def pulls(self, anchor: float) -> tuple[Tensor, ...]:
        """The gradient of anchor x |scale B A|^2 for A and for B."""
        A, B = self.A.detach().requires_grad_(), self.B.detach().requires_grad_()
        with torch.enable_grad():
            change = self.scale * (B @ A)
            change = change.T if self.transposed else change
            squared = change.square() if self.mask is None else change.square() * self.mask.to(change)
            return torch.autograd.grad(anchor * squared.sum(), (A, B))


class GradientRules:
    """Applies the terms `project` and `weight-anchor`, and a limit of rank, to the gradient of each step.

    `project`: removes from the gradient of W_Q and W_K the part that lowers the mean subject share of the rows
    (`without_harm`). In plain gradient descent it keeps attention to first order. Adam rescales every entry, and other
    trained weights move the rows too. In these cases it only slows the loss of attention. It costs a second backward
    pass, and cannot restore what is lost. `weight-anchor`: adds the gradient of the summed squared distance of W_Q and
    W_K from their initial values (L2-SP, Li et al. 2018); under LoRA, of the adapters' product. It holds the weights,
    not their function: other weights may change what they read.

    Raises `DataError` for a rank below 1 and for one that limits no trained matrix, `ModelError` if W_Q and W_K are not
    trained.
    """

    def __init__(self, model: nn.Module, objective: Objective, rank: int | None) -> None:
        if rank is not None and rank < 1:
            raise DataError(f"`gradient_rank` must be a whole number >= 1, got {rank}")
        if rank is not None and rank >= (highest := _highest_rank(model)):
            raise DataError(
                f"`gradient_rank` {rank} limits no gradient: the highest rank of a trained matrix is {highest}; lower "
                "it, or leave it out"
            )
        self.rank, self.model = rank, model
        self.anchor, self.projects = objective.weight(WEIGHT_ANCHOR), objective.weight(PROJECT) > 0
        self.toward: list[Tensor] | None = None
        self.whole: list[_Whole] = []
        self.adapted: list[_Adapted] = []
        if self.anchor or self.projects:
            self.whole, self.adapted = _queries_and_keys(model)
            if not self.whole and not self.adapted:
                raise ModelError(f"objective {objective.text!r} acts on W_Q and W_K, but neither is trained")

    @property
    def projected(self) -> list[nn.Parameter]:
        """The parameters whose gradient is projected."""
        return [whole.parameter for whole in self.whole] + [p for pair in self.adapted for p in (pair.A, pair.B)]

    def collect(self, forward: ForwardPass, examples: float) -> None:
        """Add a batch's gradient of the mean subject share, before the loss's own backward pass."""
        if not self.projects:
            return
        share = forward.share("subject").mean((-1, -2)).sum() / examples
        gradients = torch.autograd.grad(share, self.projected, retain_graph=True, allow_unused=True)
        parts = [torch.zeros_like(p) if g is None else g for p, g in zip(self.projected, gradients, strict=True)]
        masks = [whole.mask for whole in self.whole] + [None] * (2 * len(self.adapted))
        parts = [g if mask is None else g * mask.to(g) for g, mask in zip(parts, masks, strict=True)]
        self.toward = parts if self.toward is None else [a + b for a, b in zip(self.toward, parts, strict=True)]

    def apply(self, accelerator: Any) -> None:
        """Change the gradient that a whole step has summed; `accelerator` knows the other processes.

        The rank comes first, so that it does not cut off what `weight-anchor` adds and `project` protects.
        """
        if self.rank is not None:
            for parameter in self.model.parameters():
                if parameter.grad is not None and parameter.dim() > 1:  # experts share one tensor
                    parameter.grad = low_rank(parameter.grad, self.rank)
        if self.anchor:
            self._pull()
        if self.projects and self.toward is not None:
            self._project([accelerator.reduce(gradient, "mean") for gradient in self.toward])
            self.toward = None

    def _project(self, toward: Sequence[Tensor]) -> None:
        """Remove what lowers the mean subject share, whose gradient is `toward`."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.projected]
        moving = [t * (g != 0) for t, g in zip(toward, gradients, strict=True)]  # frozen entries have gradient 0
        for parameter, gradient in zip(self.projected, without_harm(gradients, moving), strict=True):
            parameter.grad = gradient

    def _pull(self) -> None:
        """Add the gradient of anchor x |W - W_0|^2."""
        for whole in self.whole:
            pull = 2 * self.anchor * (whole.parameter.detach() - whole.start)
            _add(whole.parameter, pull if whole.mask is None else pull * whole.mask.to(pull))
        for pair in self.adapted:
            for parameter, pull in zip((pair.A, pair.B), pair.pulls(self.anchor), strict=True):
                _add(parameter, pull)


def _highest_rank(model: nn.Module) -> int:
    """The highest rank that the gradient of a trained matrix can have; 0 if only vectors are trained."""
    return max((min(p.shape[-2:]) for p in model.parameters() if p.requires_grad and p.dim() > 1), default=0)


def _add(parameter: nn.Parameter, gradient: Tensor) -> None:
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _queries_and_keys(model: nn.Module) -> tuple[list[_Whole], list[_Adapted]]:
    """The trained part of W_Q and W_K: parameters themselves, and adapters on them."""
    base = base_of(model)
    with torch.device("meta"):
        bare = type(base)(base.config)  # without adapters, whose layers would hide the projections
    masks = select_weights(bare, "qk").masks
    plain = {name.replace(".base_layer", ""): parameter for name, parameter in base.named_parameters()}
    if gone := [name for name in masks if name not in plain]:
        raise ModelError(
            f"project and weight-anchor act on {gone[0]}, of which modules_to_save trains a copy; leave it out there"
        )
    whole = [
        _Whole(plain[name], mask if mask is None else mask.to(plain[name].device), plain[name].detach().clone())
        for name, mask in masks.items()
        if plain[name].requires_grad
    ]
    adapted = [
        pair
        for name, module in base.named_modules()
        if f"{name}.weight" in masks and hasattr(module, "lora_A")
        for pair in _adapters(module, masks[f"{name}.weight"])
    ]
    return whole, adapted


def _adapters(module: Any, mask: Bool[Tensor, ...] | None) -> Iterator[_Adapted]:
    """The trained adapters of a LoRA layer."""
    for name in module.lora_A:
        A, B = module.lora_A[name].weight, module.lora_B[name].weight
        if A.requires_grad or B.requires_grad:
            transposed = bool(getattr(module, "fan_in_fan_out", False))
            on_device = mask if mask is None else mask.to(A.device)
            yield _Adapted(A, B, float(module.scaling[name]), transposed, on_device)
