"""The standard layer against its equations written out, and its training."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbalance.errors import DataError
from attnbalance.papers.standard_layer import OneLayer, train_standard
from attnbalance.theory.sentences import Samples, make_sentences


def test_uniform_attention_averages_the_tokens_and_skips_empty_positions() -> None:
    torch.manual_seed(0)
    layer = OneLayer(5, 4, mlp=False, uniform=True)
    x = layer.get_buffer("embedding")
    read = layer.value(layer.before(x[[1, 2]])).mean(0)
    expected = layer.readout(x[2] + layer.output(read))
    torch.testing.assert_close(layer(torch.tensor([[-1, 1, 2]]))[0], expected, atol=1e-6, rtol=0.0)


def equations(layer: OneLayer, tokens: list[int]) -> Tensor:
    """The logits after one input: pre-norm attention of the last token, then the MLP, token by token."""
    x = [layer.get_buffer("embedding")[token] for token in tokens if token >= 0]
    read = [row / (row.square().mean() + torch.finfo(row.dtype).eps).sqrt() * layer.before.weight for row in x]
    scores = [torch.dot(layer.query.weight @ read[-1], layer.key.weight @ row) / len(row) ** 0.5 for row in read]
    total = sum(score.exp() for score in scores)
    mixed = sum(score.exp() / total * (layer.value.weight @ row) for score, row in zip(scores, read, strict=True))
    state = x[-1] + layer.output.weight @ mixed
    if layer.mlp is not None:
        W_in, b_in, W_out, b_out = layer.mlp.parameters()
        normed = state / (state.square().mean() + torch.finfo(state.dtype).eps).sqrt() * layer.after.weight
        state = state + W_out @ (W_in @ normed + b_in).clamp(min=0) + b_out
    return layer.readout.weight @ state


@pytest.mark.parametrize("mlp", [False, True])
def test_a_layer_is_its_equations(mlp: bool) -> None:
    torch.manual_seed(1)
    layer = OneLayer(5, 5, mlp=mlp, uniform=False, identity=True)
    assert torch.equal(layer.get_buffer("embedding"), torch.eye(5))
    inputs = [[-1, 1, 2], [3, 1, 2], [0, 4, 4]]
    logits = layer(torch.tensor(inputs))
    for row, tokens in zip(logits, inputs, strict=True):
        torch.testing.assert_close(row, equations(layer, tokens), atol=1e-5, rtol=0.0)


def test_without_values_the_logits_are_products_with_the_attended_mean() -> None:
    torch.manual_seed(1)
    layer = OneLayer(6, 4, mlp=False, uniform=False, values=False)
    x = layer.get_buffer("embedding")
    scores = [torch.dot(layer.query.weight @ rms(x[2]), layer.key.weight @ rms(x[t])) / 2 for t in (1, 2)]
    first = 1 / (1 + (scores[1] - scores[0]).exp())
    mean = first * x[1] + (1 - first) * x[2]
    expected = torch.stack([torch.dot(mean, row) for row in x])
    torch.testing.assert_close(layer(torch.tensor([[-1, 1, 2]]))[0], expected, atol=1e-5, rtol=0.0)


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean() + torch.finfo(x.dtype).eps).sqrt()


def test_identity_embeddings_need_one_dimension_a_token() -> None:
    with pytest.raises(DataError, match="5.*4"):
        OneLayer(5, 4, mlp=True, uniform=False, identity=True)


def test_training_is_adamw_on_the_weighted_sentences_and_the_best_accuracy_is_kept() -> None:
    settings = {"architecture": "attention + MLP", "seed": 2, "pairs": 8, "universe": 5, "context": False}
    settings |= {"d_model": 8, "rate": 1e-2, "steps": 3, "tuning_rate": 1e-2, "tuning_steps": 6}
    values = train_standard(settings)
    sentences = make_sentences(
        [2], pairs=8, frequent=1.0, multiplicity=5, universe=5, context=False, dtype=torch.float32
    )
    torch.manual_seed(2)
    layer = OneLayer(sentences.tokens, 8, mlp=True, uniform=False)

    def step(samples: Samples, optimizer: torch.optim.Optimizer) -> float:
        rows = zip(samples.tokens[0].tolist(), samples.target[0], samples.weight[0], strict=True)
        loss = torch.zeros(())
        for tokens, target, weight in rows:
            loss = loss - weight * (target * equations(layer, tokens).log_softmax(0)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, weight_decay=0.1)
    losses = [step(sentences.pretraining(), optimizer) for _ in range(3)]
    assert values["loss"] == pytest.approx(losses[-1], abs=1e-4)  # float32; the loss before the last step
    assert values["tokens"] == sentences.tokens
    assert values["entropy"] == pytest.approx(0.8047, abs=1e-4)
    split, optimizer, accuracies = sentences.split(0.5), torch.optim.Adam(layer.parameters(), lr=1e-2), []
    for _ in range(6):
        step(split.train, optimizer)
        asked = zip(split.frequent.tokens[0].tolist(), split.frequent.target[0], strict=True)
        right = [bool(equations(layer, tokens).argmax() == target.argmax()) for tokens, target in asked]
        accuracies.append(sum(right) / len(right))
    assert values["accuracy"] == max(accuracies)
