"""Copies of a model that compute with their own weights, whatever was put on the object."""

from __future__ import annotations

import copy
import functools
from types import MethodType
from typing import Any

from torch.nn import Module

from attnbalance.errors import ModelError

FORWARDS = ("forward", "_old_forward", "_original_forward")
"""Attributes of a module that hold a forward pass; accelerate keeps in the last two what it put its own around."""


def copy_model(model: Module, memo: dict[int, Any] | None = None) -> Any:
    """A deep copy; `memo` is as in `copy.deepcopy`: what takes the place of which object, by its id.

    Copying copies no function, so a forward pass that was put on the object may compute with the original's weights.
    That of trl's SFTTrainer is taken off the copy: without labels it does as the model's own. Those of accelerate are
    kept, since they find the module that they belong to. Raises `ModelError` for any other.
    """
    modules, left = list(model.modules()), set[int]()
    for module in modules:
        for name in FORWARDS:
            forward = vars(module).get(name)
            if forward is None or _is_own(forward, module) or _home_of(forward).startswith("accelerate."):
                continue
            if name != "forward" or _home_of(forward) != "trl.trainer.utils":
                raise ModelError(
                    f"{type(module).__name__}.forward was replaced on the object, and a copy may run it with the "
                    "weights of the original; save the model and load the folder (torch.compile: use model.compile())"
                )
            left.add(id(module))
    twin = copy.deepcopy(model, memo)
    for module, copied in zip(modules, twin.modules(), strict=True):
        if id(module) in left:
            del copied.forward
    return twin


def _is_own(forward: Any, module: Module) -> bool:
    """Whether a forward pass is that of the module's class, bound to the module."""
    return getattr(forward, "__self__", None) is module and getattr(forward, "__func__", None) is type(module).forward


def _home_of(forward: Any) -> str:
    """The name of the module of Python in which a function was written; empty for other objects.

    Its `__module__` is that of what it wraps.
    """
    while isinstance(forward, MethodType | functools.partial):
        forward = forward.__func__ if isinstance(forward, MethodType) else forward.func
    return str(getattr(forward, "__globals__", {}).get("__name__", ""))
