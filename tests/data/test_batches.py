"""Padded batches, against their prompts' own tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_prompts, tiny_tokenizer

from attnbalance.data.batches import MOST_TOKENS, batches, check_lengths, in_order, pad
from attnbalance.data.tokens import encode
from attnbalance.errors import BadRowsError, DataError


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_keeps_ids_positions_query_and_spans(side: str) -> None:
    encodings = encode(tiny_prompts(), tiny_tokenizer())
    batch = pad(encodings, pad_id=7, padding_side=side)
    width = max(len(encoding.ids) for encoding in encodings)
    for row, encoding in enumerate(encodings):
        size = len(encoding.ids)
        start = width - size if side == "left" else 0
        real = list(range(start, start + size))
        assert batch.input_ids[row].tolist() == [7] * start + list(encoding.ids) + [7] * (width - size - start)
        assert batch.attention_mask[row].nonzero().flatten().tolist() == real
        assert batch.position_ids[row, real].tolist() == list(range(size))
        assert int(batch.query_index[row]) == real[-1]
        assert batch.spans["subject"][row].nonzero().flatten().tolist() == [
            start + j for j in encoding.spans["subject"]
        ]


def test_batches_hold_every_prompt_once_longest_first() -> None:
    encodings = encode(tiny_prompts(), tiny_tokenizer())
    groups = list(batches([len(encoding.ids) for encoding in encodings], 4))
    assert [len(group) for group in groups] == [4, 4, 1]
    flat = [i for group in groups for i in group]
    assert sorted(flat) == list(range(9))
    lengths = [len(encodings[i].ids) for i in flat]
    assert lengths == sorted(lengths, reverse=True)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 8), st.integers(0, 40))
def test_a_batch_ends_before_its_padding_is_too_much(lengths: list[int], size: int, most: int) -> None:
    groups = list(batches(lengths, size, most_padding=most))
    flat = [i for group in groups for i in group]
    assert flat == [i for group in batches(lengths, size) for i in group]  # the same order in other batches
    padding = [sum(max(lengths[i] for i in group) - lengths[i] for i in group) for group in groups]
    assert max(padding) <= most
    for group, after, padded in zip(groups, groups[1:], padding, strict=False):  # the next prompt had no room
        assert len(group) == size or padded + lengths[group[0]] - lengths[after[0]] > most


@given(st.lists(st.integers(1, 20_000), min_size=1, max_size=60), st.integers(1, 64))
def test_a_batch_of_long_prompts_holds_fewer(lengths: list[int], size: int) -> None:
    groups = list(batches(lengths, size))
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group, after in zip(groups, [*groups[1:], None], strict=True):
        longest = max(lengths[i] for i in group)
        assert len(group) == 1 or len(group) * longest <= MOST_TOKENS
        assert after is None or len(group) == size or (len(group) + 1) * longest > MOST_TOKENS  # no room for the next


def test_a_batch_may_hold_just_the_most_tokens() -> None:
    assert [len(group) for group in batches([512] * 65, 64)] == [32, 32, 1]
    assert [len(group) for group in batches([513] * 33, 64)] == [31, 2]


def test_a_prompt_of_just_the_models_positions_passes_and_one_more_is_named() -> None:
    encodings = encode(tiny_prompts(), tiny_tokenizer())
    longest = max(len(encoding.ids) for encoding in encodings)
    check_lengths(encodings, longest)
    check_lengths(encodings, None)
    check_lengths(encodings, longest + 3, extra=[3] * len(encodings))
    with pytest.raises(
        BadRowsError, match=rf"1 of 9 .*{longest - 1} positions(.|\n)*{longest} tokens: 'Question(.|\n)*skip_bad=True"
    ):
        check_lengths(encodings, longest - 1)
    with pytest.raises(BadRowsError, match="and 3 for the answer") as caught:
        check_lengths(encodings, longest + 2, extra=[3] * len(encodings))
    assert caught.value.indices == tuple(i for i, encoding in enumerate(encodings) if len(encoding.ids) == longest)


@pytest.mark.parametrize(("side", "count"), [("middle", 9), ("left", 0)])
def test_pad_refuses_another_side_and_no_prompts(side: str, count: int) -> None:
    with pytest.raises(DataError, match=f"got '{side}' and {count}"):
        pad(encode(tiny_prompts()[:count], tiny_tokenizer()), padding_side=side)


def test_prompts_that_reach_a_length_are_batched_only_with_prompts_of_their_own_length() -> None:
    encodings = encode(tiny_prompts(), tiny_tokenizer())
    lengths = [len(encoding.ids) for encoding in encodings]
    middle = sorted(lengths)[4]
    groups = list(batches(lengths, 3, alike_from=middle))
    assert sorted(i for group in groups for i in group) == list(range(len(encodings)))
    for group in groups:
        assert len(group) <= 3
        assert max(lengths[i] for i in group) < middle or len({lengths[i] for i in group}) == 1
    assert list(batches(lengths, 3, alike_from=max(lengths) + 1)) == list(batches(lengths, 3))


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_last_token_of_a_span_is_the_one_with_the_largest_position(side: str) -> None:
    encodings = encode(tiny_prompts(), tiny_tokenizer())
    batch = pad(encodings, padding_side=side)
    for row, encoding in enumerate(encodings):
        last = batch.spans["subject"][row].nonzero().flatten().tolist()[-1]
        assert int(batch.last_of("subject")[row]) == last
        assert encoding.last_of("subject") == last - int(batch.attention_mask[row].nonzero()[0])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("axes", [(), (2,), (2, 3)])
def test_unpadded_values_are_those_of_each_prompts_own_tokens_and_then_zeros(side: str, axes: tuple[int, ...]) -> None:
    batch = pad(encode(tiny_prompts(), tiny_tokenizer()), padding_side=side)
    prompts, width = batch.input_ids.shape
    values = torch.rand(prompts, *axes, width)
    shifted = batch.unpadded(values)
    for row in range(prompts):
        own = values[row][..., batch.attention_mask[row] != 0]
        assert torch.equal(shifted[row][..., : own.shape[-1]], own)
        assert not shifted[row][..., own.shape[-1] :].any()


def test_pieces_of_batches_come_back_in_the_order_of_the_prompts() -> None:
    assert in_order([torch.tensor([3.0, 1.0]), torch.tensor([2.0, 0.0])], [[3, 1], [2, 0]]).tolist() == [0, 1, 2, 3]
    joined = in_order([torch.tensor([[2, 2, 2]]), torch.tensor([[1], [3]])], [[1], [0, 2]])
    assert joined.tolist() == [[1, 0, 0], [2, 2, 2], [3, 0, 0]]
