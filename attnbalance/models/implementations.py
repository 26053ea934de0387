"""A model that is read while it is trained: its attention and all random numbers are set back afterwards."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import Module
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from attnbalance.models.forward import base_of
from attnbalance.models.hooked import HookedModel, hook

Implementations = list[tuple[PreTrainedConfig, str | None]]
"""The configurations in a model, outermost first, each with the attention implementation that it names."""


@dataclass(frozen=True)
class BorrowedModel:
    """A model that belongs to a trainer; `lent` gives it with our attention function for the length of a block."""

    hooked: HookedModel
    """The model; it may be read inside `lent` alone."""
    implementations: Implementations
    """What its configurations name while it is read."""

    @contextmanager
    def lent(self) -> Iterator[HookedModel]:
        """The model to be read. Afterwards training goes on as if it had not been.

        Its attention implementation is set back, and so are all random numbers. What is read of it is computed in its
        weights' own dtype (see `evaluating`).
        """
        with _as_it_was(self.hooked.model):
            _set(self.implementations)
            yield self.hooked


def borrow(model: Module, tokenizer: PreTrainedTokenizerBase, name: str) -> BorrowedModel:
    """Check that a model can be read (see `hook`, which raises the errors), and leave its attention as it was."""
    with _as_it_was(model):
        hooked = hook(model, tokenizer, name)
        return BorrowedModel(hooked, _implementations(model))


@contextmanager
def _as_it_was(model: Module) -> Iterator[None]:
    """Sets back, after the block, the model's attention implementation and all random numbers."""
    own = _implementations(model)
    with _random_numbers_kept(base_of(model).device):
        try:
            yield
        finally:
            _set(own)


@contextmanager
def _random_numbers_kept(device: torch.device) -> Iterator[None]:
    """Sets the generators of Python, NumPy and torch back to where they were, on the CPU and on a device."""
    devices = [] if device.type == "cpu" else [device]
    kind = "cuda" if device.type == "cpu" else device.type  # of no devices any will do
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices, device_type=kind):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _implementations(model: Module) -> Implementations:
    configs = (getattr(module, "config", None) for module in model.modules())
    different = {id(config): config for config in configs if isinstance(config, PreTrainedConfig)}
    return [(config, config._attn_implementation) for config in different.values()]


def _set(implementations: Implementations) -> None:
    for config, implementation in implementations:  # an outer one also sets those inside it, which come after it
        config._attn_implementation = implementation
