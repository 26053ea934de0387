"""Where finetuning takes a language model's attention off the subject of a question, and what that costs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnbalance.datasets.load import load_facts
    from attnbalance.errors import AttnBalanceError
    from attnbalance.facts import Fact, FactSet
    from attnbalance.models.hooked import HookedModel
    from attnbalance.models.load import load_model
    from attnbalance.prompts import Prompt, Template, make_prompts
    from attnbalance.readings.attention import AttentionRows, read_attention
    from attnbalance.readings.curves import Curve, head_map, layer_curve
    from attnbalance.readings.reading import Reading, difference
    from attnbalance.readings.recall import Recall, recall
    from attnbalance.tokens import PromptBatch

_HOME = {
    "AttentionRows": "readings.attention",
    "AttnBalanceError": "errors",
    "Curve": "readings.curves",
    "Fact": "facts",
    "FactSet": "facts",
    "HookedModel": "models.hooked",
    "Prompt": "prompts",
    "PromptBatch": "tokens",
    "Reading": "readings.reading",
    "Recall": "readings.recall",
    "Template": "prompts",
    "difference": "readings.reading",
    "head_map": "readings.curves",
    "layer_curve": "readings.curves",
    "load_facts": "datasets.load",
    "load_model": "models.load",
    "make_prompts": "prompts",
    "read_attention": "readings.attention",
    "recall": "readings.recall",
}

__all__ = [
    "AttentionRows",
    "AttnBalanceError",
    "Curve",
    "Fact",
    "FactSet",
    "HookedModel",
    "Prompt",
    "PromptBatch",
    "Reading",
    "Recall",
    "Template",
    "difference",
    "head_map",
    "layer_curve",
    "load_facts",
    "load_model",
    "make_prompts",
    "read_attention",
    "recall",
]


def __getattr__(name: str) -> object:
    """Import a public name where it is first used, so that `import attnbalance` stays light."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
