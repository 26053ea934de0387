"""Question-answer examples for finetuning: the prompt is read, only the answer is learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerBase

from attnbalance.errors import DataError
from attnbalance.facts import Fact
from attnbalance.prompts import Template, make_prompts
from attnbalance.tokens import encode, encode_answers

IGNORED = -100
"""The label of a token that carries no loss (Hugging Face's convention)."""


@dataclass(frozen=True)
class Example:
    """Token ids of a prompt with its answer; `labels` are the same ids on the answer and `IGNORED` elsewhere."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]


def make_examples(
    facts: Sequence[Fact], tokenizer: PreTrainedTokenizerBase, template: str | Template = "qa", *, end: bool = True
) -> list[Example]:
    """One example a fact, in order: prompt + " " + first answer + end-of-sequence token, where the tokenizer has one.

    Without `end` the answer ends with its own last token.

    The prompt's tokens are exactly those that `encode` gives for it, so that training and asking agree. Raises
    `DataError` where there are no facts or the template cannot ask them, and `BadRowsError` where the tokenizer
    merges the end of a prompt with the answer.
    """
    if not len(facts):
        raise DataError("expected facts to make examples of, got none")
    encodings = encode(make_prompts(facts, template), tokenizer)
    last = [tokenizer.eos_token_id] if end and isinstance(tokenizer.eos_token_id, int) else []
    return [
        Example((*one.ids, *answer, *last), (*([IGNORED] * len(one.ids)), *answer, *last))
        for one, answer in zip(encodings, encode_answers(encodings, tokenizer), strict=True)
    ]


def collate(examples: Sequence[Example], pad_id: int = 0) -> dict[str, Int[Tensor, "example position"]]:
    """Examples padded on the right to one length; padding has mask 0 and no loss, whatever `pad_id` is."""
    length = max(len(example.ids) for example in examples)
    ids = [[*example.ids, *[pad_id] * (length - len(example.ids))] for example in examples]
    labels = [[*example.labels, *[IGNORED] * (length - len(example.labels))] for example in examples]
    real = torch.tensor([len(example.ids) for example in examples])[:, None]
    position_ids = torch.arange(length).expand(len(examples), length)
    return {
        "input_ids": torch.tensor(ids),
        "attention_mask": (position_ids < real).long(),
        "position_ids": position_ids.minimum(real - 1),
        "labels": torch.tensor(labels),
    }


def answer_losses(
    logits: Float[Tensor, "example position vocab"], labels: Int[Tensor, "example position"]
) -> Float[Tensor, "example 2"]:
    """For each example the summed negative log-likelihood (nats) of its labelled tokens, and their number.

    Logits at a position are the model's prediction of the next one's token.
    """
    following = labels[:, 1:]
    losses = cross_entropy(logits[:, :-1].float().transpose(1, 2), following, ignore_index=IGNORED, reduction="none")
    return torch.stack([losses.sum(-1), (following != IGNORED).sum(-1).to(losses.dtype)], dim=-1)
