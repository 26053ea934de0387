"""Adapters that are more than a change of weights are refused by name, in memory and from a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import transformers
from tiny import tiny_tokenizer

from attnbalance import load_model
from attnbalance.errors import ModelError
from attnbalance.models.adapter_kinds import unreadable

TARGETS: dict[str, Any] = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj"]}
KINDS: dict[str, tuple[Any, str]] = {
    "prompt": (peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "puts tokens before the prompt"),
    "poly": (peft.PolyConfig(**TARGETS, r=4, n_tasks=2), "is of type POLY, which mixes its adapters by a task"),
    "activated": (peft.LoraConfig(**TARGETS, alora_invocation_tokens=[5]), "is an activated LoRA"),
    "replicated": (peft.LoraConfig(**TARGETS, layer_replication=[(0, 2), (1, 2)]), "has layer_replication="),
}


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_that_are_more_than_a_change_of_weights_are_refused(
    llama_folder: Path, tmp_path: Path, kind: str
) -> None:
    config, message = KINDS[kind]
    model: Any = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(llama_folder), config)
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ModelError, match=message):
        load_model(model, tokenizer=tiny_tokenizer())
    with pytest.raises(ModelError, match=message):
        load_model(llama_folder, adapter=tmp_path / "adapter")


def test_adapters_that_change_weights_can_be_read() -> None:
    for config in (peft.LoraConfig(**TARGETS), peft.OFTConfig(**TARGETS), peft.IA3Config(**TARGETS)):
        assert unreadable(config) is None
    assert str(unreadable(peft.ShadowConfig())).startswith("is of type SHADOW, which runs a second model")
    mixed = peft.XLoraConfig(task_type="CAUSAL_LM", hidden_size=8, adapters={"0": "a"})
    assert str(unreadable(mixed)).startswith("is of type XLORA, which mixes its adapters by the input")
