"""Models through TransformerLens: the same hook names and weight shapes for every family, on a float32 copy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedConfig

from attnbalance.arguments import expects
from attnbalance.errors import ModelError
from attnbalance.models.bridge_weights import Weights, weights_of
from attnbalance.models.build_bridge import build_bridge, fold_residual_multiplier, refusing
from attnbalance.models.evaluating import without_autocast
from attnbalance.models.forward import base_of, device_of, position_limit, uncapped
from attnbalance.models.hooked import HookedModel
from attnbalance.models.length_thresholds import length_thresholds
from attnbalance.models.merge_adapters import merged
from attnbalance.models.norms import Norm, norm_of
from attnbalance.models.single_layers import check_no_mlp, mlp_alone

TOLERANCE = 1e-4
"""Largest difference, relative to the largest entry, between head outputs from the weights and the model's own."""

IN_16_BITS = 1e3
"""How many times more is allowed for logits if the model itself computes in 16 bits."""

SINGLE_TOKENS = 512
"""Tokens that are embedded at once, each as a prompt of one token."""


@dataclass(frozen=True)
class BridgedModel:
    """A float32 copy of a model, adapters merged, inside a TransformerBridge; see `bridge_of`."""

    bridge: Any
    """The TransformerBridge."""
    weights: Weights
    """Its weights as tensors."""
    hooked: HookedModel
    """The model that was copied."""
    layers: tuple[int, ...]
    """The numbers of its layers, all of which have attention."""

    @property
    def name(self) -> str:
        """The name of the model that was copied."""
        return self.hooked.name

    @property
    def parallel(self) -> bool:
        """Whether a layer's MLP reads the same residual stream as its attention."""
        return bool(getattr(self.bridge.cfg, "parallel_attn_mlp", False))

    def value_input(self, layer: int, x: Float[Tensor, "prompt d_model"]) -> Float[Tensor, "prompt d_model"]:
        """What a layer's W_V multiplies if the residual stream is x: the output of its norm, if it has one."""
        norm = getattr(self.bridge.blocks[layer], "ln1", None)
        return x if norm is None else norm(x)

    def mlp_output(self, layer: int, x: Float[Tensor, "prompt d_model"]) -> Float[Tensor, "prompt d_model"]:
        """What a layer's MLP adds to the residual stream if it reads x there; zero in a layer without an MLP."""
        block = self.bridge.blocks[layer]
        mlp = getattr(block, "mlp", None)
        if mlp is None:
            check_no_mlp(block, layer, self.name)
            return torch.zeros_like(x)
        before = getattr(block, "ln2", None) or (getattr(block, "ln1", None) if self.parallel else None)
        try:
            output = mlp_alone(block, (x if before is None else before(x))[None])
        except (TypeError, RuntimeError, AttributeError) as error:
            raise ModelError(f"{self.name}: its MLP cannot be run by itself ({error})") from error
        output = (output[0] if isinstance(output, tuple) else output)[0]
        return self._normed(layer, "ln2_post", output)

    def embedding(self, ids: Int[Tensor, " token"]) -> Float[Tensor, "token d_model"]:
        """What the first layer gets for a prompt of one token: its embedding as the model scales and norms it.

        A vector that a family adds to every token there (GPT-2's and OPT's embedding of the first position) is left
        out. In a family that both adds positions and norms, positions are included.
        """
        ids = ids.to(self.weights.W_E.device)
        probe = torch.arange(0, len(self.weights.W_E), max(1, len(self.weights.W_E) // 8), device=ids.device)
        table_rows, first_inputs = self._table_rows(probe), self._first_inputs(probe)
        added = first_inputs - table_rows
        if bool(((added - added[:1]).abs().amax(-1) <= TOLERANCE * first_inputs.abs().max()).all()):
            return self._table_rows(ids)
        return torch.cat([self._first_inputs(chunk) for chunk in ids.split(SINGLE_TOKENS)])

    def _table_rows(self, ids: Int[Tensor, " token"]) -> Float[Tensor, "token d_model"]:
        return self.bridge.embed(ids[None])[0]

    def _first_inputs(self, ids: Int[Tensor, " token"]) -> Float[Tensor, "token d_model"]:
        prompts = ids[:, None]
        name = f"blocks.{self.layers[0]}.hook_resid_pre"
        return self.run(prompts, torch.ones_like(prompts), {name: lambda x: x[:, 0]})[1][name]

    def before_norm(
        self,
        layer: int,
        norm: str,
        direction: Float[Tensor, "prompt d_model"],
        written: Float[Tensor, "prompt d_model"],
    ) -> Float[Tensor, "prompt d_model"]:
        """`direction` taken back through the norm after a layer's attention or MLP (Gemma 2).

        `norm` is "ln1_post" (attention) or "ln2_post" (MLP). Its scale is the one that it has for `written`: what all
        heads, or the whole MLP, write. Without such a norm the direction is unchanged.
        """
        after = self.norm(layer, norm)
        return after.backward(direction, after.scale(written, self._normed(layer, norm, written)))[0]

    def head_outputs(self, layer: int, values: Float[Tensor, "prompt ..."]) -> Float[Tensor, "prompt d_model"]:
        """What all heads of a layer add to the residual stream if they attend to one token alone.

        values: the token's values as the hook `attn.hook_v` gives them.
        """
        heads = self.weights.by_head(values[:, None])[:, 0]
        return self._normed(layer, "ln1_post", torch.einsum("phk,hkd->pd", heads, self.weights.W_O[layer]))

    def _normed(
        self, layer: int, norm: str, written: Float[Tensor, "prompt d_model"]
    ) -> Float[Tensor, "prompt d_model"]:
        """What attention or an MLP wrote after the layer's norm of this name, if it has one."""
        after = getattr(self.bridge.blocks[layer], norm, None)
        return written if after is None else after(written)

    def norm(self, *path: str | int) -> Norm:
        """One of the norms by its path, ("ln_final",) or (layer, "ln1_post"); the identity if there is none."""
        owner = self.bridge if len(path) == 1 else self.bridge.blocks[path[0]]
        return norm_of(getattr(owner, str(path[-1]), None), self.weights.W_U[:, 0])

    def hooks(self) -> frozenset[str]:
        """The names of all hooks; TransformerLens collects them anew at every call."""
        return frozenset(self.bridge.hook_dict)

    def run(
        self, input_ids: Int[Tensor, "prompt position"], attention_mask: Tensor, keep: Mapping[str, Callable]
    ) -> tuple[Float[Tensor, "prompt 1 vocab"], dict[str, Tensor]]:
        """The last position's logits, and for each hook in `keep` its tensor put through the hook's function.

        Raises `ModelError` for a hook that the family lacks, or has and never calls.
        """
        known = self.hooks()
        missing = [name for name in keep if name not in known]
        if missing:
            raise ModelError(f"{self.name} has no {missing[0]} in TransformerLens: this family cannot be taken apart")
        kept: dict[str, Tensor] = {}

        def keeping(name: str) -> Callable:  # by our name: a hook may call itself by an alias
            def hook(tensor: Tensor, hook: object) -> None:
                kept[name] = keep[name](tensor)

            return hook

        def last(tensor: Tensor, hook: object) -> Tensor:  # logits of whole prompts would be the largest tensor of all
            return tensor[:, -1:].contiguous()  # a view is multiplied prompt by prompt, which is slower

        hooks = [("unembed.hook_in", last), *((name, keeping(name)) for name in keep)]
        ids = input_ids.to(self.weights.W_E.device)
        mask = (attention_mask != 0).long().to(ids.device)
        logits = self.bridge.run_with_hooks(ids, attention_mask=mask, fwd_hooks=hooks)
        silent = [name for name in keep if name not in kept]
        if silent:
            raise ModelError(
                f"{self.name} never calls {silent[0]} in TransformerLens: this family cannot be taken apart"
            )
        return logits, kept


@without_autocast()
@torch.no_grad()
@expects(model=HookedModel)
def bridge_of(model: HookedModel) -> BridgedModel:
    """A merged float32 copy of a model in TransformerLens, checked against the model's own head outputs.

    Needs about eight more bytes for each weight (for the copy and for its stacked weights). Raises `ModelError` for a
    family that TransformerLens does not know or that has layers without attention (state-space models), for a model on
    several devices, if more than the final norm stands between the last layer and the unembedding (ModernBERT's
    decoder), and if values, output weights or logits differ from what the model computes (by more than `TOLERANCE`,
    relative to the largest entry).
    """
    devices = {parameter.device for parameter in model.model.parameters()}
    if len(devices) > 1:
        raise ModelError(f"{model.name} is spread over {len(devices)} devices; load it on one to take it apart")
    check_multipliers(base_of(model.model).config, model.name)
    _warn_of_clipping(base_of(model.model).config, model.name)
    twin = base_of(merged(model)).float().eval().requires_grad_(False)
    fold_residual_multiplier(twin)
    with refusing(model):
        bridge = build_bridge(model, twin)
        return _checked(BridgedModel(bridge, weights_of(bridge), model, model.layers))


def check_multipliers(config: PreTrainedConfig, name: str) -> None:
    """Raise `ModelError` for factors of what attention and MLPs add (Falcon-H1), which TransformerLens leaves out."""
    factors = [getattr(config, "attention_out_multiplier", 1.0), *(getattr(config, "mlp_multipliers", None) or ())[1:]]
    odd = [f"{factor:g}" for factor in factors if factor != 1]
    if odd:
        raise ModelError(
            f"{name} multiplies what its attention or MLPs add (by {', '.join(odd)}), which TransformerLens leaves "
            "out: it cannot be taken apart"
        )


def _warn_of_clipping(config: PreTrainedConfig, name: str) -> None:
    """Warn of a limit on the sizes of queries, keys and values (OLMo, DBRX, MPT), which weights do not show."""
    clip = getattr(config, "clip_qkv", None) or getattr(getattr(config, "attn_config", None), "clip_qkv", None)
    if clip:
        warnings.warn(
            f"{name} cuts values to at most {clip:g} in size (clip_qkv), and what is read from weights alone leaves "
            "this out; a direct attribution that it changes is refused",
            stacklevel=6,
        )


def _checked(bridged: BridgedModel) -> BridgedModel:
    """The bridge with the family's scale of logits in W_U and b_U.

    Values from W_V, attention outputs from W_O and logits are checked on random tokens against the model's own: a few,
    or more than the longest length from which on its attention changes, as far as the self-check crosses it.
    """
    hooked, weights = bridged.hooked, bridged.weights
    base = base_of(hooked.model)
    longest = max([0, *length_thresholds(base.config).crossed]) + 7
    longest = min(longest, position_limit(base.config) or longest)
    ids = torch.randint(len(weights.W_E), (1, longest), generator=torch.Generator().manual_seed(0))
    hooks = ("attn.v.hook_in", "attn.hook_v", "attn.hook_pattern", "hook_attn_out")
    names = [f"blocks.{layer}.{name}" for layer in bridged.layers for name in hooks]
    names += [f"blocks.{i}.ln1_post.hook_in" for i in bridged.layers if hasattr(bridged.bridge.blocks[i], "ln1_post")]
    names += ["unembed.hook_in", "unembed.hook_out", *({"ln_final.hook_out"} & bridged.hooks())]
    logits, kept = bridged.run(ids, torch.ones_like(ids), dict.fromkeys(names, lambda x: x))
    with hooked.evaluating():
        own = base(input_ids=ids.to(device_of(base)), use_cache=False).logits[:, -1:].float().to(logits.device)
    coarse = 1.0 if base.dtype in (torch.float32, torch.float64) else IN_16_BITS
    check_same(bridged.name, "logits", logits, own, coarse)
    for i in bridged.layers:
        _check_layer(bridged, i, kept)
    normed = kept.get("ln_final.hook_out", kept["unembed.hook_in"])[:, -1]
    between = "more than the final norm stands between the last layer and the unembedding"
    check_same(bridged.name, "inputs of the unembedding", normed, kept["unembed.hook_in"][:, -1], why=between)
    unembedded = kept["unembed.hook_out"]
    final = uncapped(bridged.bridge.original_model, logits[:, -1], unembedded[:, -1])
    scale = float((final * unembedded[:, -1]).sum() / unembedded.square().sum())  # Cohere's and Granite's logits
    scaled = (
        replace(weights, W_U=scale * weights.W_U, b_U=scale * weights.b_U) if abs(scale - 1) > TOLERANCE else weights
    )
    from_weights = kept["unembed.hook_in"][:, -1] @ scaled.W_U + scaled.b_U
    check_same(bridged.name, "logits", from_weights, final, why="it does more than scale what W_U gives")
    return replace(bridged, weights=scaled)


def _check_layer(bridged: BridgedModel, layer: int, kept: Mapping[str, Tensor]) -> None:
    """Check one layer's values and attention output, made from its weights, against what its hooks gave."""
    weights, at = bridged.weights, f"blocks.{layer}."
    from_weights = torch.einsum("pd,hdk->phk", kept[f"{at}attn.v.hook_in"][0], weights.W_V[layer]) + weights.b_V[layer]
    values = weights.by_head(kept[f"{at}attn.hook_v"])[0]
    check_same(bridged.name, f"values of layer {layer}", from_weights, values)
    z = torch.einsum("hqp,phk->qhk", kept[f"{at}attn.hook_pattern"][0], values)
    output = torch.einsum("qhk,hkd->qd", z, weights.W_O[layer]) + weights.b_O[layer]
    own = kept.get(f"{at}ln1_post.hook_in", kept[f"{at}hook_attn_out"])[0]
    check_same(bridged.name, f"head outputs of layer {layer}", output, own)


def check_same(
    name: str,
    what: str,
    made: Tensor,
    own: Tensor,
    coarse: float = 1.0,
    why: str = "its attention does something that cannot be taken apart into W_V and W_O",
) -> None:
    """Raise `ModelError` if what was made from weights is not the model's own, by `TOLERANCE` (times `coarse`)."""
    off = float((made - own).abs().max()) / max(float(own.abs().max()), 1e-6)
    if not off <= TOLERANCE * coarse:
        raise ModelError(
            f"{name}: {what} made from its weights differ from its own by {off:.1e} of the largest (allowed "
            f"{TOLERANCE * coarse:.0e}): {why}"
        )
