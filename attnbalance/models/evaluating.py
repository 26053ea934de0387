"""A model in evaluation mode and in its weights' own precision, however a trainer left it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.nn import Module

DEVICES = ("cpu", "cuda", "mps", "xpu")
"""Kinds of devices whose autocast is switched off."""


@contextmanager
def without_autocast() -> Iterator[None]:
    """Computes in the tensors' own precision, also inside a caller's `torch.autocast`."""
    with ExitStack() as stack:
        for kind in DEVICES:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def evaluating(model: Module) -> Iterator[None]:
    """The model in evaluation mode (no dropout) and without autocast; afterwards as it was before.

    Training with `bf16=True` leaves accelerate's autocast around the forward pass of a model of float32 weights, and
    the caller may be inside a `torch.autocast`. What is measured is what a checkpoint loaded from disk would give.
    """
    training = [module for module in model.modules() if module.training]
    wrapped = {
        module: vars(module)["forward"]
        for module in model.modules()
        if {"forward", "_original_forward"} <= vars(module).keys()
    }
    model.eval()
    for module in wrapped:  # also a base into which adapters were put after it was trained
        module.forward = module._original_forward  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with without_autocast():
            yield
    finally:
        for module, forward in wrapped.items():
            module.forward = forward
        for module in training:  # each by itself: parts that were frozen in evaluation mode stay in it
            module.training = True
