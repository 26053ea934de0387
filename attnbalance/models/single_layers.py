"""Single layers of a bridged model, run on a vector instead of a prompt, and the check that both agree."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from attnbalance.errors import ModelError
from attnbalance.models.forward import position_limit

if TYPE_CHECKING:
    from attnbalance.models.bridge import BridgedModel

TOLERANCE = 1e-4
"""Largest difference allowed between a part run alone and in a prompt, relative to the largest entry."""


def mlp_alone(block: Any, x: Float[Tensor, "1 prompt d_model"]) -> Any:
    """What the MLP of a bridge's block gives for x, the output of its norm."""
    mlp = block.mlp
    if mlp.name is None:  # OPT and XGLM: two projections in the layer, without a module around them
        first, second = (getattr(mlp, name).original_component for name in ("in", "out"))
        return second(block.original_component.activation_fn(first(x)))
    forward = getattr(mlp.original_component, "forward", None)
    if forward is not None and "residual" in inspect.signature(forward).parameters:  # BLOOM's, MPT's add it themselves
        return mlp(x, torch.zeros_like(x))
    return mlp(x)


def check_no_mlp(block: Any, layer: int, name: str) -> None:
    """Raise `ModelError` if a block in which the bridge has no MLP holds matrices outside its attention."""
    attention = {id(parameter) for parameter in block.attn.parameters()}
    hidden = [inner for inner, p in block.named_parameters() if p.dim() > 1 and id(p) not in attention]
    if hidden:
        raise ModelError(
            f"{name}: layer {layer} holds {hidden[0]} in no MLP that TransformerLens knows; its MLP cannot be read"
        )


@torch.no_grad()
def check_single_layers(model: BridgedModel) -> None:
    """Check that values and MLPs read the residual stream as `value_input` and `mlp_output` do, on a few random tokens.

    Raises `ModelError` for a family in which they do not, such as one whose norms come after attention and MLP.
    """
    longest = min(7, position_limit(model.bridge.original_model.config) or 7)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(len(model.weights.W_E), (1, longest), generator=generator)
    pre, values, written = "blocks.{}.hook_resid_pre", "blocks.{}.attn.v.hook_in", "blocks.{}.hook_mlp_out"
    mid = pre if model.parallel else "blocks.{}.hook_resid_mid"
    with_mlp = [i for i in model.layers if getattr(model.bridge.blocks[i], "mlp", None) is not None]
    names = [name.format(i) for i in model.layers for name in (pre, values)]
    names += [name.format(i) for i in with_mlp for name in (mid, written)]
    _, kept = model.run(ids, torch.ones_like(ids), dict.fromkeys(names, lambda x: x[0]))
    for i in model.layers:
        _same(model, "values", i, model.value_input(i, kept[pre.format(i)]), kept[values.format(i)])
    for i in set(model.layers).difference(with_mlp):
        check_no_mlp(model.bridge.blocks[i], i, model.name)
    for i in with_mlp:
        _same(model, "MLP", i, model.mlp_output(i, kept[mid.format(i)]), kept[written.format(i)])


def _same(model: BridgedModel, what: str, layer: int, alone: Tensor, in_prompt: Tensor) -> None:
    off = float((alone - in_prompt).abs().max()) / max(float(in_prompt.abs().max()), 1e-6)
    if not off <= TOLERANCE:
        raise ModelError(
            f"{model.name}: the {what} of layer {layer}, run by themselves, differ by {off:.1e} of the largest from "
            f"those in a prompt (allowed {TOLERANCE:.0e}): this family's layers do not read the residual stream "
            "through a norm before them, and salience without context cannot be read"
        )
