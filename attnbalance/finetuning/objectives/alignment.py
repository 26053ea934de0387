"""Matches the tokens of an answer with those of the same answer after another prompt, by their characters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

SPACE = ("Ġ", "▁")
"""Prefixes that mark a space before a token."""

PARTIAL = "\N{REPLACEMENT CHARACTER}"
"""What the first bytes of a character are decoded as."""


@dataclass(frozen=True)
class Match:
    """A token, and the token after the other prompt that spells the same characters."""

    own: int
    """The index of the token."""
    other: int
    """The index of the other one."""
    respaced: Mapping[int, int] | None = None
    """For tokens that may stand at `other`, the token that differs as the two do: by the space before it. None: the two
    are equal."""


def space_tables(tokenizer: PreTrainedTokenizerBase) -> tuple[dict[int, int], dict[int, int]]:
    """For each token with a space before it, the one without; and for each of these, the one with the space."""
    vocabulary = tokenizer.get_vocab()
    spaced = [(i, text[1:]) for text, i in vocabulary.items() if text.startswith(SPACE)]
    without = {i: vocabulary[text] for i, text in spaced if text in vocabulary}
    return without, {bare: i for i, bare in without.items()}


def match_tokens(
    own: Sequence[int],
    other: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    tables: Sequence[Mapping[int, int]],
) -> list[Match]:
    """The tokens of `own` that `other` has as well, at the same characters of the text.

    Both are tokens of one text, possibly with a space before it. Tokens match if they are equal, with all that belong
    to the same character; of the first tokens, one may have the space and the other not.

    Args:
        own: The tokens.
        other: The tokens after the other prompt.
        tokenizer: The tokenizer of both.
        tables: Which tokens differ by a space (see `space_tables`).
    """
    segments, matches = _segments(other, tokenizer), list[Match]()
    for span, mine in _segments(own, tokenizer).items():
        theirs = segments.get(span, range(0))
        if [own[i] for i in mine] == [other[i] for i in theirs]:
            matches += map(Match, mine, theirs)
        elif mine == theirs == range(1):
            table = next((table for table in tables if table.get(other[0]) == own[0]), None)
            matches += [] if table is None else [Match(0, 0, table)]
    return matches


def text_end(ids: Sequence[int], text: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of tokens that spell the text with which they begin; all of them if no token ends where it does."""
    ends = [tokens.stop for (_, end, _), tokens in _segments(ids, tokenizer).items() if end == len(text)]
    return max(ends, default=len(ids))


def _segments(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> dict[tuple[int, int, int], range]:
    """The tokens of each run of whole characters: mostly one token, several where a character has several.

    Keys are where the run begins and ends in the text, without the space before it, and how many such runs came before
    (runs without characters may follow each other).
    """
    segments, first, begin = dict[tuple[int, int, int], range](), 0, 0
    for stop in range(1, len(ids) + 1):
        text = str(tokenizer.decode(list(ids[:stop]), clean_up_tokenization_spaces=False)).lstrip()
        if text.endswith(PARTIAL) and stop < len(ids):
            continue
        earlier = sum(span[:2] == (begin, len(text)) for span in segments)
        segments[begin, len(text), earlier] = range(first, stop)
        first, begin = stop, len(text)
    return segments
