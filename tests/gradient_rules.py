"""What tests of gradient rules share: one process, random tensors and a model with adapters."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import tiny_model
from torch import Tensor

ALONE = SimpleNamespace(reduce=lambda tensor, how: tensor)
"""Stands for accelerate in one process, where a mean over processes is the tensor itself."""


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def adapted(family: str, targets: list[str]) -> PeftModel:
    torch.manual_seed(4)
    settings = LoraConfig(r=2, lora_alpha=6, target_modules=targets, init_lora_weights=False)
    model = get_peft_model(tiny_model(family), settings)
    assert isinstance(model, PeftModel)
    return model
