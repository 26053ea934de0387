"""The proof made on load refuses models whose rows would be wrong."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import transformers
from tiny import (
    BERT,
    GROUPED,
    INTERFACE,
    LATENT,
    OUTSIDE,
    SINKS,
    eager,
    tiny_config,
    tiny_model,
    tiny_prompts,
    tiny_tokenizer,
)

from attnbalance import load_model
from attnbalance.data.tokens import encode
from attnbalance.errors import ModelError
from attnbalance.models import rows
from attnbalance.models.rows import register
from attnbalance.models.self_check import self_check
from attnbalance.readings.attention import read_subject_attention


@pytest.mark.parametrize("family", [*INTERFACE, *SINKS, *OUTSIDE])
def test_each_family_is_read_through_the_kernel_it_has(family: str) -> None:
    register()
    model = tiny_model(family)
    proof = self_check(model, family)
    assert (proof.kernel, proof.layers) == ("eager" if family in OUTSIDE else "sdpa", (0, 1))
    assert proof.editable == (family not in OUTSIDE)


def test_a_family_outside_the_interface_says_so_once() -> None:
    with pytest.warns(UserWarning, match=r"BloomForCausalLM is outside .* eager attention") as said:
        load_model(tiny_model("bloom"), tokenizer=tiny_tokenizer())
    assert len([w for w in said if "is outside" in str(w.message)]) == 1


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


@pytest.mark.parametrize("renumbered", [False, True])
def test_a_layer_that_was_copied_into_a_model_is_read_as_after_saving(tmp_path: Path, renumbered: bool) -> None:
    """The copy brings a configuration of its own, and may bring the number of another layer."""
    model = tiny_model("llama")
    layers = model.model.layers  # pyright: ignore[reportAttributeAccessIssue]
    layers.insert(1, copy.deepcopy(layers[0]))
    model.config.num_hidden_layers = 3
    if renumbered:
        for number, layer in enumerate(layers):
            layer.self_attn.layer_idx = number
    model.save_pretrained(tmp_path)
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    hooked = load_model(model, tokenizer=tiny_tokenizer())
    assert (hooked.layers, hooked.editable) == ((0, 1, 2), renumbered)
    (encoding,) = encode(tiny_prompts()[:1], tiny_tokenizer())
    maps = saved(torch.tensor([encoding.ids]), output_attentions=True, use_cache=False).attentions
    subject = list(encoding.spans["subject"])
    expected = torch.stack([layer[0, :, -1, subject].amax(-1) for layer in maps])
    values = read_subject_attention(hooked, tiny_prompts()[:1]).values[0]
    torch.testing.assert_close(values, expected, atol=1e-6, rtol=0)  # probabilities in float32


def test_a_model_without_attention_is_refused_by_name() -> None:
    config = transformers.MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelError, match="^MambaForCausalLM returns no attention, so there is nothing to read"):
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
    with pytest.raises(ModelError, match=r"padded (left|right): rows differ by .* cannot be read reliably"):
        self_check(model, "it")
    assert model.config._attn_implementation == "eager"


def test_a_model_that_miscounts_its_positions_under_padding_is_refused() -> None:
    # RoBERTa counts positions from its padding id up, so position ids from 0 give it other numbers than its own
    config = transformers.RobertaConfig(**(BERT | {"is_decoder": True, "pad_token_id": 1}))  # pyright: ignore[reportArgumentType]
    torch.manual_seed(0)
    with pytest.raises(ModelError, match="cannot be read reliably"):
        load_model(transformers.RobertaForCausalLM(config), tokenizer=tiny_tokenizer())


@pytest.mark.parametrize("positions", [2, 8])
def test_a_model_of_few_positions_passes_the_proof(positions: int) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(tiny_config("gpt2", n_positions=positions))
    assert load_model(model, tokenizer=tiny_tokenizer()).max_positions == positions


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_model_that_reads_ahead_is_refused_in_half_precision(dtype: str) -> None:
    torch.manual_seed(0)
    bert = transformers.BertLMHeadModel(transformers.BertConfig(**BERT))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ModelError, match="is not causal"):
        load_model(bert, tokenizer=tiny_tokenizer(), dtype=dtype)


def test_a_tensor_that_a_family_hands_its_attention_unknown_to_us_leads_to_eager_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, oracle = tiny_model("llama"), eager(tiny_model("llama"))
    attention = type(model.model.layers[0].self_attn)
    forward = attention.forward

    def with_bias(self, *args, **kwargs):
        return forward(self, *args, **kwargs, new_bias=torch.zeros(1))

    monkeypatch.setattr(attention, "forward", with_bias)
    with pytest.warns(UserWarning, match="eager attention"):
        hooked = load_model(model, tokenizer=tiny_tokenizer())
    assert hooked.kernel == "eager"
    model.set_attn_implementation(rows.IMPLEMENTATION)
    with pytest.raises(ModelError, match="LlamaAttention passes its attention a tensor 'new_bias' that is not known"):
        model(input_ids=torch.arange(4)[None])
    assert oracle.config._attn_implementation == "eager"


def test_layers_that_share_one_attention_module_are_numbered_by_where_they_hold_it() -> None:
    sizes = GROUPED | {"num_hidden_layers": 4, "num_key_value_heads": 4, "mamba_d_state": 16, "n_mamba_heads": 2}
    kinds = ["linear_attention", "hybrid"] * 2
    config = transformers.Zamba2Config(**sizes, layers_block_type=kinds, mamba_headdim=32, mamba_ngroups=1)  # pyright: ignore[reportArgumentType]
    torch.manual_seed(0)
    hooked = load_model(transformers.AutoModelForCausalLM.from_config(config), tokenizer=tiny_tokenizer())
    assert (hooked.layers, hooked.editable) == ((1, 3), False)


def test_hybrids_whose_linear_layers_are_called_attention_too_are_numbered_by_their_calls() -> None:
    config = transformers.KimiLinearConfig(
        **GROUPED | LATENT | {"num_hidden_layers": 4, "v_head_dim": 8, "linear_head_dim": 8, "linear_num_heads": 4},
        layer_types=["linear_attention", "full_attention"] * 2,
        num_experts=4,
        num_experts_per_token=2,
        moe_intermediate_size=16,
        num_expert_group=1,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        topk_group=1,
    )  # pyright: ignore[reportArgumentType]
    torch.manual_seed(0)
    hooked = load_model(transformers.AutoModelForCausalLM.from_config(config), tokenizer=tiny_tokenizer())
    assert (hooked.layers, hooked.editable) == ((1, 3), True)
