"""Adapters that are more than a change of weights are refused by name, in memory and from a folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import transformers
from peft.tuners.lora.config import (
    ArrowConfig,
    BdLoraConfig,
    KasaConfig,
    MontecloraConfig,
    VeloraConfig,
)
from tiny import tiny_tokenizer

from attnbalance import load_model
from attnbalance.errors import ModelError
from attnbalance.models.adapter_kinds import beyond_lora, unreadable

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


@pytest.mark.parametrize("name", ["use_rslora", "use_dora", "fan_in_fan_out"])
def test_a_flag_that_is_neither_true_nor_false_is_refused_by_its_name(
    llama_folder: Path, tmp_path: Path, name: str
) -> None:
    """Peft takes "no" for true."""
    config = peft.LoraConfig(**TARGETS)
    model: Any = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(llama_folder), config)
    model.save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: "no"}))
    with pytest.raises(ModelError, match=f"has {name}='no' in adapter_config.json, which must be true or false"):
        load_model(llama_folder, adapter=tmp_path / "adapter", tokenizer=tiny_tokenizer())


def test_adapters_that_change_weights_can_be_read() -> None:
    nothing: Any = None  # as null in a config that another program wrote
    assert unreadable(peft.LoraConfig(**TARGETS, fan_in_fan_out=nothing)) is None
    for config in (peft.LoraConfig(**TARGETS), peft.OFTConfig(**TARGETS), peft.IA3Config(**TARGETS)):
        assert unreadable(config) is None
    assert str(unreadable(peft.ShadowConfig())).startswith("is of type SHADOW, which runs a second model")
    mixed = peft.XLoraConfig(task_type="CAUSAL_LM", hidden_size=8, adapters={"0": "a"})
    assert str(unreadable(mixed)).startswith("is of type XLORA, which mixes its adapters by the input")


@pytest.mark.parametrize(
    "settings",
    [
        {"use_dora": True},
        {"lora_bias": True},
        {"use_bdlora": BdLoraConfig(target_modules_bd_a=["q_proj"], nblocks=2)},
        {"use_qalora": True},
        {"kasa_config": KasaConfig()},
        {"monteclora_config": MontecloraConfig()},
        {"velora_config": VeloraConfig()},
        {"arrow_config": ArrowConfig()},
        {"alora_invocation_tokens": [5]},
        {"layer_replication": [(0, 2), (1, 2)]},
    ],
)
def test_fields_that_make_lora_more_than_its_product_are_named(settings: dict[str, Any]) -> None:
    assert beyond_lora(peft.LoraConfig(**TARGETS, **settings)) == list(settings)


def test_a_field_of_a_later_peft_is_named_once_it_is_set() -> None:
    @dataclass
    class Later(peft.LoraConfig):
        use_triple: bool = False

    assert beyond_lora(Later(**TARGETS)) == []
    assert beyond_lora(Later(**TARGETS, use_triple=True)) == ["use_triple"]


def test_plain_lora_is_plain_whatever_its_sizes_and_places() -> None:
    sizes: dict[str, Any] = {"r": 3, "lora_alpha": 5, "lora_dropout": 0.1, "use_rslora": True, "bias": "all"}
    patterns: dict[str, Any] = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 2}, "exclude_modules": ["x"]}
    places: dict[str, Any] = {"layers_to_transform": [0], "layers_pattern": "layers", "modules_to_save": ["lm_head"]}
    others: dict[str, Any] = {"trainable_token_indices": [3], "ensure_weight_tying": True, "fan_in_fan_out": True}
    of_files: dict[str, Any] = {"revision": "main", "base_model_name_or_path": "base", "inference_mode": True}
    off: dict[str, Any] = {"lora_bias": None, "use_dora": False, "layer_replication": []}
    config = peft.LoraConfig(
        **TARGETS, **sizes, **patterns, **places, **others, **of_files, **off, init_lora_weights="eva"
    )
    assert beyond_lora(config) == []
