"""The attention and MLP model written out input by input with plain matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from attnbalance.theory.attention_mlp import AttentionMLP
from attnbalance.theory.sentences import Samples


def dense_logits(W_1: Tensor, Z: Tensor, norm: Tensor, scale: float, uniform: bool, tokens: list[int]) -> Tensor:
    """One input of one run, as section 2 writes it: X of columns, W_1 with a row a neuron, W_2 of blocks of ones."""
    d, outputs, neurons = W_1.shape
    X = torch.stack([norm[t] * torch.eye(d, dtype=torch.float64)[t] for t in tokens if t >= 0], dim=1)
    s = torch.softmax(X.T @ Z @ X[:, -1] * (not uniform), 0)
    rows = W_1.permute(1, 2, 0).reshape(outputs * neurons, d)
    W_2 = torch.kron(torch.eye(outputs, dtype=torch.float64), torch.ones(1, neurons, dtype=torch.float64))
    return scale * (W_2 @ torch.relu(rows @ (X @ s)))


def dense_loss(W_1: Tensor, Z: Tensor, model: AttentionMLP, samples: Samples, run: int) -> Tensor:
    loss = torch.zeros((), dtype=torch.float64)
    for tokens, target, weight in zip(samples.tokens[run], samples.target[run], samples.weight[run], strict=True):
        logits = dense_logits(W_1, Z, model.norm[run], model.scale, model.uniform, tokens.tolist())
        loss = loss - weight * (target * logits.log_softmax(0)).sum()
    return loss
