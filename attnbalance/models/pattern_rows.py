"""Attention rows of a TransformerBridge: TransformerLens's own patterns, with whatever hooks its user has put on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from attnbalance.data.batches import PromptBatch
from attnbalance.errors import ArgumentError, ModelError
from attnbalance.models.forward import base_of, position_limit
from attnbalance.models.hooked import HookedModel

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge


def is_bridge(model: object) -> bool:
    """Whether a model is a TransformerBridge; imports TransformerLens only if it is one of its models."""
    if not type(model).__module__.startswith("transformer_lens"):
        return False
    from transformer_lens.model_bridge import TransformerBridge

    return isinstance(model, TransformerBridge)


def pattern_reader(
    bridge: TransformerBridge,
) -> tuple[HookedModel, Callable[[PromptBatch], Float[Tensor, "prompt layer head position"]]]:
    """What makes the batches of a bridge, and what reads the rows of one, in float32.

    Batches hold prompts of one length, so that nothing is padded. Raises `ArgumentError` for a model that is no
    TransformerBridge, `ModelError` for a bridge without a tokenizer, and for one without attention patterns.
    """
    if not is_bridge(bridge):
        raise ArgumentError(
            "model must be a HookedModel (load one with load_model) or a TransformerBridge, got "
            f"{type(bridge).__name__}"
        )
    name = str(bridge.cfg.model_name)
    if bridge.tokenizer is None:
        raise ModelError(f"the TransformerBridge of {name} has no tokenizer; give it one (tokenizer=)")
    layers = tuple(i for i, block in enumerate(bridge.blocks) if hasattr(block, "attn"))
    base = base_of(bridge.original_model)
    limit = position_limit(base.config)
    provider = HookedModel(base, bridge.tokenizer, name, "eager", layers, limit, alike_from=1, editable=False)

    def rows(batch: PromptBatch) -> Float[Tensor, "prompt layer head position"]:
        kept = dict[int, Tensor]()

        def keeping(layer: int) -> Callable[[Tensor, object], None]:
            def keep(pattern: Tensor, hook: object) -> None:
                kept[layer] = pattern[:, :, -1].float()

            return keep

        hooks: list[Any] = [(f"blocks.{layer}.attn.hook_pattern", keeping(layer)) for layer in layers]
        ids = batch.input_ids.to(bridge.cfg.device)
        with torch.no_grad():
            bridge.run_with_hooks(ids, attention_mask=torch.ones_like(ids), fwd_hooks=hooks, return_type=None)
        if missing := [layer for layer in layers if layer not in kept]:
            raise ModelError(
                f"{name} gives no attention pattern in layer {missing[0]}; load it with attention computed step by step"
            )
        return torch.stack([kept[layer] for layer in layers], dim=1).cpu()

    return provider, rows
