"""Which of peft's adapters make a model that can be read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

UNREADABLE: Mapping[str, str] = {
    "POLY": "mixes its adapters by a task that each call must name",
    "SHADOW": "runs a second model beside the base",
    "XLORA": "mixes its adapters by the input, in a second pass",
}
"""Types of adapters that are more than a change of weights, and why."""


def unreadable(config: Any) -> str | None:
    """Why a model with an adapter of this configuration cannot be read, as what the adapter is or has; else None."""
    kind, only = str(getattr(config.peft_type, "value", config.peft_type)), "only changes of weights can be read"
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
