"""Models with their adapters merged: what transformers and peft models compute as plain weights."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch.nn import Module
from transformers import PreTrainedModel

from attnbalance.errors import ModelError
from attnbalance.models.copies import copy_model
from attnbalance.models.forward import base_of
from attnbalance.models.hooked import HookedModel


def merged(model: HookedModel) -> Module:
    """A copy of the transformers model as it computes now; the user's object stays as it is.

    Adapters (peft's, or those that transformers itself holds) are merged in float32, and left out in layers in which
    they are switched off. Raises `ModelError` for an adapter that peft cannot merge (such as LoRA biases on layers
    without), or that would change another module too (tied embeddings).
    """
    _check_tied(model)
    with model.evaluating():
        twin: Any = copy_model(model.model)
    try:
        if not hasattr(twin, "merge_and_unload"):
            return _without_own_adapters(twin)
        if _settled(twin):
            return twin.unload()
        return twin.float().merge_and_unload()  # in 16 bits most of a small adapter would be rounded away
    except Exception as error:
        raise ModelError(
            f"the adapter of {model.name} cannot be merged into its base, so its weights cannot be taken apart: "
            f"{type(error).__name__}: {str(error)[:200]}"
        ) from error


def _settled(twin: Any) -> bool:
    """Take out of a peft model what its forward pass does not use; whether no adapter is left to be merged.

    peft merges the adapters of all layers or of none, and puts trained copies of whole modules in either way.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    done, left = list[str](), False
    for name, module in list(twin.named_modules()):
        if any(name.startswith(f"{outer}.") for outer in done):
            continue
        layer = module.token_adapter if isinstance(module, TrainableTokensWrapper) else module
        if isinstance(layer, ModulesToSaveWrapper) and layer.disable_adapters:
            own = layer.original_module
        elif isinstance(layer, BaseTunerLayer) and (layer.disable_adapters or layer.merged):
            if layer.disable_adapters and layer.merged:
                layer.unmerge()  # pyright: ignore[reportCallIssue]
            own = layer.get_base_layer()  # active adapters beside merged ones are not applied
        else:
            left = left or isinstance(layer, BaseTunerLayer | ModulesToSaveWrapper)
            continue
        twin.set_submodule(name, own)
        done.append(name)
    return not left


def merged_base(model: HookedModel) -> PreTrainedModel:
    """The transformers model with adapters merged: the model itself if it has none, otherwise a copy."""
    has_adapters = any(hasattr(module, "adapter_layer_names") for module in model.model.modules())
    return base_of(merged(model) if has_adapters else model.model)


def _check_tied(model: HookedModel) -> None:
    """Raise `ModelError` for an adapter in use on weights that another module shares; peft merges it into both.

    Adapters of single tokens are exempt: they are in both modules.
    """
    from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    modules = dict(model.model.named_modules())
    users = defaultdict[int, list[str]](list)
    for name, module in modules.items():
        for parameter in module.parameters(recurse=False):
            users[id(parameter)].append(name)
    for name, layer in modules.items():
        if not isinstance(layer, BaseTunerLayer) or isinstance(layer, TrainableTokensLayer) or layer.disable_adapters:
            continue
        tied = [users[id(parameter)] for parameter in layer.get_base_layer().parameters(recurse=False)]
        if shared := next((names for names in tied if len(names) > 1), None):
            raise ModelError(
                f"the adapter of {model.name} must be on weights of one module to be merged, got {name}, whose weights "
                f"are tied ({' and '.join(shared)}); train it without that module, or untie the base before adding it"
            )


def _without_own_adapters(twin: Any) -> Module:
    """The model with the adapters that transformers itself put into it merged, or left out if switched off."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [(name, layer) for name, layer in twin.named_modules() if isinstance(layer, BaseTunerLayer)]
    if any(not layer.disable_adapters for _, layer in layers):
        twin.float()
    for name, layer in layers:
        if not layer.disable_adapters:
            layer.merge()  # pyright: ignore[reportAttributeAccessIssue]
        twin.set_submodule(name, layer.get_base_layer())
    return twin
