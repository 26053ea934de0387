"""The first token that tells an answer from the other answers of its relation."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.tokens import Encoding


def distinguishing_tokens(prompts: PromptSet, count: int) -> tuple[list[Encoding], tuple[int, ...]]:
    """The first `count` prompts, each followed by the tokens that the compared answers share, and its next token.

    Of the answers that are compared (see `comparisons`), all begin with the same tokens, mostly none. These are
    appended to the prompt, and the next token of its own answer is what tells it from others, as in
    `make_answer_tokens`. A token that shows no character is appended too: SentencePiece puts a bare "▁" before digits
    and, in some vocabularies, before capitals, which distinguishes no answers. For an answer that ends earlier, the
    token is the end of sequence, or the answer's last token if the tokenizer has none. Raises `BadRowsError` for
    prompts that merge with their answer.
    """
    encodings, answers, tokenizer = list(prompts.encodings[:count]), prompts.answers.ids, prompts.tokenizer
    tokens, blank = [0] * count, blank_tokens(prompts)
    for own, indices in comparisons(prompts, count):
        shared = shared_length([answers[i] for i in indices]) or 0
        for i in own:
            answer = answers[i]
            whole = (*answer, tokenizer.eos_token_id) if isinstance(tokenizer.eos_token_id, int) else answer
            start = visible(answer, min(shared, len(whole) - 1), blank)
            encodings[i] = appended(encodings[i], answer[:start], tokenizer)
            tokens[i] = whole[start]
    return encodings, tuple(tokens)


def comparisons(prompts: PromptSet, count: int) -> Iterator[tuple[list[int], list[int]]]:
    """Which answers are compared: indices of prompts, and of the prompts whose answers each of these is compared with.

    The first `count` prompts are read; the rest are those that they are compared with. Each is compared with itself and
    the rest of its relation, so that it does not matter which prompts are read with it. Prompts whose answers occur in
    the rest are given together, as are those with the same answers; of the rest, one prompt stands for all with its
    answers. A relation that is not in the rest has its prompts compared with one another.
    """
    relations: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        relations.setdefault(prompt.fact.relation, []).append(i)
    for indices in relations.values():
        own, others = [i for i in indices if i < count], [i for i in indices if i >= count]
        if not others:
            yield own, own
            continue
        key = {i: (prompts.answers.ids[i], prompts[i].fact.folded_answers) for i in indices}
        rest = {key[i]: i for i in others}
        alike: dict[object, list[int]] = {}
        for i in own:
            alike.setdefault(None if key[i] in rest else key[i], []).append(i)  # all that are in the rest: at once
        yield from ((same, [*same, *rest.values()]) for same in alike.values())


def shared_length(answers: Sequence[tuple[int, ...]]) -> int | None:
    """The number of tokens that all answers begin with; None if all answers are equal."""
    if len(set(answers)) == 1:
        return None
    shortest = min(map(len, answers))
    return next((k for k in range(shortest) if len({answer[k] for answer in answers}) > 1), shortest)


def blank_tokens(prompts: PromptSet) -> set[int]:
    """The tokens in the prompts' answers that show no character."""
    tokens = {token for answer in prompts.answers.ids for token in answer}
    return {token for token in tokens if not str(prompts.tokenizer.decode([token])).strip()}


def visible(answer: tuple[int, ...], start: int, blank: Collection[int]) -> int:
    """The index of the answer's first token from `start` on that is not blank, or of its last token."""
    while start < len(answer) - 1 and answer[start] in blank:
        start += 1
    return start


def appended(encoding: Encoding, ids: tuple[int, ...], tokenizer: PreTrainedTokenizerBase) -> Encoding:
    """A prompt's tokens followed by the first tokens of an answer."""
    tokens = tuple(str(tokenizer.decode([token])) for token in ids)
    return replace(encoding, ids=encoding.ids + ids, tokens=encoding.tokens + tokens)
