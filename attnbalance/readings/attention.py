"""Attention rows of prompts, and readings computed from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnbalance.arguments import expects
from attnbalance.data.prompts import Prompt
from attnbalance.data.tokens import PromptBatch, batches, check_lengths, encode, pad
from attnbalance.errors import DataError
from attnbalance.models.hooked import HookedModel
from attnbalance.readings.reading import Reading, concatenate

REDUCTIONS = ("max", "max-of-mean", "sum")


@dataclass(frozen=True)
class AttentionRows:
    """Attention probabilities of each prompt's last token over its own tokens.

    Attributes:
        values: The probabilities, float32, on the CPU. Token j of a prompt is at position j; positions after its last
            token hold 0. A row sums to 1 (less in models with attention sinks).
        spans: The tokens of each role.
        tokens: Each prompt's tokens as text.
        layers: The model's layer numbers.
        prompts: The prompts.
    """

    values: Float[Tensor, "prompt layer head position"]
    spans: Mapping[str, Bool[Tensor, "prompt position"]]
    tokens: tuple[tuple[str, ...], ...]
    layers: tuple[int, ...]
    prompts: tuple[Prompt, ...]

    def to(self, role: str, reduce: str = "max") -> Reading:
        """The rows reduced over the tokens of one role.

        "sum" is the share of attention, "max" the strongest token of each head. Ghosal et al. (2024, B.3) take a
        maximum over the subject's tokens and an average over a layer's heads, without naming the order. We take each
        head's maximum first, which a curve then averages. "max-of-mean" is the other order, the maximum of the mean
        over heads. It gives one number for each layer instead of one for each head, at most the mean of "max".

        Raises `DataError` for another reduction and for a role that a prompt lacks.
        """
        if reduce not in REDUCTIONS:
            raise DataError(f"reduce must be one of {', '.join(REDUCTIONS)}, got {reduce!r}")
        span = self.spans.get(role)
        if span is None or not bool(span.any(dim=1).all()):
            raise DataError(f"not every prompt has a span {role!r}; there are {', '.join(self.spans) or 'none'}")
        inside = self.values.masked_fill(~span[:, None, None, :], 0.0)
        if reduce == "max-of-mean":
            inside = inside.mean(dim=2, keepdim=True)
        values = inside.sum(dim=-1) if reduce == "sum" else inside.amax(dim=-1)
        return Reading(
            f"{role} attention ({reduce})",
            "probability",
            values,
            self.layers,
            tuple(prompt.prompt_id for prompt in self.prompts),
            tuple(prompt.fact.subject for prompt in self.prompts),
        )


@expects(model=HookedModel, prompts=[Prompt])
def read_attention(
    model: HookedModel, prompts: Sequence[Prompt], *, batch_size: int = 32, progress: bool = False
) -> AttentionRows:
    """The attention row of every prompt's last token in every layer and head, in the order of the prompts.

    Holds the rows of all prompts: prompts x layers x heads x longest prompt x 4 bytes. `read_subject_attention` holds
    one batch at a time. Raises `BadRowsError` for prompts that cannot be tokenized or are longer than the model's
    positions, `DataError` for no prompts.
    """
    indexed = list(_indexed_batches(model, prompts, batch_size, progress))
    parts = [part for _, part in indexed]
    order = torch.tensor([i for indices, _ in indexed for i in indices]).argsort()
    width = max(part.values.shape[-1] for part in parts)

    def join(pieces: list[Tensor]) -> Tensor:
        return torch.cat([torch.nn.functional.pad(piece, (0, width - piece.shape[-1])) for piece in pieces])[order]

    tokens = [tokens for part in parts for tokens in part.tokens]
    roles = dict.fromkeys(role for part in parts for role in part.spans)
    absent = [torch.zeros(len(part.prompts), 1, dtype=torch.bool) for part in parts]
    return AttentionRows(
        join([part.values for part in parts]),
        {role: join([p.spans.get(role, none) for p, none in zip(parts, absent, strict=True)]) for role in roles},
        tuple(tokens[j] for j in order.tolist()),
        model.layers,
        tuple(prompts),
    )


def read_subject_attention(
    model: HookedModel, prompts: Sequence[Prompt], *, reduce: str = "max", batch_size: int = 32, progress: bool = False
) -> Reading:
    """`read_attention(model, prompts).to("subject", reduce)`, holding the rows of one batch at a time."""
    indexed = _indexed_batches(model, prompts, batch_size, progress)
    joined = concatenate([rows.to("subject", reduce) for _, rows in indexed])
    return joined.at([prompt.prompt_id for prompt in prompts])


def _indexed_batches(
    model: HookedModel, prompts: Sequence[Prompt], batch_size: int, progress: bool
) -> Iterator[tuple[list[int], AttentionRows]]:
    """The indices of a batch of prompts and their rows, batch by batch, longest prompts first."""
    from tqdm import tqdm

    if not prompts:
        raise DataError("expected at least one prompt, got none")
    encodings = encode(prompts, model.tokenizer)
    check_lengths(encodings, model.max_positions)
    with tqdm(total=len(encodings), desc="attention", unit="prompt", disable=not progress, leave=False) as bar:
        for indices in batches(encodings, batch_size, model.alike_from):
            with torch.no_grad():
                yield indices, rows_of(model, pad([encodings[i] for i in indices], model.pad_id))
            bar.update(len(indices))


def rows_of(model: HookedModel, batch: PromptBatch) -> AttentionRows:
    """The rows of one batch, shifted so that every prompt's first token is at position 0."""
    rows = model.rows(batch).cpu()
    mask = batch.attention_mask.cpu() != 0
    order = mask.int().argsort(dim=1, descending=True, stable=True)
    values = rows.gather(3, order[:, None, None, :].expand(rows.shape))
    spans = {role: span.gather(1, order) for role, span in batch.spans.items()}
    return AttentionRows(values, spans, batch.tokens, model.layers, batch.prompts)
