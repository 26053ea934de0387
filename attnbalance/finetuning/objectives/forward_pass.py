"""One forward pass as terms of an objective see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from attnbalance.errors import DataError, ModelError
from attnbalance.finetuning.examples import HAS_FACT, QUERY, SPAN, TARGET
from attnbalance.finetuning.labelled_logits import labelled_logits
from attnbalance.models.forward import rows_of_output, states_of_output


@dataclass(frozen=True)
class ForwardPass:
    """What one forward pass gave for a batch of examples. The labelled tokens of all examples are concatenated."""

    logits: Float[Tensor, "token vocab"]
    """`logits[i]` predicts `labels[i]`."""
    labels: Int[Tensor, " token"]
    """The labelled tokens."""
    example: Int[Tensor, " token"]
    """The index of each labelled token's example."""
    examples: int
    """The number of examples."""
    rows: Float[Tensor, "example layer head position"] | None
    """Attention rows of the prompts' last tokens, float32, with gradients; None: not asked for."""
    states: Float[Tensor, "example layer d_model"] | None
    """The residual stream at the prompts' last tokens after each layer (after the last one normalised, as transformers
    gives it); None: not asked for."""
    spans: Mapping[str, Bool[Tensor, "example position"]]
    """The tokens of each role."""
    targets: Mapping[str, Shaped[Tensor, "item ..."]]
    """The base model's numbers, as `collate` joins them."""
    has_fact: Bool[Tensor, " example"] | None = None
    """Which examples are about a fact; None: all are."""

    @property
    def needed_rows(self) -> Float[Tensor, "example layer head position"]:
        """The rows; raises `ModelError` if the forward pass was not asked for them."""
        if self.rows is None:
            raise ModelError("the objective needs attention rows, and the forward pass gave none")
        return self.rows

    @property
    def needed_states(self) -> Float[Tensor, "example layer d_model"]:
        """The residual stream; raises `ModelError` if the forward pass was not asked for it."""
        if self.states is None:
            raise ModelError("the objective needs the residual stream, and the forward pass gave none")
        return self.states

    @property
    def tokens(self) -> Float[Tensor, " example"]:
        """The number of labelled tokens of each example."""
        return torch.bincount(self.example, minlength=self.examples).float()

    def target(self, name: str) -> Shaped[Tensor, "item ..."]:
        """Numbers of the base model; raises `DataError` if the examples lack them."""
        if name not in self.targets:
            raise DataError(
                f"these examples have no {name!r} of the base model; a trainer computes it for the data that it is "
                "made with; for other data use add_targets"
            )
        return self.targets[name]

    def share(self, role: str) -> Float[Tensor, "example layer head"]:
        """The share of each row on the tokens of a role, 0..1; 0 in a batch about no fact, where no role is marked."""
        rows = self.needed_rows
        if role not in self.spans and self.has_fact is not None and not self.has_fact.any():
            return 0.0 * rows.sum(-1)
        return rows.masked_fill(~self.spans[role][:, None, None, :], 0.0).sum(-1)

    def losses(self) -> Float[Tensor, " token"]:
        """Negative log-likelihood of each labelled token, in nats."""
        return torch.nn.functional.cross_entropy(self.logits.float(), self.labels, reduction="none")


def forward_pass(outputs: Any, batch: Mapping[str, Tensor], kernel: str | None) -> ForwardPass:
    """A model's outputs for a batch of `collate`, with all logits or those of `only_labelled`.

    `kernel` is the attention implementation of its `HookedModel`.
    """
    logits, labels, example = labelled_logits(outputs.logits, batch["labels"])
    rows = states = None
    if getattr(outputs, "attentions", None) and kernel is not None:
        rows = rows_of_output(outputs, kernel, batch[QUERY], batch["attention_mask"] != 0)
    if getattr(outputs, "hidden_states", None):
        states = states_of_output(outputs, batch[QUERY])
    return ForwardPass(
        logits=logits,
        labels=labels,
        example=example,
        examples=len(batch["labels"]),
        rows=rows,
        states=states,
        spans={name.removeprefix(SPAN): value for name, value in batch.items() if name.startswith(SPAN)},
        targets={name.removeprefix(TARGET): value for name, value in batch.items() if name.startswith(TARGET)},
        has_fact=batch.get(HAS_FACT),
    )
