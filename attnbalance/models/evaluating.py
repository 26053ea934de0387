"""A model in evaluation mode and in its weights' own precision, however a trainer left it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn import Module
from transformers import PreTrainedModel

from attnbalance.errors import ModelError


@contextmanager
def evaluating(model: Module) -> Iterator[None]:
    """The model in evaluation mode (no dropout) and without a trainer's autocast; back as it was afterwards.

    Training with `bf16=True` leaves accelerate's autocast around the forward pass of a model of float32 weights. What
    is measured is what a checkpoint loaded from disk would give. Raises what `check_bare` raises.
    """
    check_bare(model)
    training = [module for module in model.modules() if module.training]
    wrapped = {module: vars(module)["forward"] for module in model.modules() if "_original_forward" in vars(module)}
    model.eval()
    for module in wrapped:  # also a base into which adapters were put after it was trained
        module.forward = module._original_forward  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        for module, forward in wrapped.items():
            module.forward = forward
        for module in training:  # each by itself: parts that were frozen in evaluation mode stay in it
            module.training = True


def check_bare(model: Module) -> None:
    """Raise `ModelError` for a transformers model into which peft has put adapters, without its PeftModel.

    Such a model may have been hooked before: it is the finetuned model now.
    """
    injected = isinstance(model, PreTrainedModel) and hasattr(model, "peft_config")
    if injected and not getattr(model, "_hf_peft_config_loaded", False):
        raise ModelError(
            f"adapters were put into this {type(model).__name__} object: pass the PeftModel around it, unload() them, "
            "or pass the path of the model"
        )
