"""Which differences of two configurations are named, and which have no effect on outputs."""

from __future__ import annotations

import json
import math

import torch
from tiny import tiny_config
from transformers import AutoModelForCausalLM, PreTrainedModel

from attnbalance.models.config_changes import changed_settings, settings_of


def shell(family: str = "llama", **changes: object) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_config(family, **changes))


def test_settings_that_outputs_depend_on_are_named_with_both_values() -> None:
    rope = {"rope_type": "linear", "rope_theta": 50.0, "factor": 4.0}
    other = shell(rms_norm_eps=0.1, hidden_act="relu", rope_parameters=rope)
    assert changed_settings(shell(), other) == {
        "hidden_act": ("silu", "relu"),
        "rms_norm_eps": (1e-6, 0.1),
        "rope_parameters.factor": (None, 4.0),
        "rope_parameters.rope_theta": (10000.0, 50.0),
        "rope_parameters.rope_type": ("default", "linear"),
    }
    assert changed_settings(shell("mistral"), shell("mistral", sliding_window=None)) == {"sliding_window": (4, None)}


def test_names_tokens_dropout_and_dtype_are_no_difference() -> None:
    other = shell(attention_dropout=0.1, eos_token_id=3, use_cache=False, initializer_range=0.7)
    other.config.name_or_path, other.config.dtype = "elsewhere", "bfloat16"
    other.config._attn_implementation = "eager"
    assert changed_settings(shell(), other) == {}
    assert changed_settings(shell("gpt2"), shell("gpt2", resid_pdrop=0.3, attn_pdrop=0.0)) == {}


def test_settings_are_as_json_says_them_infinite_ones_too() -> None:
    config = shell(limits=(0.0, math.inf)).config
    settings = settings_of(config)
    assert settings["limits"] == [0.0, "Infinity"]
    assert json.loads(json.dumps(settings, allow_nan=False)) == settings
