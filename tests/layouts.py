"""Tiny models whose projections are laid out in all the ways there are, and noise on some of their entries."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
import transformers
from tiny import FAMILIES, GROUPED, VOCABULARY, tiny_config
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

IDS = torch.randint(VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(0))


BLOCKS = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None}


KINDS = {
    "phi3": transformers.Phi3Config(**GROUPED, pad_token_id=None),
    "falcon of many heads": tiny_config("falcon", multi_query=False),
    "gptj": transformers.GPTJConfig(n_embd=32, n_layer=2, n_head=4, rotary_dim=4, vocab_size=VOCABULARY),
    "granite": transformers.GraniteConfig(**GROUPED, residual_multiplier=0.5, logits_scaling=2.0, pad_token_id=None),
    "olmo2": transformers.Olmo2Config(**GROUPED, pad_token_id=None, eos_token_id=None),
    "codegen": transformers.CodeGenConfig(**BLOCKS, rotary_dim=4),
    "bigcode": transformers.GPTBigCodeConfig(**BLOCKS),
} | {family: tiny_config(family) for family in FAMILIES}
"""Fused projections of several layouts, and scales that the ledger does not know."""


def with_noise(model: PreTrainedModel, mask: Mapping[str, Tensor]) -> PreTrainedModel:
    """A copy with noise on the entries of one part."""
    twin = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            if name in mask:
                parameter.add_(0.3 * torch.randn_like(parameter) * mask[name])
    return twin


def logits_of(model: Module, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits
