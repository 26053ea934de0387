"""In 16 bits rounding passes the comparison with eager attention, and wrong rows do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from tiny import (
    BERT,
    tiny_config,
    tiny_model,
    tiny_tokenizer,
)

from attnbalance import load_model
from attnbalance.errors import ModelError
from attnbalance.models import rows
from attnbalance.models.eager_reference import _slope_error
from attnbalance.models.rows import register
from attnbalance.models.self_check import self_check


def test_half_precision_passes_the_proof() -> None:
    for dtype in ("bfloat16", "float16", "float64"):
        for family in ("llama", "gemma2", "gpt2"):
            assert load_model(tiny_model(family), tokenizer=tiny_tokenizer(), dtype=dtype).kernel == "sdpa"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_trained_model_passes_the_proof_in_half_precision(dtype: str, stories: Path) -> None:
    assert load_model(stories, dtype=dtype).kernel == "sdpa"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("layers", [16, 32])
def test_rounding_that_grows_through_many_layers_passes_the_proof(layers: int, dtype: str) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(tiny_config("llama", num_hidden_layers=layers))
    assert load_model(model, tokenizer=tiny_tokenizer(), dtype=dtype).kernel == "sdpa"


@pytest.mark.parametrize("fault", ["padding", "last layer", "scale", "softcap", "positions"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_wrong_row_is_noticed_in_half_precision(
    fault: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = rows.query_row

    def wrong(module, query, key, attention_mask, query_index, **kwargs):
        if fault == "scale":
            kwargs["scaling"] = 1.3 * kwargs["scaling"]
        elif fault == "softcap":
            kwargs["softcap"] = None
        elif fault == "padding" or (fault == "last layer" and module.layer_idx == 7):
            attention_mask = None
        return right(module, query, key, attention_mask, query_index, **kwargs)

    monkeypatch.setattr(rows, "query_row", wrong)
    torch.manual_seed(0)
    config = tiny_config("llama", num_hidden_layers=8)
    if fault == "softcap":
        config = tiny_config("gemma2", attn_logit_softcapping=0.2)
    if fault == "positions":
        config = transformers.RobertaConfig(**(BERT | {"is_decoder": True, "pad_token_id": 1}))  # pyright: ignore[reportArgumentType]
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    register()
    with pytest.raises(ModelError, match=r"padded (left|right): rows differ by .* cannot be read reliably"):
        self_check(model, "it")
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_deeper_and_larger_models_pass_the_proof() -> None:
    torch.manual_seed(0)
    config = tiny_config("llama", num_hidden_layers=12, hidden_size=128, num_attention_heads=8)
    assert (
        load_model(transformers.AutoModelForCausalLM.from_config(config), tokenizer=tiny_tokenizer()).kernel == "sdpa"
    )


@pytest.mark.parametrize("factor", [0.95, 1.05])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_a_score_scale_wrong_by_a_twentieth_is_noticed_in_half_precision(
    family: str, dtype: torch.dtype, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = rows.query_row

    def wrong(module, query, key, attention_mask, query_index, scaling=None, **kwargs):
        scaling = factor * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        return right(module, query, key, attention_mask, query_index, scaling=scaling, **kwargs)

    register()
    model = tiny_model(family).to(dtype)
    assert self_check(model, "it").kernel == "sdpa"
    monkeypatch.setattr(rows, "query_row", wrong)
    with pytest.raises(ModelError, match=r"logarithms by a factor off by [3-5]\.\d%"):
        self_check(model, "it")


def test_rows_that_are_uniform_but_for_rounding_say_nothing_of_a_slope() -> None:
    generator = torch.Generator().manual_seed(0)
    ours = [(1e-4 * torch.randn(2, 4, 9, generator=generator)).softmax(-1)]
    theirs = [row.bfloat16().float() for row in ours]
    assert all(len(row.unique()) == 1 for row in theirs)
    rounding = torch.finfo(torch.bfloat16).eps / 12**0.5
    assert _slope_error(ours, theirs, rounding) == 0
    steep = [torch.randn(2, 4, 9, generator=generator).softmax(-1)]
    flatter = [row.log().mul(0.9).softmax(-1) for row in steep]
    assert _slope_error(steep, flatter, rounding) > 0.05
