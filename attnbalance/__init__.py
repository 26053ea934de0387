"""Where finetuning takes a language model's attention off the subject of a question, and what that costs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnbalance.datasets.load import load_facts
    from attnbalance.errors import AttnBalanceError
    from attnbalance.facts import Fact, FactSet
    from attnbalance.finetune.examples import as_examples, make_examples
    from attnbalance.finetune.objective_trainer import ObjectiveMixin, ObjectiveTrainer
    from attnbalance.finetune.objectives import parse_objective
    from attnbalance.finetune.parameters import add_lora, choose, train_only
    from attnbalance.finetune.ranking import rank_facts
    from attnbalance.finetune.splits import split_facts
    from attnbalance.models.bridge import BridgedModel, bridge_of
    from attnbalance.models.edits import boost, rows_of_model
    from attnbalance.models.hooked import HookedModel
    from attnbalance.models.load import load_model
    from attnbalance.models.parts import transplant_weights
    from attnbalance.prompts import Prompt, Template, make_prompts
    from attnbalance.readings.attention import AttentionRows, read_attention
    from attnbalance.readings.causal import rescue, steer_attention
    from attnbalance.readings.change import Change, read_change
    from attnbalance.readings.contrast import Contrasts, make_contrasts
    from attnbalance.readings.curves import Curve, head_map, layer_curve
    from attnbalance.readings.drift import read_drift
    from attnbalance.readings.ledger import Ledger, read_ledger
    from attnbalance.readings.reading import Reading, difference
    from attnbalance.readings.recall import Recall, recall
    from attnbalance.readings.relevance import Relevance, read_relevance
    from attnbalance.readings.salience import read_mlp_salience, read_stored_answers, read_value_salience, top_neurons
    from attnbalance.tokens import PromptBatch

_HOME = {
    "AttentionRows": "readings.attention",
    "AttnBalanceError": "errors",
    "BridgedModel": "models.bridge",
    "Change": "readings.change",
    "Contrasts": "readings.contrast",
    "Curve": "readings.curves",
    "Fact": "facts",
    "FactSet": "facts",
    "HookedModel": "models.hooked",
    "Ledger": "readings.ledger",
    "ObjectiveMixin": "finetune.objective_trainer",
    "ObjectiveTrainer": "finetune.objective_trainer",
    "Prompt": "prompts",
    "PromptBatch": "tokens",
    "Reading": "readings.reading",
    "Recall": "readings.recall",
    "Relevance": "readings.relevance",
    "Template": "prompts",
    "add_lora": "finetune.parameters",
    "as_examples": "finetune.examples",
    "boost": "models.edits",
    "bridge_of": "models.bridge",
    "choose": "finetune.parameters",
    "difference": "readings.reading",
    "head_map": "readings.curves",
    "layer_curve": "readings.curves",
    "load_facts": "datasets.load",
    "load_model": "models.load",
    "make_contrasts": "readings.contrast",
    "make_examples": "finetune.examples",
    "make_prompts": "prompts",
    "parse_objective": "finetune.objectives",
    "rank_facts": "finetune.ranking",
    "read_attention": "readings.attention",
    "read_change": "readings.change",
    "read_drift": "readings.drift",
    "read_ledger": "readings.ledger",
    "read_mlp_salience": "readings.salience",
    "read_relevance": "readings.relevance",
    "read_stored_answers": "readings.salience",
    "read_value_salience": "readings.salience",
    "recall": "readings.recall",
    "rescue": "readings.causal",
    "rows_of_model": "models.edits",
    "split_facts": "finetune.splits",
    "steer_attention": "readings.causal",
    "top_neurons": "readings.salience",
    "train_only": "finetune.parameters",
    "transplant_weights": "models.parts",
}

__all__ = [
    "AttentionRows",
    "AttnBalanceError",
    "BridgedModel",
    "Change",
    "Contrasts",
    "Curve",
    "Fact",
    "FactSet",
    "HookedModel",
    "Ledger",
    "ObjectiveMixin",
    "ObjectiveTrainer",
    "Prompt",
    "PromptBatch",
    "Reading",
    "Recall",
    "Relevance",
    "Template",
    "add_lora",
    "as_examples",
    "boost",
    "bridge_of",
    "choose",
    "difference",
    "head_map",
    "layer_curve",
    "load_facts",
    "load_model",
    "make_contrasts",
    "make_examples",
    "make_prompts",
    "parse_objective",
    "rank_facts",
    "read_attention",
    "read_change",
    "read_drift",
    "read_ledger",
    "read_mlp_salience",
    "read_relevance",
    "read_stored_answers",
    "read_value_salience",
    "recall",
    "rescue",
    "rows_of_model",
    "split_facts",
    "steer_attention",
    "top_neurons",
    "train_only",
    "transplant_weights",
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
