"""A model that is borrowed from its training: read as ever, and given back as it was."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from tiny import eager, tiny_lora, tiny_model, tiny_prompts, tiny_tokenizer

from attnbalance.data.batches import pad
from attnbalance.data.tokens import encode
from attnbalance.errors import ModelError
from attnbalance.models.forward import forward_rows
from attnbalance.models.hooked import hook
from attnbalance.models.implementations import borrow

BATCH = pad(encode(tiny_prompts(), tiny_tokenizer()))


@pytest.mark.parametrize("family", ["llama", "gemma2", "bloom"])
@pytest.mark.filterwarnings("ignore:.*outside transformers' attention interface")
def test_a_lent_model_gives_the_rows_of_eager_attention_and_keeps_its_own_function(family):
    model = tiny_model(family)
    model.train()
    own = model.config._attn_implementation
    borrowed = borrow(model, tiny_tokenizer(), "tiny")
    assert model.config._attn_implementation == own
    with borrowed.lent() as lent, torch.no_grad():
        rows = lent.rows(BATCH)
    expected, _ = forward_rows(eager(model), BATCH, "eager")
    torch.testing.assert_close(rows, expected, atol=1e-5, rtol=0)  # float32 sums in another order: 1e-6
    assert model.config._attn_implementation == own
    assert all(module.training for module in model.modules())


def test_outside_a_loan_the_model_cannot_be_read():
    borrowed = borrow(tiny_model("llama"), tiny_tokenizer(), "tiny")
    with pytest.raises(ModelError, match="runs attention implementation 'sdpa'"):
        borrowed.hooked.rows(BATCH)


def test_a_model_that_cannot_be_read_is_given_back_too():
    model = tiny_model("llama")
    model.lm_head.weight.data[:] = torch.nan
    with pytest.raises(ModelError, match="NaN"):
        borrow(model, tiny_tokenizer(), "tiny")
    assert model.config._attn_implementation == "sdpa"


def test_an_error_while_it_is_lent_gives_it_back():
    model = tiny_model("llama")
    borrowed, before = borrow(model, tiny_tokenizer(), "tiny"), torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), borrowed.lent():
        torch.rand(1)
        raise ZeroDivisionError
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "draw", [random.random, np.random.rand, lambda: torch.rand(1)], ids=["python", "numpy", "torch"]
)
def test_random_numbers_that_are_drawn_meanwhile_are_drawn_again_afterwards(draw):
    borrowed = borrow(tiny_model("llama"), tiny_tokenizer(), "tiny")
    with borrowed.lent():
        first = draw()
    assert draw() == first
    assert draw() != first


@pytest.mark.parametrize("kind", ["plain", "lora"])
def test_it_computes_without_the_autocast_of_training_and_gets_it_back(kind, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(AcceleratorState, "_shared_state", {})  # trainers of other tests may have set it, to float32
    model = tiny_model("llama")
    model = tiny_lora(model, ["q_proj", "v_proj"]) if kind == "lora" else model
    alone = hook(copy.deepcopy(model), tiny_tokenizer(), "tiny")
    borrowed = borrow(model, tiny_tokenizer(), "tiny")
    Accelerator(mixed_precision="bf16", cpu=True).prepare(model)
    wrapped = model.forward
    with borrowed.lent() as lent, torch.no_grad():
        assert torch.equal(lent.rows(BATCH), alone.rows(BATCH))
    assert model.forward is wrapped
    with torch.no_grad():
        ids = BATCH.input_ids
        assert not torch.equal(model(ids).logits, alone.model(ids).logits)  # bfloat16 now
