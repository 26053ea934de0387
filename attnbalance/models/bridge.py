"""Models through TransformerLens: the same hook names and weight shapes for every family, on a copy of our own."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import Module

from attnbalance.errors import ModelError
from attnbalance.models.forward import base_of, evaluating, position_limit
from attnbalance.models.hooked import HookedModel

TOLERANCE = 1e-4
"""Largest difference, relative to the largest entry, between head outputs from the weights and the model's own."""

LARGE = 1e3
"""Entries of the vectors that a norm is probed with: its epsilon is then lost in rounding."""


@dataclass(frozen=True)
class Weights:
    """A model's weights in TransformerLens' shapes, float32: activations multiply them from the left.

    Nothing is folded: norms stand between the residual stream and W_Q, W_K, W_V (see `BridgedModel.value_input`). Keys
    and values have as many heads as queries, each grouped one repeated. Biases that a family lacks are zero. `W_in`,
    `W_gate` and `W_out` are None where an MLP is a mixture of experts, `W_gate` also where it has no gate.
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
    W_gate: Float[Tensor, "layer d_model d_mlp"] | None
    W_out: Float[Tensor, "layer d_mlp d_model"] | None


@dataclass(frozen=True)
class Norm:
    """A layer norm or RMS norm as the map (x - mean) * gain / scale + bias; the identity where a model has none."""

    gain: Float[Tensor, " d_model"]
    bias: Float[Tensor, " d_model"]
    centred: bool
    identity: bool

    def backward(
        self, direction: Float[Tensor, "prompt d_model"], scale: Float[Tensor, " prompt"]
    ) -> tuple[Float[Tensor, "prompt d_model"], Float[Tensor, " prompt"]]:
        """The direction before the norm that reads what `direction` reads behind it at this scale, and a constant."""
        if self.identity:
            return direction, direction.new_zeros(len(direction))
        scaled = direction * self.gain / scale[:, None]
        if self.centred:
            scaled = scaled - scaled.mean(dim=-1, keepdim=True)
        return scaled, direction @ self.bias

    def scale(self, x: Float[Tensor, "prompt d_model"], y: Float[Tensor, "prompt d_model"]) -> Float[Tensor, " prompt"]:
        """The scale by which the norm divided x to give y, whatever its epsilon (least squares over the entries)."""
        if self.identity:
            return x.new_ones(len(x))
        numerator = (x - x.mean(dim=-1, keepdim=True) if self.centred else x) * self.gain
        return (numerator * numerator).sum(-1) / ((y - self.bias) * numerator).sum(-1)


@dataclass(frozen=True)
class BridgedModel:
    """A float32 copy of a model, adapters merged, inside a TransformerBridge (`bridge`); see `bridge_of`."""

    bridge: Any
    weights: Weights
    hooked: HookedModel
    layers: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name of the model that was copied."""
        return self.hooked.name

    def value_input(self, layer: int, x: Float[Tensor, "prompt d_model"]) -> Float[Tensor, "prompt d_model"]:
        """What a layer's W_V is multiplied with where the residual stream is x: its norm's output, where it has one."""
        norm = getattr(self.bridge.blocks[layer], "ln1", None)
        return x if norm is None else norm(x)

    def mlp_output(self, layer: int, x: Float[Tensor, "prompt d_model"]) -> Float[Tensor, "prompt d_model"]:
        """What a layer's MLP adds to the residual stream where it reads x there; zero in a layer without an MLP."""
        block = self.bridge.blocks[layer]
        mlp = getattr(block, "mlp", None)
        if mlp is None:
            return torch.zeros_like(x)
        before = getattr(block, "ln2", None) or (getattr(block, "ln1", None) if self.parallel else None)
        try:
            found = mlp((x if before is None else before(x))[None])
        except TypeError as error:
            raise ModelError(f"{self.name}: its MLP cannot be run by itself ({error})") from error
        found = (found[0] if isinstance(found, tuple) else found)[0]
        after = getattr(block, "ln2_post", None)
        return found if after is None else after(found)

    @property
    def parallel(self) -> bool:
        """Whether a layer's MLP reads the same residual stream as its attention."""
        return bool(getattr(self.bridge.cfg, "parallel_attn_mlp", False))

    def norm(self, *path: str | int) -> Norm:
        """One of the norms by its place: ("ln_final",) or (layer, "ln1_post"); the identity where there is none."""
        place = self.bridge if len(path) == 1 else self.bridge.blocks[path[0]]
        return _norm(getattr(place, str(path[-1]), None), self.weights.W_U[:, 0])

    def run(
        self, input_ids: Int[Tensor, "prompt position"], attention_mask: Tensor, keep: Mapping[str, Callable]
    ) -> tuple[Float[Tensor, "prompt 1 vocab"], dict[str, Tensor]]:
        """The last position's logits, and what TransformerLens' hooks gave, put through the functions of `keep`.

        Raises `ModelError` for a hook that the family lacks.
        """
        missing = [name for name in keep if name not in self.bridge.hook_dict]
        if missing:
            raise ModelError(f"{self.name} has no {missing[0]} in TransformerLens: this family cannot be taken apart")
        kept: dict[str, Tensor] = {}

        def keeping(name: str) -> Callable:  # by our name: a hook with an alias calls itself by the other one
            def hook(tensor: Tensor, hook: object) -> None:
                kept[name] = keep[name](tensor)

            return hook

        def last(tensor: Tensor, hook: object) -> Tensor:  # logits of whole prompts would be the largest tensor of all
            return tensor[:, -1:]

        hooks = [("unembed.hook_in", last), *((name, keeping(name)) for name in keep)]
        ids = input_ids.to(self.weights.W_E.device)
        mask = (attention_mask != 0).long().to(ids.device)
        return self.bridge.run_with_hooks(ids, attention_mask=mask, fwd_hooks=hooks), kept


def merged(model: HookedModel) -> Module:
    """A copy of the transformers model, with adapters merged in float32; the user's object stays as it is."""
    twin = copy.deepcopy(model.model)
    if not hasattr(twin, "merge_and_unload"):
        return twin
    return twin.float().merge_and_unload()  # in 16 bits most of a small adapter would be rounded away  # pyright: ignore


@torch.no_grad()
def bridge_of(model: HookedModel) -> BridgedModel:
    """A merged float32 copy of a model in TransformerLens, proven against the model's own head outputs.

    Takes some eight bytes a weight more (the copy, and its weights stacked). Raises `ModelError` for a family that
    TransformerLens does not know or that has layers without attention (state-space models), for a model on several
    devices, and where values, output weights or logits do not reproduce what the model computes (by more than
    `TOLERANCE`, relative to the largest entry).
    """
    places = {parameter.device for parameter in model.model.parameters()}
    if len(places) > 1:
        raise ModelError(f"{model.name} is spread over {len(places)} devices; load it on one to take it apart")
    twin = base_of(merged(model)).float().eval().requires_grad_(False)
    with refusing(model):
        bridge = build(model, twin)
        bridged = BridgedModel(bridge, _weights(bridge), model, model.layers)
    _check(bridged)
    return bridged


@contextmanager
def refusing(model: HookedModel) -> Iterator[None]:
    """Whatever TransformerLens raises for a family that it does not know, as a `ModelError`."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"{model.name} ({type(base_of(model.model)).__name__}) cannot be taken apart by TransformerLens: "
            f"{type(error).__name__}: {str(error)[:200]}"
        ) from error


def build(model: HookedModel, twin: Module) -> Any:
    """The bridge of a copy of a model, without the notices that TransformerLens prints and logs.

    Raises `ModelError` for a model that has layers without attention.
    """
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    config = copy.deepcopy(twin.config)
    config.dtype = twin.config.dtype = next(twin.parameters()).dtype  # pyright: ignore
    logging.getLogger("transformer_lens").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # attention is computed step by step: the hooks need its patterns
        config._attn_implementation = twin.config._attn_implementation = "eager"  # pyright: ignore
        bridge = build_bridge_from_module(twin, type(twin).__name__, hf_config=config, tokenizer=None)
    if tuple(range(len(bridge.blocks))) != model.layers:
        raise ModelError(f"{model.name} has layers without attention: its layers cannot be taken apart into heads")
    return bridge


def _weights(bridge: Any) -> Weights:
    """The weights as tensors, grouped heads repeated, missing biases zero."""
    heads = bridge.W_Q.shape[1]

    def repeated(weight: Tensor) -> Tensor:
        return weight.repeat_interleave(heads // weight.shape[1], dim=1)

    def bias(name: str, like: Tensor) -> Tensor:
        try:
            found = getattr(bridge, name)
        except AttributeError:
            found = None
        return like.new_zeros(like.shape) if found is None else repeated(found.reshape(len(like), -1, like.shape[-1]))

    def mlp(name: str) -> Tensor | None:
        try:
            found = getattr(bridge, name)
        except (AttributeError, RuntimeError):
            return None
        return None if found is None or len(found) != len(bridge.blocks) else found

    W_Q, W_K, W_V, W_O = bridge.W_Q, repeated(bridge.W_K), repeated(bridge.W_V), bridge.W_O
    W_U = bridge.W_U
    b_U = getattr(bridge, "b_U", None)
    return Weights(
        bridge.W_E,
        W_U,
        W_U.new_zeros(W_U.shape[1]) if b_U is None else b_U,
        W_Q,
        W_K,
        W_V,
        W_O,
        bias("b_Q", W_Q[:, :, 0]),
        bias("b_K", W_K[:, :, 0]),
        bias("b_V", W_V[:, :, 0]),
        bias("b_O", W_O[:, :1, 0])[:, 0],
        mlp("W_in"),
        mlp("W_gate"),
        mlp("W_out"),
    )


def _norm(module: Module | None, like: Tensor) -> Norm:
    """What a norm does, found by asking it: its class does not tell whether the gain is weight or 1 + weight."""
    if module is None:
        return Norm(torch.ones_like(like), torch.zeros_like(like), False, True)
    level = torch.full((1, len(like)), LARGE, device=like.device)
    sign = torch.ones_like(like)
    sign[1::2] = -1
    bias, even, flat = (module(x)[0] for x in (torch.zeros_like(level), level * sign, level))
    if torch.equal(even, level[0] * sign) and torch.equal(flat, level[0]):  # torch.nn.Identity in a norm's place
        return Norm(torch.ones_like(even), torch.zeros_like(even), False, True)
    gain = (even - bias) * sign
    centred = bool((flat - bias).abs().max() < 0.5 * gain.abs().max())
    return Norm(gain, bias, centred, False)


def _check(bridged: BridgedModel) -> None:
    """Values from W_V, attention outputs from W_O, and logits, all on a few random tokens, against the model's own."""
    hooked, weights = bridged.hooked, bridged.weights
    base = base_of(hooked.model)
    longest = min(7, position_limit(base.config) or 7)
    ids = torch.randint(len(weights.W_E), (1, longest), generator=torch.Generator().manual_seed(0))
    wanted = ("attn.v.hook_in", "attn.hook_v", "attn.hook_pattern", "hook_attn_out")
    names = [f"blocks.{layer}.{name}" for layer in bridged.layers for name in wanted]
    names += [f"blocks.{i}.ln1_post.hook_in" for i in bridged.layers if hasattr(bridged.bridge.blocks[i], "ln1_post")]
    logits, kept = bridged.run(ids, torch.ones_like(ids), dict.fromkeys(names, lambda x: x))
    with evaluating(hooked.model):
        own = base(input_ids=ids.to(base.device), use_cache=False).logits[:, -1:].float().to(logits.device)
    coarse = (
        1.0 if base.dtype in (torch.float32, torch.float64) else 1e3
    )  # the model's own logits are rounded to 16 bits
    _same(bridged.name, "logits", logits, own, coarse)
    for i in bridged.layers:
        at = f"blocks.{i}."
        found = torch.einsum("pd,hdk->phk", kept[f"{at}attn.v.hook_in"][0], weights.W_V[i]) + weights.b_V[i]
        values = heads_of(kept[f"{at}attn.hook_v"], weights.W_V.shape[1], weights.W_V.shape[-1])[0]
        _same(bridged.name, f"values of layer {i}", found, values)
        z = torch.einsum("hqp,phk->qhk", kept[f"{at}attn.hook_pattern"][0], values)
        out = torch.einsum("qhk,hkd->qd", z, weights.W_O[i]) + weights.b_O[i]
        seen = kept.get(f"{at}ln1_post.hook_in", kept[f"{at}hook_attn_out"])[0]
        _same(bridged.name, f"head outputs of layer {i}", out, seen)


def heads_of(values: Tensor, heads: int, d_head: int) -> Float[Tensor, "prompt position head d_head"]:
    """Values as TransformerLens hooks give them, one axis for heads, grouped ones repeated."""
    split = values.reshape(*values.shape[:2], -1, d_head)
    return split.repeat_interleave(heads // split.shape[2], dim=2)


def _same(name: str, what: str, found: Tensor, expected: Tensor, coarse: float = 1.0) -> None:
    off = float((found - expected).abs().max()) / max(float(expected.abs().max()), 1e-6)
    if not off <= TOLERANCE * coarse:
        raise ModelError(
            f"{name}: {what} made from its weights differ from its own by {off:.1e} of the largest (allowed "
            f"{TOLERANCE * coarse:.0e}): its attention does something that cannot be taken apart into W_V and W_O"
        )
