"""Prefixes that prompts share: the model reads them once."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise, takewhile

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from attnbalance.models.forward import base_of
from attnbalance.models.hooked import HookedModel

SHORTEST, FEWEST = 16, 4
"""The shortest prefix, in tokens, and the fewest prompts with it, that a cache is worth."""


def with_prefixes(
    model: HookedModel, sequences: Sequence[Sequence[int]]
) -> Iterator[tuple[DynamicCache | None, list[int]]]:
    """The sequences in groups, each with the cache of the prefix that it shares, or None without one.

    Without a prefix that is worth a cache, or in a model whose caches cannot be shared, there is one group.
    """
    groups = groups_by_prefix(sequences)
    if not any(shared for shared, _ in groups) or read_prefix(model, sequences[0][:1]) is None:
        groups = [(0, list(range(len(sequences))))]
    for shared, group in groups:
        yield (read_prefix(model, sequences[group[0]][:shared]) if shared else None), group


def groups_by_prefix(sequences: Sequence[Sequence[int]]) -> list[tuple[int, list[int]]]:
    """The sequences in groups that share a prefix: its length in tokens, and the indices of the group.

    The groups are those of the prefix tree that save the most tokens. Each has a prefix of at least `SHORTEST` tokens
    and at least `FEWEST` sequences, which keep one token or more of their own; equal sequences stay together. The rest
    come last, with a prefix of 0 tokens.

    >>> groups_by_prefix([[1] * 20 + [end] for end in (5, 3, 7, 4)] + [[2, 3]])
    [(20, [1, 3, 0, 2]), (0, [4])]
    """
    indices = defaultdict[tuple[int, ...], list[int]](list)
    for i, sequence in enumerate(sequences):
        indices[tuple(sequence)].append(i)
    order = sorted(indices)
    common = [_common(a, b) for a, b in pairwise(order)]
    counts = list(accumulate((len(indices[ids]) for ids in order), initial=0))
    groups = [
        (shared, [i for ids in order[start:end] for i in indices[ids]])
        for shared, start, end in _split(common, counts, 0, len(order))
    ]
    rest = [i for shared, group in groups if not shared for i in group]
    return [(shared, group) for shared, group in groups if shared] + ([(0, rest)] if rest else [])


def _split(common: Sequence[int], counts: Sequence[int], start: int, end: int) -> list[tuple[int, int, int]]:
    """(prefix, start, end) of the groups of the different sequences [start, end).

    common: the prefix that the sequences i and i + 1 share.
    counts: how many sequences there are before i, repeated ones included.
    """
    if end - start < 2:
        return [(0, start, end)]
    shared = min(common[start : end - 1])
    cuts = [i + 1 for i in range(start, end - 1) if common[i] == shared]
    parts = [part for ends in pairwise([start, *cuts, end]) for part in _split(common, counts, *ends)]
    enough = shared >= SHORTEST and counts[end] - counts[start] >= FEWEST
    whole = (shared if enough else 0, start, end)
    return [whole] if _saved([whole], counts) >= _saved(parts, counts) else parts


def _saved(groups: Sequence[tuple[int, int, int]], counts: Sequence[int]) -> int:
    return sum(shared * (counts[end] - counts[start] - 1) for shared, start, end in groups)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the prefix that both share, short of the last token of either."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(a[:-1], b[:-1], strict=False))
    return sum(1 for _ in same)


@torch.no_grad()
def read_prefix(model: HookedModel, ids: Sequence[int]) -> DynamicCache | None:
    """The cache of a prefix.

    None for a model that keeps anything but the keys and values of all tokens (sliding windows, recurrent states), and
    for one that prompts of different lengths cannot share (see `HookedModel.alike_from`).
    """
    if model.alike_from is not None:
        return None
    inputs = torch.tensor([list(ids)], device=model.device)
    outputs = base_of(model.model)(input_ids=inputs, attention_mask=torch.ones_like(inputs), use_cache=True)
    cache = getattr(outputs, "past_key_values", None)
    if type(cache) is not DynamicCache or any(type(layer) is not DynamicLayer for layer in cache.layers):
        return None
    return cache


def copies(prefix: DynamicCache, count: int) -> DynamicCache:
    """The cache of a prefix for a batch of so many prompts; the prefix's own stays as it is."""
    cache = copy.deepcopy(prefix)
    cache.batch_repeat_interleave(count)
    return cache


@torch.no_grad()
def read_on(model: HookedModel, prefix: DynamicCache, input_ids: Int[Tensor, "prompt position"]) -> DynamicCache:
    """The cache for a batch of prompts of one length that begin with a prefix; the prefix's own stays as it is.

    Where prompts repeat (each is sampled several times), the different ones are read once, up to their last token.
    """
    different, index = input_ids.unique(dim=0, return_inverse=True)
    read = prefix.get_seq_length()
    if len(different) == len(input_ids) or read + 1 >= input_ids.shape[1]:
        return copies(prefix, len(input_ids))
    cache = copies(prefix, len(different))
    mask = torch.ones_like(different[:, :-1])
    base_of(model.model)(input_ids=different[:, read:-1], attention_mask=mask, past_key_values=cache)
    cache.batch_select_indices(index.cpu())  # layers may lie on several devices
    return cache
