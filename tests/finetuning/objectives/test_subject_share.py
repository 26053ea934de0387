"""Terms on the subject's share of the row, by hand and by what descending them does."""

from __future__ import annotations

import math

import pytest
import torch
from objective_oracle import (
    CHOSEN as FOUR,
)
from objective_oracle import (
    TEMPLATE,
    forward,
    gradients_of,
    hand_rows,
    loss_of,
    losses,
    made,
    pair,
)
from tiny import tiny_model, tiny_tokenizer

from attnbalance.finetuning.examples import (
    make_examples,
)
from attnbalance.models.hooked import hook


def test_floor_by_hand_is_the_mean_over_layers_of_what_the_heads_mean_lacks() -> None:
    # Layers' mean shares: 0.2 and 0.7; 0.2 and 0.5. A hinge by head would not be 0 for 0.15: one head has 0.1.
    assert losses("floor(0.5)", made(hand_rows())) == pytest.approx([(0.3 + 0) / 2, (0.3 + 0) / 2])
    assert losses("floor(0.6)", made(hand_rows())) == pytest.approx([0.4 / 2, (0.4 + 0.1) / 2])
    assert losses("floor(0.15)", made(hand_rows())) == [0.0, 0.0]
    assert losses("3*floor(0.5)", made(hand_rows())) == pytest.approx([0.45, 0.45])


def test_barrier_by_hand() -> None:
    expected = [-(math.log(0.2) + math.log(0.7)) / 2, -(math.log(0.2) + math.log(0.5)) / 2]
    assert losses("barrier", made(hand_rows())) == pytest.approx(expected)
    assert losses("barrier", made(torch.zeros(2, 2, 2, 4))) == pytest.approx([-math.log(1e-6)] * 2)  # and no infinity


def test_balance_by_hand() -> None:
    # relation minus subject: 0.4 - 0.2 and 0.05 - 0.7; 0.4 - 0.2 and 0.4 - 0.5
    assert losses("balance", made(hand_rows())) == pytest.approx([0.1, 0.1])


def test_a_floor_that_is_met_gives_no_gradient() -> None:
    model = pair("llama")[1]
    examples = make_examples(FOUR, model.tokenizer, TEMPLATE)
    lowest = float(forward(model, examples).share("subject").mean(-1).min())
    assert 0.01 < lowest < 0.99
    met = loss_of(f"floor({lowest - 0.005:.6f})", model, examples)
    assert met.item() == 0
    assert not any(gradient.any() for gradient in gradients_of(met, model.model))
    missed = loss_of(f"floor({lowest + 0.005:.6f})", model, examples)
    assert any(gradient.any() for gradient in gradients_of(missed, model.model))


@pytest.mark.parametrize("text", ["floor(0.99)", "barrier", "balance"])
def test_descending_a_row_objective_raises_attention_to_the_subject(text: str) -> None:
    base = tiny_model("llama")
    model = hook(base, tiny_tokenizer(), "model")
    examples = make_examples(FOUR, model.tokenizer, TEMPLATE)

    def excess() -> float:
        forward_pass = forward(model, examples)
        other = forward_pass.share("relation") if text == "balance" else torch.zeros(())
        return float((forward_pass.share("subject") - other).mean())

    before, slopes = excess(), gradients_of(loss_of(text, model, examples), base)
    size = math.sqrt(sum(float(gradient.square().sum()) for gradient in slopes))
    with torch.no_grad():
        for parameter, slope in zip(base.parameters(), slopes, strict=True):
            parameter -= 0.01 / size * slope
    assert excess() > before
