"""The last token's residual stream as a sum of what the parts of a model write to it, in every family alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from attnbalance.data.batches import PromptBatch
from attnbalance.errors import DataError
from attnbalance.models.bridge import BridgedModel
from attnbalance.models.forward import uncapped


@dataclass(frozen=True)
class ResidualParts:
    """The parts of one forward pass of a batch padded on the left; see `take_apart`."""

    model: BridgedModel
    """The model."""
    logits: Float[Tensor, "prompt vocab"]
    """The last token's logits, before any cap on them."""
    kept: Mapping[str, Tensor]
    """What each hook gave: all tokens of the values, the last token of everything else."""

    @property
    def embedding(self) -> Float[Tensor, "prompt d_model"]:
        """What the first layer gets."""
        return self.kept["blocks.0.hook_resid_pre"]

    @property
    def rows(self) -> Float[Tensor, "prompt layer head position"]:
        """The attention probabilities of the last token, on the batch's positions."""
        return torch.stack([self.kept[f"blocks.{i}.attn.hook_pattern"] for i in self.model.layers], dim=1)

    def before_final_norm(
        self, direction: Float[Tensor, "prompt d_model"]
    ) -> tuple[Float[Tensor, "prompt d_model"], Float[Tensor, " prompt"]]:
        """The direction that reads before the final norm what `direction` reads after it, and a constant."""
        norm, stream = self.model.norm("ln_final"), self.kept[f"blocks.{self.model.layers[-1]}.hook_resid_post"]
        return norm.backward(direction, norm.scale(stream, self.kept["unembed.hook_in"]))

    def of_layer(
        self, layer: int, direction: Float[Tensor, "prompt d_model"]
    ) -> tuple[Float[Tensor, "prompt head position"], Float[Tensor, " prompt"], Float[Tensor, " prompt"]]:
        """What a layer adds along `direction`: each head's readout at each position, the attention bias, and the MLP.

        The readout is what a head would add if it attended to that position alone. In families with a norm after
        attention (Gemma 2), this norm has its scale of this forward pass.
        """
        weights = self.model.weights
        before_norm, norm_bias = self._before_attention_norm(layer, direction)
        per_head = torch.einsum("pd,hkd->phk", before_norm, weights.W_O[layer])
        written = self.kept.get(f"blocks.{layer}.hook_mlp_out")
        return (
            torch.einsum("pjhk,phk->phj", weights.by_head(self.kept[f"blocks.{layer}.attn.hook_v"]), per_head),
            before_norm @ weights.b_O[layer] + norm_bias,
            direction.new_zeros(len(direction)) if written is None else (written * direction).sum(-1),
        )

    def _before_attention_norm(
        self, layer: int, direction: Float[Tensor, "prompt d_model"]
    ) -> tuple[Float[Tensor, "prompt d_model"], Float[Tensor, " prompt"]]:
        """A direction of the residual stream before the norm that follows a layer's attention, if there is one."""
        before = self.kept.get(f"blocks.{layer}.ln1_post.hook_in")
        if before is None:
            return direction, direction.new_zeros(len(direction))
        norm = self.model.norm(layer, "ln1_post")
        return norm.backward(direction, norm.scale(before, self.kept[f"blocks.{layer}.ln1_post.hook_out"]))


def take_apart(model: BridgedModel, batch: PromptBatch) -> ResidualParts:
    """Run a batch that is padded on the left, and keep what its last tokens are made of.

    Raises `DataError` for a batch padded on the right, `ModelError` for a family without the hooks that this needs.
    """
    if not bool((batch.query_index == batch.input_ids.shape[1] - 1).all()):
        raise DataError("the batch must be padded on the left")
    logits, kept = model.run(batch.input_ids, batch.attention_mask, _kept_hooks(model))
    return ResidualParts(model, uncapped(model.bridge.original_model, logits[:, -1], kept["unembed.hook_out"]), kept)


def _kept_hooks(model: BridgedModel) -> dict[str, Callable[[Tensor], Tensor]]:
    """The hooks that are needed, each with the part of its activation that is kept."""
    hooks = model.hooks()
    ends = (
        "blocks.0.hook_resid_pre",
        f"blocks.{model.layers[-1]}.hook_resid_post",
        "unembed.hook_in",
        "unembed.hook_out",
    )
    keep: dict[str, Callable[[Tensor], Tensor]] = dict.fromkeys(ends, lambda x: x[:, -1])
    for i in model.layers:
        keep |= {f"blocks.{i}.attn.hook_pattern": lambda x: x[:, :, -1], f"blocks.{i}.attn.hook_v": lambda x: x}
        names = ("hook_mlp_out", "ln1_post.hook_in", "ln1_post.hook_out")
        keep |= {f"blocks.{i}.{name}": lambda x: x[:, -1] for name in names if f"blocks.{i}.{name}" in hooks}
    return keep
