"""Data sets as trainers take them."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace

import pytest
from datasets import Dataset
from torch.utils.data import IterableDataset, Subset
from transformers import DataCollatorWithPadding

from attnbalance.errors import DataError
from attnbalance.finetuning.example_sets import (
    are_examples,
    as_list,
    as_table,
    check_examples,
    data_sets,
    describe_items,
    rows_collator,
    tokenizer_of,
)
from attnbalance.finetuning.examples import IGNORED, Example, make_examples
from attnbalance.finetuning.objectives.parse import parse_objective
from tests.tiny import FACTS, tiny_tokenizer

BARE = Example((1, 2), (IGNORED, 2))
MARKED = Example((1, 2, 3), (IGNORED, IGNORED, 3), spans={"subject": (0,)})


class Stream(IterableDataset):
    """A data set without items by index."""

    def __iter__(self) -> Iterator[Example]:
        return iter([BARE])


def test_examples_are_known_by_the_first_item() -> None:
    assert are_examples([BARE, "text"])
    assert are_examples(Subset([BARE, MARKED], [1]))  # pyright: ignore[reportArgumentType]
    assert not any(map(are_examples, ([], ["text"], {"a": [BARE]}, Stream(), None, Dataset.from_list([{"a": 1}]))))


def test_sets_come_alone_or_by_name() -> None:
    assert data_sets(None) == []
    assert data_sets([BARE]) == [[BARE]]
    assert data_sets({"a": [BARE], "b": []}) == [[BARE], []]
    assert as_list(Subset([BARE, MARKED], [1, 0])) == [MARKED, BARE]  # pyright: ignore[reportArgumentType]


def test_items_are_described() -> None:
    descriptions = [describe_items(data) for data in (None, [], [BARE], [{}], Stream())]
    assert descriptions == ["nothing", "nothing", "Examples", "dicts", "a Stream, which has no length"]


def test_a_table_holds_the_first_example_of_each_set() -> None:
    table = as_table({"a": [MARKED, BARE], "b": ["text"]})
    assert table["a"].to_list() == [{"input_ids": [1, 2, 3], "labels": [IGNORED, IGNORED, 3]}]
    assert table["b"] == ["text"]


def test_all_sets_hold_examples_with_the_roles_that_the_objective_needs() -> None:
    assert check_examples([[BARE], [MARKED]], parse_objective("ce")) == [BARE, MARKED]
    [asked] = make_examples(FACTS[:1], tiny_tokenizer())
    assert check_examples([[BARE, asked]], parse_objective("ce + barrier")) == [BARE, asked]
    with pytest.raises(DataError, match="needs the tokens of the subject in every prompt, but 1 examples do not mark"):
        check_examples([[BARE, asked], [replace(asked, spans={})]], parse_objective("ce + barrier"))
    with pytest.raises(DataError, match="barrier' looks at subjects, but none of 2 examples has a prompt"):
        check_examples([[BARE], [MARKED]], parse_objective("ce + barrier"))
    with pytest.raises(DataError, match="barrier' learns no answers, so 2 of 2 examples, which have no prompt, would"):
        check_examples([[BARE], [MARKED]], parse_objective("barrier"))
    for other, described in (([{}], "dicts"), ([BARE, "text"], "strs")):
        with pytest.raises(DataError, match=f"hold examples and {described}"):
            check_examples([[BARE], other], parse_objective("ce"))


def test_the_tokenizer_is_needed() -> None:
    with pytest.raises(DataError, match="pass processing_class=tokenizer"):
        tokenizer_of(None, parse_objective("kl"))
    assert tokenizer_of("tokenizer", parse_objective("kl")) == "tokenizer"


def test_only_streams_of_rows_get_another_collator() -> None:
    rows, plain = [{"input_ids": [1]}], parse_objective("ce")
    collator = DataCollatorWithPadding(tiny_tokenizer("bos"))
    assert rows_collator(collator, [rows], plain) is collator
    of_stream = pickle.loads(pickle.dumps(rows_collator(len, [rows, Stream()], plain)))
    assert of_stream(rows) == 1
    with pytest.raises(DataError, match="data hold examples in a Stream; pass them in a list"):
        of_stream([*rows, BARE])
    assert rows_collator(collator, [Stream()], plain).tokenizer is collator.tokenizer
    with pytest.raises(DataError, match=r"objective 'kl\(statement\)' needs a list of examples .*, got dicts"):
        rows_collator(collator, [rows], parse_objective("kl(statement)"))
