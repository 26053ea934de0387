"""Matches the tokens of an answer with those of the same answer after another prompt, by their characters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

SPACE = ("Ġ", "▁")
"""How the texts of tokens begin that hold a space before the word."""

Tokens = Int[Tensor, " token"]


@dataclass(frozen=True)
class Match:
    """A token, and the token after the other prompt that spells the same characters."""

    own: int
    """The index of the token."""
    other: int
    """The index of the other one."""
    become: Callable[[Tokens], Tokens] | None = None
    """What tokens become if a space before them is added or removed, as between the two; -1: there is no such token.
    None: the two are equal."""


class Spaces:
    """Which tokens of a tokenizer differ by a space before them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        vocabulary = tokenizer.get_vocab()
        spaced = [(i, text[1:]) for text, i in vocabulary.items() if text.startswith(SPACE)]
        self.remove = {i: vocabulary[text] for i, text in spaced if text in vocabulary}
        """For each token that begins with a space, the one without it, if there is one."""
        self.add = {bare: i for i, bare in self.remove.items()}
        """The other way round."""

    def become(self, other: int, own: int) -> Callable[[Tokens], Tokens] | None:
        """What all tokens become when `other` becomes `own`; None: the two do not differ by a space."""
        for table in (self.remove, self.add):
            if table.get(other) == own:
                return lambda ids: torch.tensor([table.get(i, -1) for i in ids.tolist()])
        return None


def match_tokens(
    own: Sequence[int], other: Sequence[int], tokenizer: PreTrainedTokenizerBase, spaces: Spaces
) -> list[Match]:
    """The tokens of `own` that `other` has as well, at the same characters of the text.

    Both are tokens of one text, possibly with a space before it. Tokens match if they are equal; of the first tokens,
    one may have the space and the other not.
    """
    index_of = {span: index for index, span in enumerate(_spans(other, tokenizer))}
    pairs = [(index, index_of[span]) for index, span in enumerate(_spans(own, tokenizer)) if span in index_of]
    equal = [Match(*pair) for pair in pairs if own[pair[0]] == other[pair[1]]]
    become = spaces.become(other[0], own[0]) if (0, 0) in pairs else None
    return equal if become is None else [Match(0, 0, become), *equal]


def text_end(ids: Sequence[int], text: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of tokens that spell the text with which they begin; all of them if no token ends where it does."""
    ends = [end for _, end in _spans(ids, tokenizer)]
    return ends.index(len(text)) + 1 if len(text) in ends else len(ids)


def _spans(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, int]]:
    """Where each token's characters begin and end in the text, without the space before it."""
    texts = [tokenizer.decode(list(ids[:i]), clean_up_tokenization_spaces=False) for i in range(len(ids) + 1)]
    ends = [len(str(text).lstrip()) for text in texts]
    return list(itertools.pairwise(ends))
