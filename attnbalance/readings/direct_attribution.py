"""Direct logit attribution: what each head, source position and MLP adds to the answer's logit difference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnbalance.arguments import expects
from attnbalance.data.batches import PromptBatch, in_order, pad
from attnbalance.data.tokens import Encoding
from attnbalance.errors import DataError, ModelError
from attnbalance.models.bridge import BridgedModel
from attnbalance.models.evaluating import without_autocast
from attnbalance.models.residual_parts import take_apart
from attnbalance.readings.answer_checks import check_answers_alike
from attnbalance.readings.answer_tokens import AnswerTokens
from attnbalance.readings.reading import Reading

TOLERANCE = 1e-4
"""Largest allowed difference between the sum of all entries and the logit difference, over 1 + the latter's size."""


@dataclass(frozen=True)
class DirectAttribution:
    """Each prompt's logit difference, in nats, as a sum of what the model's parts add to it at the last token.

    logit_difference = embedding + sum over layers, heads and positions of rows * readout + sum over layers of (bias +
    mlp) + constant, with the scales of norms frozen at their values in this forward pass. If the answer tokens have
    probability weights, all of these describe the margin instead (see `answer_tokens`).

    Attributes:
        logit_difference: From the model's own logits, before any softcap; the margin, with probability weights.
        embedding: What the last token's embedding adds.
        rows: The last token's attention probabilities. Token j of a prompt is at position j.
        readout: What the head would add if it attended to this position alone.
        bias: What the attention output's bias adds.
        mlp: What the MLP adds.
        constant: What the biases of the final norm and of the unembedding add.
        spans: The tokens of each role.
        layers: The model's layer numbers.
        encodings: The prompts' tokens.
    """

    logit_difference: Float[Tensor, " prompt"]
    embedding: Float[Tensor, " prompt"]
    rows: Float[Tensor, "prompt layer head position"]
    readout: Float[Tensor, "prompt layer head position"]
    bias: Float[Tensor, "prompt layer"]
    mlp: Float[Tensor, "prompt layer"]
    constant: Float[Tensor, " prompt"]
    spans: Mapping[str, Bool[Tensor, "prompt position"]]
    layers: tuple[int, ...]
    encodings: tuple[Encoding, ...]

    def total(self) -> Float[Tensor, " prompt"]:
        """The sum of all entries: the logit difference, within rounding."""
        heads = (self.rows.double() * self.readout.double()).sum((1, 2, 3))
        rest = self.bias.double().sum(1) + self.mlp.double().sum(1) + self.constant.double()
        return (self.embedding.double() + heads + rest).float()

    def used(self, role: str = "subject") -> Reading:
        """What each head carries from the tokens of a role: attention x readout, summed over these tokens."""
        inside = (self.rows * self.readout).masked_fill(~self._span(role)[:, None, None, :], 0.0).sum(-1)
        return self.reading(f"{role} used", inside)

    def value_salience(self, role: str = "subject") -> Reading:
        """In-context value salience: what each head would add if it attended to the last token of a role alone."""
        self._span(role)  # refuses a role that a prompt lacks
        last = torch.tensor([encoding.last_of(role) for encoding in self.encodings])
        chosen = self.readout.gather(3, last[:, None, None, None].expand(*self.readout.shape[:3], 1))[..., 0]
        return self.reading(f"value salience ({role}, in context)", chosen)

    def reading(self, name: str, values: Float[Tensor, "prompt layer head"]) -> Reading:
        """Values of these prompts, layers and heads as a reading in logits."""
        return Reading.of([encoding.prompt for encoding in self.encodings], name, "logits", values, self.layers)

    def _span(self, role: str) -> Bool[Tensor, "prompt position"]:
        if role not in self.spans or not bool(self.spans[role].any(dim=1).all()):
            raise DataError(f"not every prompt has a span {role!r}; there are {', '.join(self.spans) or 'none'}")
        return self.spans[role]


@without_autocast()
@expects(model=BridgedModel, answer_tokens=AnswerTokens)
def read_direct_attribution(
    model: BridgedModel, answer_tokens: AnswerTokens, *, batch_size: int = 32, progress: bool = False
) -> DirectAttribution:
    """The direct logit attribution of every prompt, in the order of `answer_tokens`.

    Holds two numbers for each prompt, layer, head and position. Raises `ModelError` if the entries do not add up to the
    model's own logit difference within `TOLERANCE`: its layers then add something that has no entry. Raises
    `BadRowsError` for prompts longer than the model's positions, `DataError` for tokens of another tokenizer.
    """
    check_answers_alike(answer_tokens, model.hooked.tokenizer)
    encodings = answer_tokens.encodings
    parts, order = list[dict[str, Tensor]](), list[list[int]]()
    for indices, batch in model.hooked.batches(encodings, batch_size, bar="attribution" if progress else None):
        parts.append(_attribute_batch(model, batch, answer_tokens.at(indices)))
        order.append(indices)
    attribution = DirectAttribution(
        **{name: in_order([part[name] for part in parts], order) for name in parts[0]},
        spans=pad(encodings, padding_side="right").spans,
        layers=model.layers,
        encodings=encodings,
    )
    _check_sum(attribution, model.name)
    return attribution


def _check_sum(attribution: DirectAttribution, name: str) -> None:
    """Raise `ModelError` if the entries do not add up to the logit difference."""
    off = (attribution.total() - attribution.logit_difference).abs() / (1 + attribution.logit_difference.abs())
    if not bool((off <= TOLERANCE).all()):
        i = int(off.argmax())
        raise ModelError(
            f"{name}: direct logit attribution adds up to {float(attribution.total()[i]):.4f}, but the model's logit "
            f"difference is {float(attribution.logit_difference[i]):.4f} "
            f"(prompt {attribution.encodings[i].prompt.text[:60]!r}): this family adds to the residual stream, or "
            "scales its logits, in a way that direct logit attribution has no entry for"
        )


@torch.no_grad()
def _attribute_batch(model: BridgedModel, batch: PromptBatch, answer_tokens: AnswerTokens) -> dict[str, Tensor]:
    """The entries of a batch, by the name of their field, on the CPU."""
    parts, weights = take_apart(model, batch), model.weights
    direction, constant = parts.before_final_norm(answer_tokens.direction(weights.W_U))
    readout, bias, mlp = zip(*(parts.of_layer(i, direction) for i in model.layers), strict=True)
    unembed_bias = answer_tokens.difference(weights.b_U.expand(len(answer_tokens), -1)).to(constant)
    return {
        "logit_difference": answer_tokens.difference(parts.logits),
        "embedding": (parts.embedding * direction).sum(-1).cpu(),
        "rows": batch.unpadded(parts.rows),
        "readout": batch.unpadded(torch.stack(readout, dim=1)),
        "bias": torch.stack(bias, dim=1).cpu(),
        "mlp": torch.stack(mlp, dim=1).cpu(),
        "constant": (constant + unembed_bias).cpu(),
    }
