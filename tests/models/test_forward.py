"""One forward pass: what goes in and what comes out."""

from __future__ import annotations

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from tiny import eager, tiny_model, tiny_prompts, tiny_tokenizer

from attnbalance.data.batches import pad
from attnbalance.data.tokens import encode
from attnbalance.errors import ModelError
from attnbalance.models.forward import (
    attention_layers,
    base_of,
    check_vocabulary,
    forward_rows,
    position_limit,
)
from attnbalance.models.rows import IMPLEMENTATION, register


def test_both_kernels_give_the_same_rows_and_logits() -> None:
    register()
    model = tiny_model("gemma2")
    batch = pad(encode(tiny_prompts(), tiny_tokenizer()))
    model.set_attn_implementation(IMPLEMENTATION)
    with torch.no_grad():
        rows, logits = forward_rows(model, batch, "sdpa")
        expected_rows, expected_logits = forward_rows(eager(model), batch, "eager")
    torch.testing.assert_close(rows, expected_rows, atol=1e-5, rtol=0)  # float32 sums in another order: 1e-6
    torch.testing.assert_close(logits, expected_logits, atol=1e-4, rtol=0)
    assert rows.shape == (9, 2, 4, batch.input_ids.shape[1])
    assert rows.dtype == torch.float32
    padding = ~batch.attention_mask[:, None, None, :].expand(rows.shape)
    assert not rows[padding].any()


def test_a_model_in_a_peft_model_is_found_and_anything_else_refused() -> None:
    model = tiny_model("llama")
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))  # pyright: ignore[reportArgumentType]
    assert base_of(adapted) is model
    assert base_of(model) is model
    with pytest.raises(ModelError, match="expected a transformers model .*, got Linear"):
        base_of(torch.nn.Linear(2, 2))


def test_only_a_limit_that_stands_in_the_configuration_counts() -> None:
    assert position_limit(transformers.XLNetConfig()) is None  # its class says -1 for no limit
    assert position_limit(transformers.GPT2Config(n_positions=1)) == 1
    with pytest.raises(ModelError, match="n_positions of GPT2Config must be at least 1, got 0"):
        position_limit(transformers.GPT2Config(n_positions=0))


def test_families_with_another_name_for_the_number_of_positions_have_a_limit_too() -> None:
    assert position_limit(transformers.MptConfig(max_seq_len=7)) == 7
    assert position_limit(transformers.WhisperConfig(max_target_positions=7)) == 7
    with pytest.raises(ModelError, match="max_seq_len of MptConfig must be at least 1, got 0"):
        position_limit(transformers.MptConfig(max_seq_len=0))


def test_reformer_is_read_up_to_the_length_of_its_chunks() -> None:
    settings = {"max_position_embeddings": 512, "local_attn_chunk_length": 64, "lsh_attn_chunk_length": 32}
    assert position_limit(transformers.ReformerConfig(**settings)) == 32


def test_attention_layers_are_all_layers_or_those_that_say_their_number() -> None:
    model = tiny_model("llama")
    assert attention_layers(model, 2) == (0, 1)
    with pytest.raises(ModelError, match="3 attention rows for 2 layers and does not say which"):
        attention_layers(model, 3)
    model.model.layers[0].self_attn.layer_idx = None
    assert attention_layers(model, 1) == (1,)


def test_the_last_id_of_the_vocabulary_is_known_and_the_next_is_not() -> None:
    model = tiny_model("gpt2")
    check_vocabulary(model, torch.tensor([[0, 419]]), "it")
    with pytest.raises(ModelError, match="token id 420 is outside the 420 tokens of it"):
        check_vocabulary(model, torch.tensor([[420, 1]]), "it")
