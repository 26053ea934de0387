"""A standard one-layer transformer and ablations of it, trained on sentences of Xu & Chen (2025, appendix A)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from attnbalance.errors import DataError
from attnbalance.theory.sentences import Samples, Split, make_sentences

ARCHITECTURES: dict[str, dict[str, bool]] = {
    "attention + MLP": {"mlp": True, "uniform": False},
    "uniform attention + MLP": {"mlp": True, "uniform": True},
    "attention only": {"mlp": False, "uniform": False},
    "attention only, identity": {"mlp": False, "uniform": False, "identity": True},
    "attention only, no values": {"mlp": False, "uniform": False, "values": False},
}
"""Arguments of `OneLayer`; "identity" has one dimension per token."""


class OneLayer(nn.Module):
    """A standard layer without positions: attention (four matrices), MLP (two), two norms and a linear readout.

    Token embeddings are fixed: Gaussian with length about 1, or the identity. Attention may be uniform, and the MLP may
    be omitted. Without values, the logits are the products of the attended embeddings' mean with every token's: what is
    left of the simplified model of Xu & Chen (section 2) if its MLP is taken away.
    """

    def __init__(
        self, tokens: int, d_model: int, *, mlp: bool, uniform: bool, identity: bool = False, values: bool = True
    ) -> None:
        """Raises `DataError` if identity embeddings do not have one dimension per token."""
        super().__init__()
        if identity and d_model != tokens:
            raise DataError(f"identity embeddings need d_model equal to the number of tokens, {tokens}; got {d_model}")
        drawn = torch.eye(tokens) if identity else torch.randn(tokens, d_model) / math.sqrt(d_model)
        self.register_buffer("embedding", drawn)
        self.uniform, self.values = uniform, values
        self.query, self.key, self.value, self.output = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))
        self.before, self.after = nn.RMSNorm(d_model), nn.RMSNorm(d_model)
        inner = (nn.Linear(d_model, 4 * d_model), nn.ReLU(), nn.Linear(4 * d_model, d_model))
        self.mlp = nn.Sequential(*inner) if mlp else None
        self.readout = nn.Linear(d_model, tokens, bias=False)

    def forward(self, tokens: Int[Tensor, "sample position"]) -> Float[Tensor, "sample vocab"]:
        """The logits after the last token; -1 marks an empty position."""
        x = self.get_buffer("embedding")[tokens.clamp(min=0)]
        read = self.before(x)
        score = torch.einsum("sd,spd->sp", self.query(read[:, -1]), self.key(read)) / math.sqrt(x.shape[-1])
        share = (score * (not self.uniform)).masked_fill(tokens < 0, -math.inf).softmax(-1)
        if not self.values:
            return torch.einsum("sp,spd->sd", share, x) @ self.get_buffer("embedding").T
        x = x[:, -1] + self.output(torch.einsum("sp,spd->sd", share, self.value(read)))
        x = x if self.mlp is None else x + self.mlp(self.after(x))
        return self.readout(x)


def _loss(model: OneLayer, samples: Samples) -> Tensor:
    log_p = model(samples.tokens[0]).log_softmax(-1)
    return -(samples.weight[0, :, None] * samples.target[0] * log_p).sum()


@torch.no_grad()
def _accuracy(model: OneLayer, samples: Samples) -> float:
    return float((model(samples.tokens[0]).argmax(-1) == samples.target[0].argmax(-1)).double().mean())


def train_standard(settings: Mapping[str, Any]) -> dict[str, float]:
    """Train by AdamW, then finetune by Adam on half of the questions; `accuracy` is the best on the other half."""
    sentences = make_sentences(
        [settings["seed"]],
        pairs=settings["pairs"],
        frequent=1.0,
        multiplicity=5,
        universe=settings["universe"],
        context=settings["context"],
        dtype=torch.float32,
    )
    samples, split = sentences.pretraining(), sentences.split(0.5)
    kind = dict(ARCHITECTURES[settings["architecture"]])
    d_model = sentences.tokens if kind.get("identity") else settings["d_model"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings["seed"])
        model = OneLayer(sentences.tokens, d_model, **kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["rate"], weight_decay=0.1)
    losses = [_step(model, optimizer, samples) for _ in range(settings["steps"])]
    accuracy = _extracted(model, split, settings)
    return {"entropy": sentences.entropy, "tokens": sentences.tokens, "loss": losses[-1], "accuracy": accuracy}


def _step(model: OneLayer, optimizer: torch.optim.Optimizer, samples: Samples) -> float:
    loss = _loss(model, samples)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def _extracted(model: OneLayer, split: Split, settings: Mapping[str, Any]) -> float:
    optimizer = torch.optim.Adam(model.parameters(), lr=settings["tuning_rate"])
    best = 0.0
    for _ in range(settings["tuning_steps"]):
        _step(model, optimizer, split.train)
        best = max(best, _accuracy(model, split.frequent))
    return best
