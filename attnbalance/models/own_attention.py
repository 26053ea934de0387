"""Whether a model computes what it computed before its attention was set: layer by layer, on prompts run alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import Module

from attnbalance.data.tokens import Encoding
from attnbalance.errors import ModelError
from attnbalance.models.eager_reference import layer_inputs
from attnbalance.models.forward import base_of, depth_of, device_of, taken

LIMIT = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""Largest mean difference allowed in a layer's output and in the logits, relative to their mean size, by dtype.

Every layer gets the input that it had before, so that it rounds once. On SmolLM2-135M, eager attention differs from
SDPA by 2e-7 in float32, 5e-3 in bfloat16 and 5e-4 in float16; scores that are a tenth too large move a layer's output
by 2e-2, in a model of 260,000 parameters by 1e-2. In bfloat16 smaller errors may pass.
"""

LOGITS = 64
"""Positions, counted from the end, whose logits are compared: all of them cost more than the layers in a small model
with a large vocabulary, on a prompt as long as a sliding window."""

SIXTEEN_BITS = ", unless 16 bits make the difference, as in mixtures of experts: try dtype='float32'"
"""What to try in 16 bits: rounding at another place may send a token to another expert."""


class OwnOutputs(NamedTuple):
    """What a model computes of one prompt, run alone, without mask and position ids."""

    inputs: dict[int, Float[Tensor, "position d_model"]]
    """The input of each layer, where layers can be hooked."""
    logits: Float[Tensor, "logit_position vocab"]
    """The logits of the last `LOGITS` positions (of all, in families that give no fewer)."""


@torch.no_grad()
def own_outputs(model: Module, encoding: Encoding) -> OwnOutputs:
    """What the model computes with the attention that it has now."""
    inputs = dict[int, Tensor]()

    def keep(layer: int, hidden: Tensor) -> Tensor:
        inputs[layer] = hidden[0].clone()
        return hidden

    return OwnOutputs(inputs, _logits(model, encoding, keep))


@torch.no_grad()
def check_own(model: Module, encoding: Encoding, own: OwnOutputs, name: str, implementation: str) -> None:
    """Raise `ModelError` unless the model still computes its own outputs, those of another `implementation`."""
    base = base_of(model)
    off = dict[str, float]()

    def compare(layer: int, hidden: Tensor) -> Tensor:
        before = own.inputs[layer][None]
        off[f"the input of layer {layer}"] = _difference(hidden, before)
        return before

    off["the logits"] = _difference(_logits(model, encoding, compare), own.logits)
    limit = LIMIT.get(base.dtype, 2**-6) * (1 if own.inputs else depth_of(base))
    worst = max(off, key=lambda what: off[what])
    if not all(value <= limit for value in off.values()):  # NaN fails too
        raise ModelError(
            f"{name} computes something else with the attention that can be read ({base.config._attn_implementation}) "
            f"than with its own ({implementation}): a difference of {off[worst]:.1%} in {worst} (allowed {limit:.2%}). "
            "What would be read is not the model that is used"
            f"{SIXTEEN_BITS if base.dtype in (torch.bfloat16, torch.float16) else ''}"
        )


def _logits(model: Module, encoding: Encoding, change: Callable[[int, Tensor], Tensor]) -> Tensor:
    base = base_of(model)
    ids = torch.tensor([encoding.ids], device=device_of(base))
    with layer_inputs(base, change):
        return model(input_ids=ids, use_cache=False, **taken(base, {"logits_to_keep": LOGITS})).logits[0]


def _difference(now: Tensor, before: Tensor) -> float:
    """The mean difference, relative to the mean size."""
    before = before.float()
    return float((now.float() - before).abs().mean() / before.abs().mean().clamp(min=1e-12))
