"""Row and state anchors, by hand and against plain transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from base_oracle import (
    CHOSEN,
    added,
    asked,
    base,
    only,
    tokens_of,
)
from objective_oracle import (
    examples_for,
    gradients_of,
    hand_rows,
    loss_of,
    losses,
    made,
    pair,
)
from tiny import tiny_tokenizer

from attnbalance.finetuning.objectives.parse import parse_objective


def test_row_anchors_by_hand() -> None:
    rows = hand_rows()
    base = rows.clone()
    base[0, 1, 0] = torch.tensor([0.5, 0.1, 0.4, 0.0])  # off by -0.3, 0, 0.3, 0: squared 0.18, over 4 heads 0.045
    whole = made(rows, targets={"row-anchor(question)/position": base})
    assert losses("row-anchor(question)", whole) == pytest.approx([0.045, 0.0], abs=1e-7)
    shares = torch.tensor([[[0.1, 0.3], [0.4, 0.6]], [[0.2, 0.2], [0.6, 0.2]]])  # off by 0.4 and by 0.2, once each
    for form in ("statement", "few-shot"):
        forward_pass = made(rows, targets={f"row-anchor({form})": shares})
        assert losses(f"row-anchor({form})", forward_pass) == pytest.approx([0.16 / 4, 0.04 / 4], abs=1e-7)


def test_state_anchor_by_hand() -> None:
    base = torch.tensor([[[3.0, 4.0], [1.0, 0.0]], [[0.0, 2.0], [1.0, 1.0]]])
    states = torch.tensor([[[3.0, 9.0], [1.0, 1.0]], [[0.0, 2.0], [1.0, 3.0]]])
    forward_pass = replace(made(targets={"state-anchor(statement)": base}), states=states)
    assert losses("state-anchor", forward_pass) == pytest.approx([(25 / 25 + 1 / 1) / 2, (0 + 4 / 2) / 2])


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("text", ["row-anchor(question)", "state-anchor(question)"])
def test_the_base_is_at_its_own_anchors_and_feels_no_pull(family: str, text: str) -> None:
    base = pair(family)[0]
    loss = loss_of(text, base, examples_for(parse_objective(text), family))
    # Left-padded when read and right-padded here: rows and states differ in their seventh digit, squares by 1e-13;
    # the gradient is twice such a difference times a slope of at most some hundreds.
    assert loss.item() == pytest.approx(0, abs=1e-11)
    assert max(float(gradient.abs().max()) for gradient in gradients_of(loss, base.model)) < 1e-4


@pytest.mark.parametrize("family", ["llama", "gemma2", "neox"])
def test_row_anchors_hold_the_rows_of_plain_transformers(family: str) -> None:
    examples = added("row-anchor(question) + row-anchor(statement)", family=family, batch_size=3)
    for fact, example in zip(CHOSEN, examples, strict=True):
        for form in ("question", "statement"):
            text = asked(fact, form)
            ids = torch.tensor([tiny_tokenizer()(text)["input_ids"]])
            with torch.no_grad():
                maps = base(family)[1](input_ids=ids, output_attentions=True, use_cache=False).attentions
            rows = torch.stack([layer[0, :, -1] for layer in maps])
            # Float32 probabilities, padded with others or alone: 1e-6 apart, as in tests of rows.
            if form == "question":
                torch.testing.assert_close(only(example, "row-anchor(question)/position"), rows, atol=1e-6, rtol=0)
            else:
                share = rows[..., tokens_of(text, fact.subject)].sum(-1)
                torch.testing.assert_close(only(example, "row-anchor(statement)"), share, atol=2e-6, rtol=0)
                assert float(share.max()) > 0.05


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("form", ["question", "statement"])
def test_state_anchors_hold_the_states_of_plain_transformers(family: str, form: str) -> None:
    for fact, example in zip(CHOSEN, added(f"state-anchor({form})", family=family, batch_size=3), strict=True):
        ids = torch.tensor([tiny_tokenizer()(asked(fact, form))["input_ids"]])
        with torch.no_grad():
            states = base(family)[1](input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
        expected = torch.stack([layer[0, -1] for layer in states[1:]])  # the first are the embeddings
        ours = only(example, f"state-anchor({form})")
        # Entries of some 1 to 10 in float32, summed in another order.
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-5)
