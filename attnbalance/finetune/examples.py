"""Question-answer examples for finetuning: the prompt is read, only the answer is learned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerBase

from attnbalance.errors import BadRowsError, DataError
from attnbalance.facts import Fact
from attnbalance.models.forward import evaluating
from attnbalance.models.hooked import HookedModel
from attnbalance.prompts import Prompt, Template, make_prompts
from attnbalance.tokens import encode, encode_answers

IGNORED = -100
"""The label of a token that carries no loss (Hugging Face's convention)."""

SPAN, TARGET = "span.", "target."
"""What the keys of a batch begin with that hold the tokens of a role, and an objective's numbers of the base model."""

INPUTS = ("input_ids", "attention_mask", "position_ids")
"""The keys of a batch that every model takes."""

TOKENS, POSITIONS = "/token", "/position"
"""What the names of targets end with whose first axis is the labelled tokens, or whose last one is the positions."""

QUERY = "query_index"
"""The key of a batch that holds the position of each prompt's last token: the query whose attention row is read."""


@dataclass(frozen=True)
class Example:
    """Token ids of a prompt with its answer; `labels` are the same ids on the answer and `IGNORED` elsewhere.

    `prompt` is the text that was encoded, `spans` the positions of the tokens of each of its roles; an example without
    them can be trained on, but not with an objective that looks at attention. `targets` are numbers that objectives
    hold the model to, by name (see `add_targets`).
    """

    ids: tuple[int, ...]
    labels: tuple[int, ...]
    prompt: Prompt | None = None
    spans: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    targets: Mapping[str, Shaped[Tensor, ...]] = field(default_factory=dict)

    @property
    def query(self) -> int:
        """The position of the prompt's last token: the one before the first with a label."""
        return next(i for i, label in enumerate(self.labels) if label != IGNORED) - 1


def first_label(example: Example) -> int:
    """The first token of an example's answer."""
    return example.labels[example.query + 1]


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
    return examples_of(make_prompts(facts, template), tokenizer, end=end)


def examples_of(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, *, end: bool = True) -> list[Example]:
    """`make_examples` for prompts that are there already, e.g. rendered as chats."""
    encodings = encode(prompts, tokenizer)
    last = [tokenizer.eos_token_id] if end and isinstance(tokenizer.eos_token_id, int) else []
    return [
        Example((*one.ids, *answer, *last), (*([IGNORED] * len(one.ids)), *answer, *last), one.prompt, one.spans)
        for one, answer in zip(encodings, encode_answers(encodings, tokenizer), strict=True)
    ]


PROMPTLESS = f"no prompt: labels of the prompt's tokens must be {IGNORED}"


def as_examples(
    rows: Sequence[Mapping[str, Sequence[int]]], facts: Sequence[Fact], tokenizer: PreTrainedTokenizerBase
) -> list[Example]:
    """Examples from rows that are tokenized already, with `input_ids` and `labels`, and the fact of each.

    The prompt is what stands before the first label; its subject is found in the prompt's text, where it must stand
    exactly once. Padding (an `attention_mask` of 0) is cut off. Raises `DataError` where rows and facts differ in
    number, and `BadRowsError` for rows without a prompt or a label, and for prompts that do not hold their subject
    once or do not tokenize to the row's own ids.
    """
    if not all(isinstance(fact, Fact) for fact in facts) or not all(
        {"input_ids", "labels"} <= set(row) for row in rows
    ):
        raise DataError(
            "expected rows with input_ids and labels, and for each row its Fact(subject, relation, answers)"
        )
    if len(rows) != len(facts):
        raise DataError(f"expected one fact for each row, got {len(rows)} rows and {len(facts)} facts")
    prompts, whole, bad = list[Prompt](), list[tuple[tuple[int, ...], tuple[int, ...]]](), list[tuple[int, str]]()
    for i, (row, fact) in enumerate(zip(rows, facts, strict=True)):
        real = [bool(kept) for kept in row.get("attention_mask", [1] * len(row["input_ids"]))]
        ids = tuple(int(x) for x, kept in zip(row["input_ids"], real, strict=True) if kept)
        labels = tuple(int(x) for x, kept in zip(row["labels"], real, strict=True) if kept)
        start = next((j for j, label in enumerate(labels) if label != IGNORED), 0)
        text = str(tokenizer.decode(list(ids[:start]), clean_up_tokenization_spaces=False, skip_special_tokens=True))
        special = tuple(tokenizer(text, verbose=False)["input_ids"][:start]) != ids[:start]
        if special:  # other tokens than the tokenizer adds by itself: a rendered chat
            text = str(tokenizer.decode(list(ids[:start]), clean_up_tokenization_spaces=False))
        found = text.count(fact.subject)
        if not start or found != 1:
            why = f"subject {fact.subject!r} occurs {found} times in {text!r}, not once" if start else PROMPTLESS
            bad.append((i, why))
        place = text.find(fact.subject)
        spans = {"subject": (max(place, 0), max(place, 0) + len(fact.subject))}
        prompts.append(Prompt(text, spans, f"{fact.relation}/{fact.subject}/{i}", fact, special))
        whole.append((ids, labels))
    encodings = [] if bad else encode(prompts, tokenizer)
    if not bad:
        bad = [
            (i, f"{one.prompt.text!r} tokenizes to other ids than the row's")
            for i, (one, (ids, _)) in enumerate(zip(encodings, whole, strict=True))
            if ids[: len(one.ids)] != one.ids
        ]
    if bad:
        raise BadRowsError("rows cannot be read as questions about their fact", bad, len(rows), "mend these rows")
    return [Example(ids, labels, one.prompt, one.spans) for one, (ids, labels) in zip(encodings, whole, strict=True)]


def collate(examples: Sequence[Example], pad_id: int = 0) -> dict[str, Shaped[Tensor, "item ..."]]:
    """Examples padded on the right to one length; padding has mask 0 and no loss, whatever `pad_id` is.

    Where all examples know their prompt, `query_index` [example] is the position of its last token and "span.ROLE"
    [example, position] marks the tokens of each role that all of them have. Targets stand under "target.NAME": those of
    labelled tokens one behind the other, [token, ...], the others [example, ...], padded where they have positions.
    """
    length = max(len(example.ids) for example in examples)
    ids = [[*example.ids, *[pad_id] * (length - len(example.ids))] for example in examples]
    labels = [[*example.labels, *[IGNORED] * (length - len(example.labels))] for example in examples]
    real = torch.tensor([len(example.ids) for example in examples])[:, None]
    position_ids = torch.arange(length).expand(len(examples), length)
    batch = {
        "input_ids": torch.tensor(ids),
        "attention_mask": (position_ids < real).long(),
        "position_ids": position_ids.minimum(real - 1),
        "labels": torch.tensor(labels),
    }
    if all(example.prompt is not None for example in examples):
        batch[QUERY] = torch.tensor([example.query for example in examples])
        for role in [role for role in examples[0].spans if all(role in example.spans for example in examples)]:
            span = torch.zeros(len(examples), length, dtype=torch.bool)
            for i, example in enumerate(examples):
                span[i, list(example.spans[role])] = True
            batch[SPAN + role] = span
    for name in examples[0].targets:
        parts = [example.targets[name] for example in examples]
        if name.endswith(TOKENS):
            batch[TARGET + name] = torch.cat(parts)
        elif name.endswith(POSITIONS):
            batch[TARGET + name] = torch.stack([pad(part, (0, length - part.shape[-1])) for part in parts])
        else:
            batch[TARGET + name] = torch.stack(parts)
    return batch


def answer_logits(
    model: HookedModel, examples: Sequence[Example], batch_size: int
) -> Iterator[list[Float[Tensor, "token vocab"]]]:
    """The model's predictions of the labelled tokens of each example, in order, a batch of examples at a time.

    In evaluation mode. Raises `BadRowsError` for examples longer than the model's positions.
    """
    long = [
        (i, f"{len(one.ids)} tokens") for i, one in enumerate(examples) if len(one.ids) > (model.max_positions or 1e9)
    ]
    if long:
        raise BadRowsError(
            f"examples are longer than the model's {model.max_positions} positions", long, len(examples), "shorten them"
        )
    with evaluating(model.model):
        for start in range(0, len(examples), batch_size):
            yield _labelled(model, examples[start : start + batch_size])


@torch.no_grad()
def _labelled(model: HookedModel, examples: Sequence[Example]) -> list[Float[Tensor, "token vocab"]]:
    batch = {name: part.to(model.device) for name, part in collate(examples, model.pad_id).items() if name in INPUTS}
    logits = model.model(**batch, use_cache=False).logits
    places = [(torch.tensor(one.labels) != IGNORED).nonzero()[:, 0] - 1 for one in examples]
    return [logits[i, place.to(logits.device)].float() for i, place in enumerate(places)]
