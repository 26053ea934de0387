"""Prompt sets: prompts that are tokenized once and handed on with their tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import overload

from transformers import PreTrainedTokenizerBase

from attnbalance.arguments import expects
from attnbalance.data.prompts import Prompt
from attnbalance.data.tokens import Encoding, answer_lengths, encode, encode_answers


@dataclass(frozen=True, eq=False)
class PromptSet(Sequence[Prompt]):
    """Prompts with their tokens under one tokenizer; make it with `PromptSet.of`.

    Every function that takes prompts also takes a prompt set. If such a function also gets a model with the same
    tokenizer, it does not tokenize the prompts again. A part of a set (`prompts[:10]`) is a set. A tokenizer must not
    be changed after its use here.
    """

    encodings: tuple[Encoding, ...]
    """The prompts' tokens, in order."""
    tokenizer: PreTrainedTokenizerBase
    """What they were tokenized with."""
    answers: AnswerEncodings
    """The tokens of their answers."""

    @classmethod
    @expects(prompts=[Prompt], tokenizer=PreTrainedTokenizerBase)
    def of(cls, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> PromptSet:
        """The prompts with their tokens (see `encode`); a set made with the same tokenizer is returned unchanged.

        Raises `ModelError` for a tokenizer without offsets, `BadRowsError` for prompts that cannot be tokenized.
        """
        if isinstance(prompts, PromptSet):
            if prompts.tokenizer is tokenizer:
                return prompts
            if is_same(prompts.tokenizer, tokenizer):
                return replace(prompts, tokenizer=tokenizer)
        encodings = tuple(encode(prompts, tokenizer))
        return cls(encodings, tokenizer, AnswerEncodings(encodings, tokenizer))

    @property
    def prompt_ids(self) -> tuple[str, ...]:
        """The names of the prompts."""
        return tuple(prompt.prompt_id for prompt in self)

    def at(self, indices: Iterable[int]) -> PromptSet:
        """Some of the prompts, in the order of the indices."""
        indices = tuple(indices)
        encodings = tuple(self.encodings[i] for i in indices)
        answers = AnswerEncodings(encodings, self.tokenizer)
        if "lengths" in vars(self.answers):  # counted, and warned of, already
            vars(answers)["lengths"] = tuple(self.answers.lengths[i] for i in indices)
        return PromptSet(encodings, self.tokenizer, answers)

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self.encodings)

    def __iter__(self) -> Iterator[Prompt]:
        """The prompts in order."""
        return (encoding.prompt for encoding in self.encodings)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> PromptSet: ...
    def __getitem__(self, index: int | slice) -> Prompt | PromptSet:
        """One prompt, or a part of the set."""
        return self.at(range(len(self))[index]) if isinstance(index, slice) else self.encodings[index].prompt


@dataclass(frozen=True, eq=False)
class AnswerEncodings:
    """The tokens of prompts' answers, tokenized when first asked for."""

    encodings: tuple[Encoding, ...]
    """The prompts' tokens."""
    tokenizer: PreTrainedTokenizerBase
    """The tokenizer of both."""

    @cached_property
    def ids(self) -> tuple[tuple[int, ...], ...]:
        """The tokens of each prompt's first answer, put after the prompt (see `encode_answers`)."""
        return tuple(encode_answers(self.encodings, self.tokenizer))

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens of each prompt's longest accepted answer."""
        return tuple(answer_lengths([encoding.prompt for encoding in self.encodings], self.tokenizer))


def is_same(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase) -> bool:
    """Whether two tokenizers give the same tokens for every text: one tokenizer, or one that was loaded twice."""
    return a is b or (type(a) is type(b) and bool(a.is_fast) and _content(a) == _content(b))


def _content(tokenizer: PreTrainedTokenizerBase) -> tuple[object, ...]:
    """All that the tokens of a text depend on; truncation and padding, with its token, are set at each call."""
    backend: dict[str, object] = json.loads(tokenizer.backend_tokenizer.to_str())  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    steps = {name: step for name, step in backend.items() if name not in ("truncation", "padding")}
    special = {role: token for role, token in tokenizer.special_tokens_map.items() if role != "pad_token"}
    return steps, special, tokenizer.clean_up_tokenization_spaces, tokenizer.split_special_tokens
