"""Bridges are built for families that can be taken apart, and refused by name for others."""

from __future__ import annotations

import pytest
import transformers
from tiny import GROUPED
from uneven import hooked

from attnbalance.errors import ModelError
from attnbalance.models.bridge import bridge_of

pytestmark = pytest.mark.filterwarnings("ignore:.*is outside")


def test_a_model_with_layers_without_attention_is_refused() -> None:
    kinds = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
    with pytest.raises(ModelError, match="Lfm2ForCausalLM has layers without attention"):
        bridge_of(hooked(transformers.Lfm2Config(**(GROUPED | kinds))))
