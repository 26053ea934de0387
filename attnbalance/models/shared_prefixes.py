"""Prefixes that prompts share: the model reads them once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise, takewhile

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from transformers import DynamicCache

from attnbalance.data.batches import PromptBatch, check_lengths
from attnbalance.data.tokens import Encoding
from attnbalance.models.forward import base_of, check_vocabulary
from attnbalance.models.hooked import HookedModel
from attnbalance.models.prefix_cache import copies, read_prefix
from attnbalance.progress import progress_bar

SHORTEST, FEWEST = 16, 4
"""The shortest prefix, in tokens, and the fewest prompts with it, that a cache is worth in generation, where only
prompts of one length share a batch."""

PASS_ON_CPU, PASS = 60, 1024
"""How many tokens could be read in the time of one extra pass; sharing must save more than twice that.

On CPUs it is measured (see `benchmarks/reading.py`); on other devices it is a guess on the safe side.
"""

Worth = Callable[[int, int], int]
"""The number of tokens that a group saves, 0 if it is not worth a cache, from the prefix's length and its prompts."""


def worth_in_generation(shared: int, prompts: int) -> int:
    """The tokens that are not read again, for a prefix and a group that are large enough."""
    return shared * (prompts - 1) if shared >= SHORTEST and prompts >= FEWEST else 0


def worth_in_reading(pass_cost: int, shared: int, prompts: int) -> int:
    """The tokens that are not read again, less two passes: that of the prefix, and one more for a batch cut in two."""
    return max(0, shared * (prompts - 1) - 2 * pass_cost)


def with_prefixes(
    model: HookedModel,
    sequences: Sequence[Sequence[int]],
    worth: Worth = worth_in_generation,
    *,
    longest: int | None = None,
) -> Iterator[tuple[DynamicCache | None, list[int]]]:
    """The sequences in groups, each with the cache of the prefix that it shares, or None without one.

    Without a prefix that is worth a cache, or in a model whose caches cannot be shared, there is one group. `longest`
    is the most tokens of a sequence with what is read after it; by default nothing is.
    """
    groups = groups_by_prefix(sequences, worth)
    most = max(map(len, sequences), default=0) if longest is None else longest
    if not any(shared for shared, _ in groups) or not can_share(model, most):
        groups = [(0, list(range(len(sequences))))]
    for shared, group in groups:
        yield (_prefix(model, sequences[group[0]][:shared]) if shared else None), group


def _prefix(model: HookedModel, ids: Sequence[int]) -> DynamicCache | None:
    check_vocabulary(model.model, torch.tensor(ids), model.name)
    with model.evaluating():
        return read_prefix(model.model, ids)


def can_share(model: HookedModel, longest: int) -> bool:
    """Whether prompts of so many tokens can be read after a cache.

    Not where something else hooks into the model's passes, such as an edit: it may count on whole prompts. Hooks of
    transformers itself are those that collect what a pass returns.
    """
    short = model.alike_from is None or longest < model.alike_from
    return short and not any(map(_is_hooked, model.model.modules())) and model.shares_prefixes


def _is_hooked(module: Module) -> bool:
    own = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    hooks = (*own, *_global_forward_hooks.values(), *_global_forward_pre_hooks.values())
    return any(not str(getattr(hook, "__module__", "")).startswith("transformers.") for hook in hooks)


@torch.no_grad()
def rows_by_batch(
    model: HookedModel,
    encodings: Sequence[Encoding],
    batch_size: int,
    bar: str | None = None,
    layers: Sequence[int] | None = None,
) -> Iterator[tuple[list[int], PromptBatch, Float[Tensor, "prompt layer head position"]]]:
    """The batches of `HookedModel.batches` with their rows, and the indices of their prompts.

    A prefix that prompts share is read once, where the model's cache allows it; then a batch holds only prompts with
    that prefix. `layers` are those to read, by default all. Raises what `HookedModel.batches` and `HookedModel.rows`
    raise.
    """
    check_lengths(encodings, model.max_positions)  # over all prompts: groups have other row numbers
    cost = PASS_ON_CPU if model.device.type == "cpu" else PASS
    groups = with_prefixes(model, [encoding.ids for encoding in encodings], partial(worth_in_reading, cost))
    with progress_bar(bar or "", total=len(encodings), unit="prompt", shown=bar is not None) as progress:
        for prefix, group in groups:
            side, most = ("left", None) if prefix is None else ("right", cost)
            asked = [encodings[i] for i in group]
            for indices, batch in model.batches(asked, batch_size, padding_side=side, most_padding=most):
                cache = None if prefix is None else copies(prefix, len(indices))
                yield [group[i] for i in indices], batch, model.rows(batch, cache, layers)
                progress.update(len(indices))


def groups_by_prefix(
    sequences: Sequence[Sequence[int]], worth: Worth = worth_in_generation
) -> list[tuple[int, list[int]]]:
    """The sequences in groups that share a prefix: its length in tokens, and the indices of the group.

    The groups are those of the prefix tree that are worth most. Their sequences keep one token or more of their own;
    equal sequences stay together. The rest come last, with a prefix of 0 tokens.

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
        for shared, start, end in _split(common, counts, worth, 0, len(order))
    ]
    rest = [i for shared, group in groups if not shared for i in group]
    return [(shared, group) for shared, group in groups if shared] + ([(0, rest)] if rest else [])


def _split(
    common: Sequence[int], counts: Sequence[int], worth: Worth, start: int, end: int
) -> list[tuple[int, int, int]]:
    """(prefix, start, end) of the groups of the different sequences [start, end).

    common: the prefix that the sequences i and i + 1 share.
    counts: how many sequences there are before i, repeated ones included.
    worth: what a group is worth.
    """
    if end - start < 2:
        return [(0, start, end)]

    def saved(groups: Sequence[tuple[int, int, int]]) -> int:
        return sum(worth(shared, counts[last] - counts[first]) for shared, first, last in groups)

    shared = min(common[start : end - 1])
    cuts = [i + 1 for i in range(start, end - 1) if common[i] == shared]
    ends = pairwise([start, *cuts, end])
    parts = [part for first, last in ends for part in _split(common, counts, worth, first, last)]
    whole = [(shared, start, end)]
    if not saved(whole):
        whole = [(0, start, end)]
    return whole if saved(whole) >= saved(parts) else parts


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the prefix that both share, short of the last token of either."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(a[:-1], b[:-1], strict=False))
    return sum(1 for _ in same)


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
