"""What evaluations watch: numbers of each example, computed with the loss, and their means."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import EvalPrediction

from attnbalance.finetuning.examples import REPLAYED
from attnbalance.finetuning.objectives.forward_pass import ForwardPass
from attnbalance.finetuning.objectives.objective import Objective
from attnbalance.finetuning.training_log import SUBJECT_ATTENTION

SHORTCUT = "shortcut"
"""The target that tells an example's answer from its relation's most frequent training answer: [example, 2], the index
among the labels where they first differ, and the shortcut's token there; -1 if they do not differ or it is unknown."""


@dataclass(frozen=True)
class Watched:
    """What is watched of each example; NaN if it is unknown."""

    answer_loss: Float[Tensor, " example"]
    """Negative log-likelihood of the answer, summed over its tokens, nats."""
    tokens: Float[Tensor, " example"]
    """The number of the answer's tokens."""
    right: Float[Tensor, " example"]
    """1 if every token of the answer is the most probable one after the right ones before it, else 0. With such teacher
    forcing all tokens are right exactly if greedy decoding gives them all: the answer, and the end of sequence after it
    if that has a label. NaN for examples about no fact."""
    shortcut: Float[Tensor, " example"]
    """1 if the relation's most frequent training answer is predicted where it first differs from this one, else 0."""
    terms: Float[Tensor, "example term"]
    """The loss of each of the objective's terms, summed over the tokens if it has one for each."""
    taught: Float[Tensor, "example term"]
    """How much of the example each term teaches (see `Objective.taught`)."""
    subject_attention: Float[Tensor, "example layer"]
    """The largest attention to a token of the subject, mean over heads; no layers if rows are unknown."""

    def pack(self) -> Float[Tensor, "example column"]:
        """One tensor, which trainers can gather: a column for each number, for each term twice, and for each layer."""
        numbers = torch.stack([getattr(self, name) for name in NUMBERS], dim=-1)
        return torch.cat([numbers, self.terms, self.taught, self.subject_attention.to(numbers)], dim=-1)

    @classmethod
    def unpack(cls, columns: Float[Tensor, "example column"], terms: int) -> Watched:
        """The reverse of `pack`, for an objective of so many terms."""
        sizes = [len(NUMBERS), terms, terms, columns.shape[1] - len(NUMBERS) - 2 * terms]
        numbers, *matrices = columns.split(sizes, dim=-1)
        return cls(*numbers.unbind(-1), *matrices)


NUMBERS = ("answer_loss", "tokens", "right", "shortcut")
"""The names of what is one number for each example, in the order of the packed columns."""


def watch(forward: ForwardPass, objective: Objective) -> Watched:
    """What is watched of each example of a forward pass."""
    guesses = forward.logits.argmax(-1)

    def summed(values: Tensor) -> Tensor:
        return values.new_zeros(forward.examples).index_add(0, forward.example, values)

    hits = (guesses == forward.labels).float()
    tokens = forward.tokens
    right = (summed(hits) == tokens).float()
    general = torch.zeros_like(right).bool() if forward.has_fact is None else ~forward.has_fact
    right = right.masked_fill(general, torch.nan)
    losses = [(term.kind.by_token, objective.losses(term, forward).float()) for term in objective.terms]
    return Watched(
        answer_loss=summed(forward.losses()),
        tokens=tokens,
        right=right,
        shortcut=_shortcut(forward, guesses, right),
        terms=torch.stack([summed(values) if by_token else values for by_token, values in losses], dim=-1),
        taught=objective.taught(tokens, forward.targets.get(REPLAYED)),
        subject_attention=_subject_attention(forward, right).masked_fill(general[:, None], torch.nan),
    )


def _shortcut(forward: ForwardPass, guesses: Tensor, like: Tensor) -> Float[Tensor, " example"]:
    """Whether the guess at the label where the shortcut differs from the answer is the shortcut's token."""
    if SHORTCUT not in forward.targets:
        return torch.full_like(like, torch.nan)
    offset, token = forward.targets[SHORTCUT].unbind(-1)
    first_label = torch.searchsorted(forward.example, torch.arange(forward.examples, device=guesses.device))
    guess = guesses[first_label + offset.clamp(min=0)]
    return torch.where(offset < 0, torch.nan, (guess == token).float())


def _subject_attention(forward: ForwardPass, like: Tensor) -> Float[Tensor, "example layer"]:
    if forward.rows is None:
        return like.new_full((forward.examples, 0), torch.nan)
    if "subject" not in forward.spans:
        return like.new_full(forward.rows.shape[:2], torch.nan)
    return forward.rows.masked_fill(~forward.spans["subject"][:, None, None, :], 0.0).amax(-1).mean(-1)


@dataclass(frozen=True)
class WatchedMeans:
    """The means over all evaluated examples, however these were batched and spread over processes, by logged name.

    `objective`: the terms, each a mean over the tokens or examples that it teaches, added up. `answer_loss`: per token.
    `accuracy`: share of right answers. `shortcut_rate`: share of shortcuts among the wrong answers of which it is
    known; left out if there are none. Examples about no fact count in the first two alone.
    """

    terms: int
    """The number of the objective's terms."""
    layers: tuple[int, ...]
    """The numbers of the layers whose attention is watched."""

    def __call__(self, prediction: EvalPrediction) -> dict[str, float]:
        """The means of what an evaluation gathered."""
        columns = torch.as_tensor(prediction.predictions).double()  # pyright: ignore[reportArgumentType]
        watched = Watched.unpack(columns, self.terms)
        tokens = watched.tokens.sum()
        means = {
            "objective": float((watched.terms.sum(0) / watched.taught.sum(0).clamp(min=1)).sum()),
            "answer_loss": float(watched.answer_loss.sum() / tokens),
        }
        if not watched.right.isnan().all():
            means["accuracy"] = float(watched.right.nanmean())
        known = watched.shortcut[(watched.right == 0) & ~watched.shortcut.isnan()]
        if len(known):
            means["shortcut_rate"] = float(known.mean())
        by_layer = zip(self.layers, watched.subject_attention.nanmean(0).tolist(), strict=False)  # without rows: none
        return means | {f"{SUBJECT_ATTENTION}/{layer}": value for layer, value in by_layer if not math.isnan(value)}
