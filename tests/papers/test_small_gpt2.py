"""The small GPT-2: its loss against single sentences, its training against plain AdamW, and refused arguments."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from attnbalance.errors import DataError, DivergenceError
from attnbalance.papers.extraction import written
from attnbalance.papers.small_gpt2 import IGNORED, Training, make_gpt2, next_token, train_gpt2, weighted_loss
from attnbalance.theory.sentences import make_sentences


def test_weighted_loss_is_that_of_single_sentences() -> None:
    sentences = make_sentences([0], pairs=4, frequent=0.5, multiplicity=3, universe=4, dtype=torch.float32)
    ids, labels, weights = written(sentences)
    model = make_gpt2(sentences.tokens, layers=1, d_model=16, heads=2).eval()
    total, mass = 0.0, 0.0
    with torch.no_grad():
        for row, weight in zip(ids, weights, strict=True):
            for index in (2, 3):  # phrase and answer
                log_p = model(input_ids=row[None, :index]).logits[0, -1].log_softmax(-1)
                total, mass = total - float(weight * log_p[row[index]]), mass + float(weight)
        # float32: sums of a few numbers of size 1
        assert float(weighted_loss(model, ids, labels, weights)) == pytest.approx(total / mass, abs=1e-5)
        expected = model(input_ids=ids[:, :2]).logits[:, -1].argmax(-1)
    assert torch.equal(next_token(model, ids[:, :2]), expected)


def test_gpt2_has_no_positions_and_learns_its_sentences() -> None:
    sentences = make_sentences([0], pairs=4, frequent=0.5, multiplicity=2, universe=3, dtype=torch.float32)
    ids, labels, weights = written(sentences)
    model = make_gpt2(sentences.tokens, layers=1, d_model=32, heads=2)
    seen: list[int] = []
    trained = train_gpt2(
        model, ids, labels, weights, Training(200, 5e-3, weight_decay=0.1), lambda t, _: seen.append(t)
    )
    assert seen == list(range(1, 201))
    assert float(trained.transformer.wpe.weight.detach().abs().max()) == 0
    with torch.no_grad():
        before, after = (float(weighted_loss(gpt2, ids, labels, weights)) for gpt2 in (model, trained))
        turned = trained(input_ids=ids[:, [1, 0, 2]]).logits[:, -1]
        torch.testing.assert_close(turned, trained(input_ids=ids[:, :3]).logits[:, -1], atol=1e-4, rtol=0.0)
    assert before > 2
    assert after - sentences.entropy < 0.1


def test_training_is_plain_adamw_on_sequences_drawn_with_the_seed() -> None:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(7, (9, 4), generator=generator)
    labels, weights = ids.masked_fill(ids == 3, IGNORED), torch.rand(9, generator=generator)
    model = make_gpt2(7, layers=1, d_model=8, heads=2)
    trained = train_gpt2(model, ids, labels, weights, Training(4, 0.01, weight_decay=0.1, batch=5, seed=2))
    by_hand = copy.deepcopy(model)
    matrices = [parameter for parameter in by_hand.parameters() if parameter.requires_grad]
    optimizer, drawn = torch.optim.AdamW(matrices, lr=0.01, weight_decay=0.1), torch.Generator().manual_seed(2)
    for _ in range(4):
        loss, mass = torch.zeros(()), torch.zeros(())
        for i in torch.randint(9, (5,), generator=drawn).tolist():
            log_p = by_hand(input_ids=ids[i][None]).logits[0].log_softmax(-1)
            for position in range(1, 4):
                if labels[i, position] != IGNORED:
                    loss = loss - weights[i] * log_p[position - 1, labels[i, position]]
                    mass = mass + weights[i]
        optimizer.zero_grad()
        (loss / mass).backward()
        optimizer.step()
    with torch.no_grad():
        # logits, since Adam amplifies the rounding of gradients that are exactly 0, those of key biases
        torch.testing.assert_close(trained(ids).logits, by_hand(ids).logits, atol=1e-4, rtol=0.0)
        assert not torch.allclose(trained(ids).logits, model(ids).logits, atol=1e-2)


def test_impossible_sizes_rates_and_losses_are_refused() -> None:
    with pytest.raises(DataError):
        make_gpt2(5, d_model=10, heads=4)
    model, ids = make_gpt2(5, layers=1, d_model=8, heads=2), torch.zeros(2, 3, dtype=torch.long)
    for steps, rate in ((1, 0.0), (1, math.nan), (1, math.inf), (0, 0.1)):
        with pytest.raises(DataError, match="steps must be >= 1 and the rate finite and > 0"):
            Training(steps, rate)
    with pytest.raises(DataError, match="must be labelled"):
        train_gpt2(model, ids, torch.full_like(ids, IGNORED), torch.ones(2), Training(1, 0.1))
    with pytest.raises(DivergenceError):
        train_gpt2(model, ids, ids, torch.full((2,), torch.inf), Training(1, 0.1))
