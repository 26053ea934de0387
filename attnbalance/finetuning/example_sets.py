"""Data sets as trainers take them: which of them hold examples, and what to say of those that do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

from attnbalance.errors import DataError
from attnbalance.finetuning.examples import Example, about_facts
from attnbalance.finetuning.objectives.objective import Objective

DATA_ARGUMENTS = ("train_dataset", "eval_dataset")
"""The arguments of a trainer that hold data."""


def are_examples(data: Any) -> bool:
    """Whether a data set holds examples, judged by its first item."""
    return isinstance(_first(data), Example)


def as_list(data: Any) -> list[Any]:
    """The items of a data set that is a sequence, such as a list or torch's Subset."""
    return [data[i] for i in range(len(data))]


def data_sets(data: Any) -> list[Any]:
    """The data sets that a trainer was given under one name: none, one, or several in a dict."""
    return [] if data is None else list(data.values()) if isinstance(data, dict) else [data]


def check_examples(sets: Sequence[Any], objective: Objective) -> list[Example]:
    """All examples of some data sets.

    Raises `DataError` for other items, for roles that a prompt does not mark, and for rows about no fact if the
    objective learns no answers.
    """
    examples = [item for data in sets if are_examples(data) for item in as_list(data)]
    other = [describe_items(data) for data in sets if not are_examples(data)]
    other += [f"{type(item).__name__}s" for item in examples if not isinstance(item, Example)]
    if other:
        raise DataError(
            f"training and evaluation data hold examples and {other[0]}; make examples of all of them, with "
            "make_examples or as_examples"
        )
    asked = about_facts(examples)
    general = len(examples) - len(asked)
    if general and not objective.learns_answers:
        raise DataError(
            f"objective {objective.text!r} learns no answers, so {general} of {len(examples)} examples, which have no "
            "prompt, would not be trained on; add ce to it, or leave them out"
        )
    if examples and not asked and objective.needs.spans:
        raise DataError(
            f"objective {objective.text!r} looks at subjects, but none of {len(examples)} examples has a prompt; make "
            "them with make_examples or as_examples"
        )
    for role in sorted(objective.needs.spans):
        lacking = sum(role not in example.spans for example in asked)
        if lacking:
            raise DataError(
                f"objective {objective.text!r} needs the tokens of the {role} in every prompt, but {lacking} "
                f"examples do not mark them; ask with a template that names {{{role}}}, such as "
                "'What is the {relation} of {subject}?'"
            )
    return examples


@dataclass(frozen=True)
class RowsCollator:
    """A trainer's own collator for a stream of rows; raises `DataError` for examples, which must be in a sequence.

    Attributes:
        collator: The trainer's own.
        stream: The type of the data set.
        tokenizer: The collator's tokenizer, which trainers save; None if it has none.
    """

    collator: Callable[[list[Any]], Any]
    stream: str
    tokenizer: Any

    def __call__(self, rows: list[Any]) -> Any:
        """The batch of some rows."""
        if any(isinstance(row, Example) for row in rows):
            raise DataError(f"data hold examples in a {self.stream}; pass them in a list")
        return self.collator(rows)


def rows_collator(collator: Any, sets: Sequence[Any], objective: Objective) -> Any:
    """The collator of a trainer whose data hold no examples; `collator` is the trainer's own.

    Raises `DataError` for an objective that needs examples. Streams are not read before training, so examples in them
    are refused as they come.
    """
    if not objective.plain:
        raise DataError(
            f"objective {objective.text!r} needs a list of examples that have their prompt, got "
            f"{describe_items(sets[0] if sets else None)}; make them with make_examples or as_examples"
        )
    streams = [type(data).__name__ for data in sets if isinstance(data, IterableDataset)]
    return RowsCollator(collator, streams[0], getattr(collator, "tokenizer", None)) if streams else collator


def tokenizer_of(processing_class: Any, objective: Objective) -> Any:
    """The tokenizer that a trainer was given, itself or in a processor; raises `DataError` if there is none."""
    if processing_class is None:
        raise DataError(
            f"objective {objective.text!r} and what evaluations watch need the tokenizer that made the examples: pass "
            "processing_class=tokenizer"
        )
    return getattr(processing_class, "tokenizer", processing_class)


def first_text(batch: Mapping[str, Any], processing_class: Any) -> str:
    """The beginning of a batch's first text, for messages."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    ids = batch["input_ids"][0]
    return str(ids.tolist() if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=True))[:80]


def as_table(data: Any) -> Any:
    """The first example of each set as a table, for trainers that accept only tables while they are set up (trl's)."""
    from datasets import Dataset

    if isinstance(data, dict):
        return {name: as_table(part) for name, part in data.items()}
    if not are_examples(data):
        return data
    return Dataset.from_list([{"input_ids": list(data[0].ids), "labels": list(data[0].labels)}])


def describe_items(data: Any) -> str:
    """What a data set holds, for messages.

    >>> describe_items(["a text"])
    'strs'
    >>> describe_items([])
    'nothing'
    """
    if data is None or not hasattr(data, "__len__"):
        return "nothing" if data is None else f"a {type(data).__name__}, which has no length"
    return f"{type(_first(data)).__name__}s" if len(data) else "nothing"


def _first(data: Any) -> Any:
    try:
        return data[0]
    except (TypeError, IndexError, KeyError, NotImplementedError):  # the last: torch's IterableDataset
        return None
