"""Question-answer examples for finetuning: the model reads the prompt and learns the answer only."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerBase

from attnbalance.arguments import expects
from attnbalance.data.batches import check_lengths
from attnbalance.data.facts import Fact
from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.prompts import Prompt, Template, make_prompts
from attnbalance.data.taught_answers import taught_answer
from attnbalance.data.tokens import Encoding
from attnbalance.errors import BadRowsError, DataError

IGNORED = -100
"""The label of a token that carries no loss (Hugging Face's convention)."""

SPAN, TARGET = "span.", "target."
"""Prefixes of the keys of a batch: for the tokens of a role, and for an objective's numbers of the base model."""

INPUTS = ("input_ids", "attention_mask", "position_ids")
"""The keys of a batch that every model takes."""

TOKENS, POSITIONS = "/token", "/position"
"""Suffixes of the names of targets: the first axis is the labelled tokens, or the last one is the positions."""

REPLAYED = "replayed"
"""The name of the target that says whether an example is replayed (see `replay`)."""

HAS_FACT = "has_fact"
"""The key of a batch with examples that have no prompt: [example], whether each has one."""

QUERY = "query_index"
"""The key of a batch that holds the position of each prompt's last token: the query whose attention row is read."""

EXTRA = (QUERY, HAS_FACT, SPAN, TARGET)
"""Beginnings of the keys of a batch that a model does not take."""


@dataclass(frozen=True)
class Example:
    """Token ids of a prompt with its answer."""

    ids: tuple[int, ...]
    """The tokens of prompt and answer."""
    labels: tuple[int, ...]
    """The same tokens on the answer, `IGNORED` elsewhere."""
    prompt: Prompt | None = None
    """The prompt that was encoded; None: a row about no fact, which only learns its labels (see `as_examples`)."""
    spans: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The positions of the tokens of each role."""
    targets: Mapping[str, Shaped[Tensor, ...]] = field(default_factory=dict)
    """Numbers that objectives hold the model to, by name (see `add_targets`)."""

    @property
    def query(self) -> int:
        """The position of the prompt's last token: the one before the first with a label."""
        return next(i for i, label in enumerate(self.labels) if label != IGNORED) - 1


def about_facts(examples: Iterable[Example]) -> list[Example]:
    """The examples that have a prompt."""
    return [example for example in examples if example.prompt is not None]


def sizes_of(
    batch: Mapping[str, Shaped[Tensor, ...]],
) -> tuple[Float[Tensor, " example"], Bool[Tensor, " example"] | None]:
    """The labelled tokens of each example of a batch of `collate`, and which examples are replayed facts.

    First tokens do not count, since nothing predicts them. None: no run with replay.
    """
    return (batch["labels"][:, 1:] != IGNORED).sum(-1).float(), batch.get(TARGET + REPLAYED)


def first_difference(example: Example, other: Example) -> tuple[int, int]:
    """The index of the first label that differs from another example's, and the other's token there.

    (-1, -1) if one answer begins with the other.

    >>> first_difference(Example((7, 1, 2), (-100, 1, 2)), Example((7, 1, 3), (-100, 1, 3)))
    (1, 3)
    """
    own, others = (each.labels[each.query + 1 :] for each in (example, other))
    pairs = enumerate(zip(own, others, strict=False))
    return next(((index, token) for index, (label, token) in pairs if label != token), (-1, -1))


@expects(facts=[Fact], tokenizer=PreTrainedTokenizerBase)
def make_examples(
    facts: Iterable[Fact],
    tokenizer: PreTrainedTokenizerBase,
    template: str | Template = "qa",
    *,
    max_positions: int | None = None,
) -> list[Example]:
    """One example for each fact, in order: prompt + " " + first answer + end-of-sequence token, if there is one.

    The prompt's tokens are exactly those of its `Encoding`, so that training and asking agree. Raises
    `DataError` for no facts and for a template that cannot ask them, and `BadRowsError` if the tokenizer merges the end
    of a prompt with the answer, and for examples longer than `max_positions`.

    Args:
        facts: The facts.
        tokenizer: The model's tokenizer.
        template: How the facts are asked.
        max_positions: The longest input of the model, in tokens; None: no limit.
    """
    prompts = make_prompts(facts, template)
    if not prompts:
        raise DataError("expected facts to make examples of, got none")
    return examples_of(prompts, tokenizer, max_positions=max_positions)


def examples_of(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    *,
    end: bool = True,
    max_positions: int | None = None,
) -> list[Example]:
    """`make_examples` for existing prompts, e.g. rendered as chats; `end`: whether to add the end-of-sequence token."""
    prompts = PromptSet.of(prompts, tokenizer)
    last = [tokenizer.eos_token_id] if end and isinstance(tokenizer.eos_token_id, int) else []
    labels = [(*answer, *last) for answer in prompts.answers.ids]
    check_lengths(prompts.encodings, max_positions, extra=[len(label) for label in labels])
    return [_joined(*pair) for pair in zip(prompts.encodings, labels, strict=True)]


def _joined(encoding: Encoding, labels: Sequence[int]) -> Example:
    """The example of a prompt and the labels after it."""
    ignored = [IGNORED] * len(encoding.ids)
    return Example((*encoding.ids, *labels), (*ignored, *labels), encoding.prompt, encoding.spans)


@expects(rows=[Mapping], facts=[(Fact, type(None))], tokenizer=PreTrainedTokenizerBase)
def as_examples(
    rows: Sequence[Mapping[str, Sequence[int]]], facts: Sequence[Fact | None], tokenizer: PreTrainedTokenizerBase
) -> list[Example]:
    """Examples from tokenized rows, with `input_ids` and `labels`, and the fact of each.

    The prompt is the text before the first label; it must contain its subject exactly once. Padding (an
    `attention_mask` of 0) is cut off. If a row teaches another accepted answer than the first, the example's fact has
    that answer first: terms, checks and few-shot examples go by it. A row whose fact is None, such as a general
    instruction, is trained on its labels only: terms that use the subject or the base model are 0 for it.

    Raises `DataError` if rows and facts differ in number, `ArgumentError` for other rows or facts, and `BadRowsError`
    for rows without a prompt or a label, for labels that are not the row's own tokens (do not shift them; models do),
    and for prompts that do not contain their subject once or do not tokenize to the row's own ids.
    """
    if not all({"input_ids", "labels"} <= set(row) for row in rows):
        raise DataError("expected rows with input_ids and labels")
    if len(rows) != len(facts):
        raise DataError(f"expected one fact for each row, got {len(rows)} rows and {len(facts)} facts")
    _check_rows(rows)
    unpadded = [_unpadded(row) for row in rows]
    prompts, bad = list[Prompt](), list[tuple[int, str]]()
    asked = [i for i, fact in enumerate(facts) if fact is not None]
    for i, ((ids, labels), fact) in enumerate(zip(unpadded, facts, strict=True)):
        start = next((j for j, label in enumerate(labels) if label != IGNORED), 0)
        if fact is None:
            bad += [(i, "no label")] if not any(label != IGNORED for label in labels[1:]) else []
            continue
        text, special = _prompt_text(ids[:start], tokenizer)
        count = text.count(fact.subject)
        if not start:
            bad.append((i, f"no prompt: labels of the prompt's tokens must be {IGNORED}"))
        elif count != 1:
            bad.append((i, f"subject {fact.subject!r} occurs {count} times in {text!r}, not once"))
        fact = _with_taught_first(fact, labels[start:], tokenizer)
        first = max(text.find(fact.subject), 0)
        spans = {"subject": (first, first + len(fact.subject))}
        prompts.append(Prompt(text, spans, f"{fact.relation}/{fact.subject}/{i}", fact, special))
    encodings = () if bad or not prompts else PromptSet.of(prompts, tokenizer).encodings
    bad += [
        (i, f"{encoding.prompt.text!r} tokenizes to other ids than the row's")
        for i, encoding in zip(asked, encodings, strict=False)
        if unpadded[i][0][: len(encoding.ids)] != encoding.ids
    ]
    if bad:
        raise BadRowsError("rows cannot be read as examples", bad, len(rows), "fix these rows")
    read = dict(zip(asked, encodings, strict=True))
    return [
        Example(ids, labels, read[i].prompt, read[i].spans) if i in read else Example(ids, labels)
        for i, (ids, labels) in enumerate(unpadded)
    ]


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The ids of a tokenizer's special tokens, also of those that were added."""
    added = (i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
    return {*tokenizer.all_special_ids, *added}


def _with_taught_first(fact: Fact, labels: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> Fact:
    """A fact with the accepted answer first that a row's labels begin with."""
    special = special_ids(tokenizer) | {IGNORED}
    text = str(tokenizer.decode(list(takewhile(lambda label: label not in special, labels)))).strip()
    taught = taught_answer(text, fact)
    if taught in (None, fact.answer):
        return fact
    return replace(fact, answers=(taught, *(answer for answer in fact.answers if answer != taught)))


def _check_rows(rows: Sequence[Mapping[str, Sequence[int]]]) -> None:
    """Raise `BadRowsError` for rows of uneven lists or other numbers, and for labels that are not the row's tokens."""
    bad = list[tuple[int, str]]()
    for i, row in enumerate(rows):
        try:
            ids, labels = ([operator.index(value) for value in row[name]] for name in ("input_ids", "labels"))
        except TypeError:
            bad.append((i, "input_ids and labels must be whole numbers"))
            continue
        if not all(value in (0, 1) for value in row.get("attention_mask", ())):
            bad.append((i, "attention_mask must be 0 or 1"))
            continue
        lengths = {name: len(row[name]) for name in ("input_ids", "labels", "attention_mask") if name in row}
        if len(set(lengths.values())) > 1:
            bad.append((i, "lists of different lengths: " + ", ".join(f"{name} {n}" for name, n in lengths.items())))
            continue
        kept = [bool(value) for value in row.get("attention_mask", [1] * len(ids))]
        wrong = [j for j, label in enumerate(labels) if kept[j] and label not in (IGNORED, ids[j])]
        if wrong:
            at = wrong[0]
            shifted = ", the next token: labels must not be shifted" if labels[at] in ids[at + 1 : at + 2] else ""
            bad.append((i, f"label {labels[at]} at position {at} is not its token {ids[at]} or {IGNORED}{shifted}"))
    if bad:
        raise BadRowsError("rows cannot be read as examples", bad, len(rows), "fix these rows")


def _unpadded(row: Mapping[str, Sequence[int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids and labels of a row without padding."""
    mask = [bool(kept) for kept in row.get("attention_mask", [1] * len(row["input_ids"]))]
    ids, labels = (
        tuple(int(value) for value, kept in zip(row[name], mask, strict=True) if kept)
        for name in ("input_ids", "labels")
    )
    return ids, labels


def _prompt_text(ids: tuple[int, ...], tokenizer: PreTrainedTokenizerBase) -> tuple[str, bool]:
    """The text of a prompt's ids, and whether it contains special tokens that the tokenizer does not add by itself."""
    text = str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False, skip_special_tokens=True))
    if tuple(tokenizer(text, verbose=False)["input_ids"][: len(ids)]) == ids:
        return text, False
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)), True  # a rendered chat


def collate(examples: Sequence[Example], pad_id: int = 0) -> dict[str, Shaped[Tensor, "item ..."]]:
    """Examples padded on the right to one length; padding has mask 0 and no loss, whatever `pad_id` is.

    If all examples have labels, `query_index` [example] is the position of the last token before them. "span.ROLE"
    [example, position] marks the tokens of each role that all those with a prompt have. "target.NAME" holds the targets
    that all examples have: those of labelled tokens concatenated, [token, ...], the others [example, ...], padded if
    they have positions. "has_fact" [example] is there if some have no prompt.
    """
    length = max(len(example.ids) for example in examples)
    ids = [[*example.ids, *[pad_id] * (length - len(example.ids))] for example in examples]
    labels = [[*example.labels, *[IGNORED] * (length - len(example.labels))] for example in examples]
    lengths = torch.tensor([len(example.ids) for example in examples])[:, None]
    position_ids = torch.arange(length).expand(len(examples), length)
    batch = {
        "input_ids": torch.tensor(ids),
        "attention_mask": (position_ids < lengths).long(),
        "position_ids": position_ids.minimum(lengths - 1),
        "labels": torch.tensor(labels),
    }
    if all(set(example.labels) != {IGNORED} for example in examples):
        batch[QUERY] = torch.tensor([max(example.query, 0) for example in examples])
    marked = about_facts(examples) or examples
    for role in [role for role in marked[0].spans if all(role in example.spans for example in marked)]:
        span = torch.zeros(len(examples), length, dtype=torch.bool)
        for i, example in enumerate(examples):
            span[i, list(example.spans.get(role, ()))] = True
        batch[SPAN + role] = span
    if len(about_facts(examples)) < len(examples):
        batch[HAS_FACT] = torch.tensor([example.prompt is not None for example in examples])
    for name in [name for name in examples[0].targets if all(name in example.targets for example in examples)]:
        batch[TARGET + name] = _join_targets(name, [example.targets[name] for example in examples], length)
    return batch


def _join_targets(name: str, parts: Sequence[Tensor], length: int) -> Shaped[Tensor, "item ..."]:
    """One target of all examples, by the suffix of its name."""
    if name.endswith(TOKENS):
        return torch.cat(list(parts))
    if name.endswith(POSITIONS):
        return torch.stack([pad(part, (0, length - part.shape[-1])) for part in parts])
    return torch.stack(list(parts))
