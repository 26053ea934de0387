"""Layer norms and RMS norms as linear maps at a fixed scale, in every family alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import Module

LARGE = 1e3
"""Entries of the vectors that a norm is probed with: they are so large that its epsilon is lost in rounding."""


@dataclass(frozen=True)
class Norm:
    """A layer norm or RMS norm as the map (x - mean) * gain / scale + bias."""

    gain: Float[Tensor, " d_model"]
    """What the scaled entries are multiplied by."""
    bias: Float[Tensor, " d_model"]
    """What is added at the end."""
    centred: bool
    """Whether the mean is subtracted (layer norm) or not (RMS norm)."""
    identity: bool
    """Whether the model has no norm here: the map changes nothing."""

    def backward(
        self, direction: Float[Tensor, "prompt d_model"], scale: Float[Tensor, " prompt"]
    ) -> tuple[Float[Tensor, "prompt d_model"], Float[Tensor, " prompt"]]:
        """The direction that reads before the norm what `direction` reads after it at this scale, and a constant."""
        if self.identity:
            return direction, direction.new_zeros(len(direction))
        scaled = direction * self.gain / scale[:, None]
        if self.centred:
            scaled = scaled - scaled.mean(dim=-1, keepdim=True)
        return scaled, direction @ self.bias

    def at_scale_one(self, x: Float[Tensor, "prompt d_model"]) -> Float[Tensor, "prompt d_model"]:
        """The map of x at scale 1, without the bias."""
        if self.identity:
            return x
        return (x - x.mean(dim=-1, keepdim=True) if self.centred else x) * self.gain

    def scale(self, x: Float[Tensor, "prompt d_model"], y: Float[Tensor, "prompt d_model"]) -> Float[Tensor, " prompt"]:
        """The scale by which the norm divided x to give y, with any epsilon (least squares over the entries).

        It is 1 for an x of zeros, whose scale is unknown.
        """
        if self.identity:
            return x.new_ones(len(x))
        numerator = self.at_scale_one(x)
        squares = (numerator * numerator).sum(-1)
        return torch.where(squares == 0, 1.0, squares / ((y - self.bias) * numerator).sum(-1))


def norm_of(module: Module | None, like: Float[Tensor, " d_model"]) -> Norm:
    """The map of a norm module, found by probing it; None and `torch.nn.Identity` give the identity.

    The class does not say whether the gain is its weight or 1 + weight, nor whether it subtracts the mean. `like` has
    the width, dtype and device of the residual stream.
    """
    identity = Norm(torch.ones_like(like), torch.zeros_like(like), False, True)
    if module is None:
        return identity
    level = torch.full((1, len(like)), LARGE, dtype=like.dtype, device=like.device)
    sign = torch.ones_like(like)
    sign[1::2] = -1
    bias, even, flat = (module(x)[0] for x in (torch.zeros_like(level), level * sign, level))
    if torch.equal(even, level[0] * sign) and torch.equal(flat, level[0]):  # torch.nn.Identity in place of a norm
        return identity
    gain = (even - bias) * sign
    centred = bool((flat - bias).abs().max() < 0.5 * gain.abs().max())
    return Norm(gain, bias, centred, False)
