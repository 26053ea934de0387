"""TransformerBridges made quietly from models in memory, with one kind of error for families that cannot be."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn import Linear, Module

from attnbalance.errors import ModelError
from attnbalance.models.forward import base_of
from attnbalance.models.hooked import HookedModel

ENDS = (("self_attn", "o_proj"), ("mlp", "down_proj"))
"""The linear maps with which attention and MLP end, in families that multiply what layers add."""


def build_bridge(model: HookedModel, twin: Module) -> Any:
    """The TransformerBridge of `twin`, a copy of a model, without the notices that TransformerLens prints and logs.

    Raises `ModelError` for a model that has layers without attention, and for one whose unembedding does not read the
    residual stream itself (OPT with `word_embed_proj_dim` projects it to another width first).
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
    read, width = bridge.W_U.shape[0], bridge.cfg.d_model
    if read != width:
        raise ModelError(
            f"{model.name}: its unembedding reads {read} numbers, into which the residual stream of {width} is "
            "projected first: what a layer adds cannot be read out directly"
        )
    return bridge


def fold_residual_multiplier(twin: Module) -> None:
    """Put the factor of what layers add to the residual stream (Granite) into their last weights: the same model.

    A layer whose attention and MLP do not end in one linear map each (a mixture of experts) is left as it is.
    """
    for layer in twin.modules():
        factor = getattr(layer, "residual_multiplier", 1.0)
        ends = [getattr(getattr(layer, part, None), name, None) for part, name in ENDS]
        if factor == 1 or not all(isinstance(end, Linear) for end in ends):
            continue
        for end in ends:
            for parameter in end.parameters():  # pyright: ignore[reportOptionalMemberAccess]
                parameter.data.mul_(factor)
        layer.residual_multiplier = twin.config.residual_multiplier = 1.0  # pyright: ignore


@contextmanager
def refusing(model: HookedModel) -> Iterator[None]:
    """Turns what TransformerLens raises for a family that it does not know into a `ModelError`."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"{model.name} ({type(base_of(model.model)).__name__}) cannot be taken apart by TransformerLens: "
            f"{type(error).__name__}: {str(error)[:200]}"
        ) from error
