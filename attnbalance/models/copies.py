"""Copies of a model that compute with their own weights, whatever was put on the object."""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection
from types import FunctionType, MethodType
from typing import Any

from torch.nn import Module

from attnbalance.errors import ModelError


def copy_model(model: Module, memo: dict[int, Any] | None = None) -> Any:
    """A deep copy; `memo` is as in `copy.deepcopy`: what takes the place of which object, by its id.

    A forward pass that trl's SFTTrainer left on the object, with which the copy would compute with the weights of the
    original, is taken off the copy: without labels it does as the model's own. Raises `ModelError` for another one.
    """
    modules = list(model.modules())
    replaced = [module for module in modules if _captures(vars(module).get("forward"), modules)]
    for module in replaced:
        function = getattr(vars(module)["forward"], "__func__", None)  # its `__module__` is that of what it wraps
        if getattr(function, "__globals__", {}).get("__name__") != "trl.trainer.utils":
            raise ModelError(
                f"{type(module).__name__}.forward was replaced on the object, and a copy would still run it with the "
                "weights of the original; save the model and load the folder (torch.compile: model.compile() instead)"
            )
    twin, kept = copy.deepcopy(model, memo), {id(module) for module in replaced}
    for module, copied in zip(modules, twin.modules(), strict=True):
        if id(module) in kept:
            del copied.forward
    return twin


def _captures(forward: Any, modules: Collection[Module]) -> bool:
    """Whether a function holds one of the modules, or a method of one, in a way that copying does not follow."""
    held, seen = [forward], set[int]()
    own = {id(module) for module in modules}
    while held:
        value = held.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, MethodType):
            held.append(value.__func__)
        elif isinstance(value, functools.partial):
            held.append(value.func)
        elif isinstance(value, FunctionType):
            for cell in value.__closure__ or ():
                inner = cell.cell_contents
                if id(inner) in own or id(getattr(inner, "__self__", None)) in own:
                    return True
                held.append(inner)
    return False
