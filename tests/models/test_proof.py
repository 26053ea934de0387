"""The proof made on load refuses models whose rows would be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from tiny import GPT2, GROUPED, INTERFACE, OUTSIDE, SINKS, tiny_config, tiny_model, tiny_tokenizer

from attnbalance import load_model
from attnbalance.errors import ModelError
from attnbalance.models import rows
from attnbalance.models.proof import prove
from attnbalance.models.rows import register


@pytest.mark.parametrize("family", [*INTERFACE, *SINKS, *OUTSIDE])
def test_each_family_is_read_through_the_kernel_it_has(family: str) -> None:
    register()
    model = tiny_model(family)
    assert prove(model, family) == ("eager" if family in OUTSIDE else "sdpa", 2)


def test_a_family_outside_the_interface_says_so_once() -> None:
    with pytest.warns(UserWarning, match=r"BloomForCausalLM stands outside .* eager attention") as said:
        load_model(tiny_model("bloom"), tokenizer=tiny_tokenizer())
    assert len([w for w in said if "stands outside" in str(w.message)]) == 1


def test_layers_that_drop_keywords_are_read_through_eager_attention() -> None:
    # StableLM stands in the interface, but its layers do not hand the query index on
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.StableLmConfig(**GROUPED))  # pyright: ignore[reportArgumentType]
    with pytest.warns(UserWarning, match="eager"):
        assert load_model(model, tokenizer=tiny_tokenizer()).kernel == "eager"


def test_hybrid_models_number_their_attention_layers() -> None:
    config = transformers.Lfm2Config(
        **(GROUPED | {"num_hidden_layers": 3}), layer_types=["conv", "full_attention", "conv"]
    )  # pyright: ignore[reportArgumentType]
    torch.manual_seed(0)
    assert load_model(transformers.AutoModelForCausalLM.from_config(config), tokenizer=tiny_tokenizer()).layers == (1,)


def test_a_model_without_attention_is_refused_by_name() -> None:
    config = transformers.MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelError, match="MambaForCausalLM .* gives no attention that could be read"):
        load_model(model, tokenizer=tiny_tokenizer())


@pytest.mark.parametrize("fault", ["scale", "mask", "softcap"])
def test_a_wrong_row_is_noticed_and_the_model_left_as_it_was(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = rows.query_row

    def wrong(module, query, key, attention_mask, query_index, **kwargs):
        if fault == "scale":
            kwargs["scaling"] = 1.02 * kwargs["scaling"]
        elif fault == "mask":
            attention_mask = None
        else:
            kwargs["softcap"] = None
        return right(module, query, key, attention_mask, query_index, **kwargs)

    monkeypatch.setattr(rows, "query_row", wrong)
    model = tiny_model("gemma2")
    model.set_attn_implementation("eager")
    with pytest.raises(ModelError, match=r"padded left: rows differ by .* cannot be read reliably"):
        prove(model, "it")
    assert model.config._attn_implementation == "eager"


def test_a_model_that_miscounts_its_positions_under_padding_is_refused() -> None:
    # RoBERTa counts positions from its padding id up, so position ids from 0 give it other numbers than its own
    config = transformers.RobertaConfig(**(GPT2_LIKE | {"is_decoder": True, "pad_token_id": 1}))  # pyright: ignore[reportArgumentType]
    torch.manual_seed(0)
    with pytest.raises(ModelError, match="cannot be read reliably"):
        load_model(transformers.RobertaForCausalLM(config), tokenizer=tiny_tokenizer())


GPT2_LIKE = {
    "vocab_size": GPT2["vocab_size"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


@pytest.mark.parametrize("positions", [2, 8])
def test_a_model_of_few_positions_passes_the_proof(positions: int) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(tiny_config("gpt2", n_positions=positions))
    assert load_model(model, tokenizer=tiny_tokenizer()).max_positions == positions


def test_half_precision_passes_the_proof() -> None:
    for dtype in ("bfloat16", "float16", "float64"):
        for family in ("llama", "gemma2", "gpt2"):
            assert load_model(tiny_model(family), tokenizer=tiny_tokenizer(), dtype=dtype).kernel == "sdpa"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_model_that_reads_ahead_is_refused_in_half_precision(dtype: str) -> None:
    torch.manual_seed(0)
    bert = transformers.BertLMHeadModel(transformers.BertConfig(**GPT2_LIKE))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ModelError, match="is not causal"):
        load_model(bert, tokenizer=tiny_tokenizer(), dtype=dtype)


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
        config = transformers.RobertaConfig(**(GPT2_LIKE | {"is_decoder": True, "pad_token_id": 1}))  # pyright: ignore[reportArgumentType]
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    register()
    with pytest.raises(ModelError, match=r"padded left: rows differ by .* cannot be read reliably"):
        prove(model, "it")
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_deeper_and_larger_models_pass_the_proof() -> None:
    torch.manual_seed(0)
    config = tiny_config("llama", num_hidden_layers=12, hidden_size=128, num_attention_heads=8)
    assert (
        load_model(transformers.AutoModelForCausalLM.from_config(config), tokenizer=tiny_tokenizer()).kernel == "sdpa"
    )
