"""A bridge's weights as tensors with one axis for layers and one for heads, the same shapes in every family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Weights:
    """A model's weights in TransformerLens' shapes, float32: activations multiply them from the left.

    Nothing is folded: norms come between the residual stream and W_Q, W_K, W_V (see `BridgedModel.value_input`). Keys
    and values have as many heads as queries; grouped ones are repeated. Biases that a family lacks are zero. Where a
    family scales its logits (Cohere, Granite), a bridge's W_U and b_U hold the scale; where it multiplies what layers
    add (Granite), W_O, W_out and their biases hold the factor.
    """

    W_E: Float[Tensor, "vocab d_model"]
    W_U: Float[Tensor, "d_model vocab"]
    b_U: Float[Tensor, " vocab"]
    W_Q: Float[Tensor, "layer head d_model d_head"]
    W_K: Float[Tensor, "layer head d_model d_head"]
    W_V: Float[Tensor, "layer head d_model d_value"]
    W_O: Float[Tensor, "layer head d_value d_model"]
    b_Q: Float[Tensor, "layer head d_head"]
    b_K: Float[Tensor, "layer head d_head"]
    b_V: Float[Tensor, "layer head d_value"]
    b_O: Float[Tensor, "layer d_model"]
    W_in: Float[Tensor, "layer d_model d_mlp"] | None
    """None for a mixture of experts, and if the family holds it in one matrix with the gate's."""
    W_gate: Float[Tensor, "layer d_model d_mlp"] | None
    """None for a mixture of experts, and for an MLP without a gate."""
    W_out: Float[Tensor, "layer d_mlp d_model"] | None
    """None for a mixture of experts."""

    def by_head(self, values: Float[Tensor, "prompt position ..."]) -> Float[Tensor, "prompt position head d_value"]:
        """Values as TransformerLens' hooks give them, with an axis for heads; grouped ones are repeated."""
        heads, d_value = self.W_V.shape[1], self.W_V.shape[-1]
        split = values.reshape(*values.shape[:2], -1, d_value)
        groups = heads // split.shape[2]
        return split if groups == 1 else split.repeat_interleave(groups, dim=2)  # which would copy


def weights_of(bridge: Any) -> Weights:
    """The weights of a TransformerBridge, grouped heads repeated, missing biases zero."""
    heads = bridge.W_Q.shape[1]
    W_Q, W_K, W_V, W_O = bridge.W_Q, _repeated(bridge.W_K, heads), _repeated(bridge.W_V, heads), bridge.W_O
    W_U, W_in, W_out = bridge.W_U, _of_mlp(bridge, "W_in"), _of_mlp(bridge, "W_out")
    if W_in is not None and W_out is not None and W_in.shape[-1] != W_out.shape[1]:
        W_in = None  # one matrix with the gate's (ModernBERT, which is refused after this)
    b_U = getattr(bridge, "b_U", None)
    return Weights(
        W_E=bridge.W_E,
        W_U=W_U,
        b_U=W_U.new_zeros(W_U.shape[1]) if b_U is None else b_U,
        W_Q=W_Q,
        W_K=W_K,
        W_V=W_V,
        W_O=W_O,
        b_Q=_bias(bridge, "b_Q", heads, W_Q[:, :, 0]),
        b_K=_bias(bridge, "b_K", heads, W_K[:, :, 0]),
        b_V=_bias(bridge, "b_V", heads, W_V[:, :, 0]),
        b_O=_bias(bridge, "b_O", heads, W_O[:, :1, 0])[:, 0],
        W_in=W_in,
        W_gate=_of_mlp(bridge, "W_gate"),
        W_out=W_out,
    )


def _repeated(weight: Tensor, heads: int) -> Tensor:
    return weight.repeat_interleave(heads // weight.shape[1], dim=1)


def _bias(bridge: Any, name: str, heads: int, like: Tensor) -> Tensor:
    """A bias by head, in the shape of `like`; zero if the family has none."""
    try:
        bias = getattr(bridge, name)
    except AttributeError:
        bias = None
    if bias is None:
        return like.new_zeros(like.shape)
    return _repeated(bias.reshape(len(like), -1, like.shape[-1]), heads)


def _of_mlp(bridge: Any, name: str) -> Tensor | None:
    """A matrix of the MLPs of all layers; None unless every layer has one."""
    try:
        weight = getattr(bridge, name)
    except (AttributeError, RuntimeError):
        return None
    return None if weight is None or len(weight) != len(bridge.blocks) else weight
