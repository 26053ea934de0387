"""Tiny models whose gains, biases and sinks are random: in a new model they are all ones or zeros, and hide faults."""

from __future__ import annotations

import torch
from tiny import tiny_config, tiny_tokenizer
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from attnbalance import HookedModel, load_model


def uneven(family: str | PretrainedConfig, seed: int = 0, **changes: object) -> PreTrainedModel:
    """A random model of one family (or configuration), in evaluation mode; another seed gives other weights."""
    torch.manual_seed(seed)
    config = tiny_config(family, **changes) if isinstance(family, str) else family
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def hooked(family: str | PretrainedConfig, seed: int = 0, **changes: object) -> HookedModel:
    """`uneven`, loaded with the plain tokenizer."""
    return load_model(uneven(family, seed, **changes), tokenizer=tiny_tokenizer())
