"""The hooked model itself."""

from __future__ import annotations

import pytest
import torch
from tiny import POSITIONS, tiny_model, tiny_prompts, tiny_tokenizer

from attnbalance import HookedModel, load_model
from attnbalance.data.tokens import encode, pad
from attnbalance.errors import ModelError
from attnbalance.models.hooked import hook


@pytest.mark.filterwarnings("ignore:.*is outside")
@pytest.mark.parametrize(("family", "limit"), [("gpt2", POSITIONS), ("llama", POSITIONS), ("bloom", None)])
def test_it_knows_its_layers_limit_and_device(family: str, limit: int | None) -> None:
    model = load_model(tiny_model(family), tokenizer=tiny_tokenizer())
    assert isinstance(model, HookedModel)
    assert (model.layers, model.max_positions, str(model.device)) == ((0, 1), limit, "cpu")


@pytest.mark.parametrize(("kind", "expected"), [("plain", 2), ("no_pad", 1), ("no_special", 0)])
def test_padding_takes_the_pad_token_the_end_or_zero(kind: str, expected: int) -> None:
    assert load_model(tiny_model("gpt2"), tokenizer=tiny_tokenizer(kind)).pad_id == expected


def test_hooking_twice_changes_nothing() -> None:
    model, batch = tiny_model("qwen3"), pad(encode(tiny_prompts(), tiny_tokenizer()))
    once = hook(model, tiny_tokenizer(), "a").rows(batch)
    assert torch.equal(hook(model, tiny_tokenizer(), "b").rows(batch), once)


def test_rows_carry_gradients_outside_no_grad_and_none_inside() -> None:
    hooked = hook(tiny_model("llama"), tiny_tokenizer(), "it")
    batch = pad(encode(tiny_prompts(), tiny_tokenizer()))
    assert hooked.rows(batch).requires_grad
    with torch.no_grad():
        assert not hooked.rows(batch).requires_grad


def test_logits_that_are_not_numbers_are_refused_though_the_rows_are_sound() -> None:
    hooked = hook(tiny_model("llama"), tiny_tokenizer(), "it")
    with torch.no_grad():
        hooked.model.lm_head.weight[3] = torch.inf  # pyright: ignore
    with pytest.raises(ModelError, match=r"it gives NaN or infinite numbers \(first at prompt 'Question: In what"):
        hooked.rows(pad(encode(tiny_prompts(), tiny_tokenizer())))
