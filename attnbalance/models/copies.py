"""Copies of a model that compute with their own weights, whatever was put on the object."""

from __future__ import annotations

import copy
import dis
import functools
from collections.abc import Collection
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
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
    """Whether a function reaches one of the modules in a way that copying does not follow.

    Copying follows what methods and partial functions are bound to. It copies no function: what these hold stays as it
    is.
    """
    while isinstance(forward, MethodType | functools.partial):
        forward = forward.__func__ if isinstance(forward, MethodType) else forward.func
    held, seen = [forward] if isinstance(forward, FunctionType) else [], set[int]()
    own = {id(module) for module in modules}
    while held:
        value = held.pop()
        if id(value) in own:
            return True
        if id(value) not in seen:
            seen.add(id(value))
            held += _held_by(value)
    return False


def _held_by(value: Any) -> list[Any]:
    """What a function or an object holds; libraries and classes hold no user's model."""
    match value:
        case FunctionType():
            cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
            return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *_globals_of(value)]
        case MethodType():
            return [value.__self__, value.__func__]
        case functools.partial():
            return [value.func, *value.args, *value.keywords.values()]
        case dict():
            return list(value.values())
        case list() | tuple() | set() | frozenset():
            return list(value)
        case type() | ModuleType():
            return []
        case _:
            return list(getattr(value, "__dict__", {}).values())


def _globals_of(function: FunctionType) -> list[Any]:
    """The globals that a function reads, but for functions of other files."""
    held = [function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__]
    return [each for each in held if getattr(each, "__globals__", function.__globals__) is function.__globals__]


def _names(code: CodeType) -> set[str]:
    """The names of globals in a function and in those within it."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}.union(*inner)
