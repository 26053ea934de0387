"""Rules that change a gradient before the optimizer sees it: projection, weight anchor, low rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from attnbalance.errors import DataError, ModelError
from attnbalance.finetune.objectives import ForwardPass, Objective
from attnbalance.finetune.parameters import choose
from attnbalance.models.forward import base_of


def low_rank(gradient: Float[Tensor, "row column"], rank: int) -> Float[Tensor, "row column"]:
    """The best approximation of a gradient by a matrix of this rank (Eckart & Young), in the gradient's dtype.

    Xu & Chen (2025, appendix H) finetune with rank 1 and show that it keeps the question format, which is the
    largest direction, while it leaves out what single facts add. It costs a singular value decomposition of every
    matrix in every step.
    """
    if min(gradient.shape) <= rank:
        return gradient
    U, S, Vh = torch.linalg.svd(gradient.float(), full_matrices=False)
    return ((U[:, :rank] * S[:rank]) @ Vh[:rank]).to(gradient.dtype)


def without_harm(
    gradient: Sequence[Float[Tensor, ...]], toward: Sequence[Float[Tensor, ...]]
) -> list[Float[Tensor, ...]]:
    """A gradient without the part that lowers a number whose own gradient is `toward`.

    Descent along the gradient g lowers the number where g . t > 0; then g - (g . t / t . t) t, whose descent leaves it
    as it is to first order (the projection of gradient surgery, Yu et al. 2020). Otherwise g itself. Both are taken as
    one vector over all tensors.
    """
    along = sum(((g.double() * t.double()).sum() for g, t in zip(gradient, toward, strict=True)), start=torch.zeros(()))
    size = sum((t.double().square().sum() for t in toward), start=torch.zeros(()))
    if not float(along) > 0 or not float(size) > 0:
        return list(gradient)
    step = float(along / size)
    return [g - step * t.to(g) for g, t in zip(gradient, toward, strict=True)]


@dataclass(frozen=True)
class _Whole:
    """A trained parameter that holds queries or keys, which of its entries do (None: all), and where it began."""

    parameter: nn.Parameter
    mask: Bool[Tensor, ...] | None
    start: Tensor


@dataclass(frozen=True)
class _Adapted:
    """The two factors of an adapter on such a parameter: it adds scale B A, transposed where `transposed`."""

    A: nn.Parameter
    B: nn.Parameter
    scale: float
    transposed: bool
    mask: Bool[Tensor, ...] | None


class GradientRules:
    """What an objective's terms `project` and `weight-anchor`, and a limit of rank, do to the gradient of each step.

    `project`: drops from the gradient of W_Q and W_K the part that lowers the mean subject share of the rows
    (`without_harm`). It keeps attention to first order in plain gradient descent; Adam rescales every entry, and other
    trained weights move the rows too, so there it slows the loss of attention only. It takes a second backward pass,
    and cannot restore what was lost. `weight-anchor`: adds the gradient of the summed squared distance of W_Q and W_K
    from where they began (L2-SP, Li et al. 2018); under LoRA of the adapters' product. It holds the weights, not what
    they are used for: other weights may change what they read.

    Raises `DataError` for a rank below 1 and `ModelError` where none of W_Q and W_K is trained.
    """

    def __init__(self, model: nn.Module, objective: Objective, rank: int | None) -> None:
        if rank is not None and rank < 1:
            raise DataError(f"the rank of gradients is at least 1, got {rank}")
        self.rank, self.model = rank, model
        self.anchor, self.projects = objective.weight("weight-anchor"), objective.weight("project") > 0
        self.toward: list[Tensor] | None = None
        self.pairs: list[_Whole] = []
        self.adapted: list[_Adapted] = []
        if self.anchor or self.projects:
            self.pairs, self.adapted = _queries_and_keys(model)
            if not self.pairs and not self.adapted:
                raise ModelError(f"objective {objective.text!r} acts on W_Q and W_K, but none of them is trained")

    @property
    def watched(self) -> list[nn.Parameter]:
        """The parameters whose gradient is projected."""
        return [one.parameter for one in self.pairs] + [p for one in self.adapted for p in (one.A, one.B)]

    def collect(self, found: ForwardPass, examples: float) -> None:
        """Add a batch's gradient of the mean subject share, before the loss's own backward pass."""
        if not self.projects:
            return
        share = found.share("subject").mean((-1, -2)).sum() / examples
        new = torch.autograd.grad(share, self.watched, retain_graph=True, allow_unused=True)
        parts = [torch.zeros_like(p) if g is None else g for p, g in zip(self.watched, new, strict=True)]
        masks = [one.mask for one in self.pairs] + [None] * (2 * len(self.adapted))
        parts = [g if mask is None else g * mask.to(g) for g, mask in zip(parts, masks, strict=True)]
        self.toward = parts if self.toward is None else [a + b for a, b in zip(self.toward, parts, strict=True)]

    def apply(self, accelerator: Any) -> None:
        """Give the gradient that a whole step has summed its final form; `accelerator` knows the other processes.

        The rank first, so that what `weight-anchor` adds and `project` protects is not cut off again.
        """
        if self.rank is not None:
            for parameter in self.model.parameters():
                if parameter.grad is not None and parameter.dim() == 2:
                    parameter.grad = low_rank(parameter.grad, self.rank)
        if self.anchor:
            self._pull()
        if self.projects and self.toward is not None:
            toward = [accelerator.reduce(one, "mean") for one in self.toward]
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.watched]
            toward = [t * (g != 0) for t, g in zip(toward, grads, strict=True)]  # a guard keeps the others from moving
            for parameter, found in zip(self.watched, without_harm(grads, toward), strict=True):
                parameter.grad = found
            self.toward = None

    def _pull(self) -> None:
        """Add the gradient of anchor x |W - W_0|^2."""
        for one in self.pairs:
            pull = 2 * self.anchor * (one.parameter.detach() - one.start)
            one.parameter.grad = _added(one.parameter.grad, pull if one.mask is None else pull * one.mask.to(pull))
        for one in self.adapted:
            A, B = one.A.detach().requires_grad_(), one.B.detach().requires_grad_()
            with torch.enable_grad():
                change = one.scale * (B @ A)
                change = change.T if one.transposed else change
                squared = change.square() if one.mask is None else change.square() * one.mask.to(change)
                pulls = torch.autograd.grad(self.anchor * squared.sum(), (A, B))
            for parameter, pull in zip((one.A, one.B), pulls, strict=True):
                parameter.grad = _added(parameter.grad, pull)


def _added(gradient: Tensor | None, more: Tensor) -> Tensor:
    return more if gradient is None else gradient + more


def _queries_and_keys(model: nn.Module) -> tuple[list[_Whole], list[_Adapted]]:
    """What is trained of W_Q and W_K: parameters themselves, and adapters on them."""
    base = base_of(model)
    with torch.device("meta"):
        bare = type(base)(base.config)  # without adapters, whose layers would hide the projections
    masks = choose(bare, "qk").masks
    plain = {name.replace(".base_layer", ""): parameter for name, parameter in base.named_parameters()}
    whole = [
        _Whole(plain[name], mask if mask is None else mask.to(plain[name].device), plain[name].detach().clone())
        for name, mask in masks.items()
        if plain[name].requires_grad
    ]
    adapted = []
    for place, module in base.named_modules():
        name = f"{place}.weight"
        if name in masks and hasattr(module, "lora_A"):
            mask = masks[name]
            transposed = bool(getattr(module, "fan_in_fan_out", False))
            for adapter in module.lora_A:  # pyright: ignore[reportGeneralTypeIssues]
                A, B = module.lora_A[adapter].weight, module.lora_B[adapter].weight  # pyright: ignore
                if A.requires_grad or B.requires_grad:
                    scale = float(module.scaling[adapter])  # pyright: ignore[reportIndexIssue]
                    adapted.append(_Adapted(A, B, scale, transposed, mask if mask is None else mask.to(A.device)))
    return whole, adapted
