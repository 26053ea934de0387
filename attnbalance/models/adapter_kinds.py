"""Which of peft's adapters make a model that can be read, and which are plain LoRA."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peft import LoraConfig

UNREADABLE: Mapping[str, str] = {
    "POLY": "mixes its adapters by a task that each call must name",
    "SHADOW": "runs a second model beside the base",
    "XLORA": "mixes its adapters by the input, in a second pass",
}
"""Types of adapters that are more than a change of weights, and why."""

PLAIN_LORA = frozenset(
    {
        "task_type",
        "peft_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "r",
        "lora_alpha",
        "lora_dropout",
        "use_rslora",
        "qalora_group_size",
        "rank_pattern",
        "alpha_pattern",
        "bias",
        "fan_in_fan_out",
        "target_modules",
        "target_parameters",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "modules_to_save",
        "trainable_token_indices",
        "ensure_weight_tying",
        "runtime_config",
        "megatron_config",
        "megatron_core",
        "init_lora_weights",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
    }
)
"""Fields of peft's LoraConfig with any of whose values a weight changes by the product of the two matrices alone."""


def unreadable(config: Any) -> str | None:
    """Why a model with an adapter of this configuration cannot be read, as what the adapter is or has; else None."""
    kind, only = str(getattr(config.peft_type, "value", config.peft_type)), "only changes of weights can be read"
    for field in fields(config):
        value = getattr(config, field.name)
        if field.type in (bool, "bool") and not isinstance(value, bool | None):
            return f"has {field.name}={value!r} in adapter_config.json, which must be true or false"
    if config.is_prompt_learning:
        return f"is of type {kind}, which puts tokens before the prompt; {only}"
    if kind in UNREADABLE:
        return f"is of type {kind}, which {UNREADABLE[kind]}; {only}"
    if getattr(config, "alora_invocation_tokens", None):
        return f"is an activated LoRA, which works only behind its invocation tokens; {only}"
    if getattr(config, "layer_replication", None):
        return (
            f"has layer_replication={config.layer_replication}: its model has other layers than its base, so that the "
            "two cannot be compared layer by layer"
        )
    return None


def beyond_lora(config: LoraConfig) -> list[str]:
    """The fields of a LoRA adapter that are set and may make it more than LoRA's product, such as `use_dora`."""
    usual = type(config)()
    named = [field.name for field in fields(config) if field.name not in PLAIN_LORA]
    values = {name: getattr(config, name) for name in named}
    return [name for name, value in values.items() if value and value != getattr(usual, name)]
