"""Contrasts: the token that tells a fact's answer from the other answers of its relation, and those others' tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from attnbalance.errors import BadRowsError, DataError
from attnbalance.prompts import Prompt
from attnbalance.tokens import Encoding, encode, encode_answers


@dataclass(frozen=True)
class Contrasts:
    """For each prompt the token that its answer begins to differ with, and what it is set against.

    A contrast is the logit of the answer's token minus the mean logit of the tokens of its relation's other answers.
    `encodings` are the prompts' tokens, with the tokens behind them that all answers of the relation begin with (mostly
    none). `candidates` holds each relation's tokens, one for each answer that differs there; `answer` is the place of
    the fact's own among them. `others[i]` are the places that count as other answers: not those of answers that the
    fact accepts as well; `weights[i]` are theirs in the mean (None: equal). `ambiguous` counts prompts whose token
    another answer of the relation shares, so that the contrast does not tell the two apart.
    """

    encodings: tuple[Encoding, ...]
    candidates: dict[str, tuple[int, ...]]
    answer: tuple[int, ...]
    others: tuple[tuple[int, ...], ...]
    ambiguous: int
    weights: tuple[tuple[float, ...], ...] | None = None

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self.encodings)

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """The prompts in order."""
        return tuple(one.prompt for one in self.encodings)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The answer's token for each prompt."""
        return tuple(self.candidates[p.fact.relation][i] for p, i in zip(self.prompts, self.answer, strict=True))

    def at(self, places: Sequence[int]) -> Contrasts:
        """The contrasts of some of the prompts, each still set against all answers of its relation."""
        return replace(
            self,
            encodings=tuple(self.encodings[i] for i in places),
            answer=tuple(self.answer[i] for i in places),
            others=tuple(self.others[i] for i in places),
            weights=None if self.weights is None else tuple(self.weights[i] for i in places),
        )

    def of_logits(self, logits: Float[Tensor, "prompt vocab"]) -> Float[Tensor, " prompt"]:
        """The contrast of each prompt's logits, on the CPU."""
        found = []
        for i, prompt in enumerate(self.prompts):
            mine = logits[i, list(self.candidates[prompt.fact.relation])]
            found.append(mine[self.answer[i]] - mine[list(self.others[i])] @ self._mean(i).to(mine))
        return torch.stack(found).cpu()

    def _mean(self, i: int) -> Float[Tensor, " other"]:
        """The weights of a prompt's other answers; they sum to 1."""
        n = len(self.others[i])
        return torch.full((n,), 1 / n) if self.weights is None else torch.tensor(self.weights[i])

    def of(self, W_U: Float[Tensor, "d_model vocab"]) -> Float[Tensor, "prompt d_model"]:
        """The direction before the unembedding whose product with a state is the contrast (biases aside)."""
        result = W_U.new_empty(len(self), len(W_U))
        for relation, candidates in self.candidates.items():
            rows = [i for i, prompt in enumerate(self.prompts) if prompt.fact.relation == relation]
            weights = torch.zeros(len(rows), len(candidates), dtype=W_U.dtype, device=W_U.device)
            for row, i in enumerate(rows):
                weights[row, list(self.others[i])] = -self._mean(i).to(weights)
                weights[row, self.answer[i]] += 1
            if rows:
                result[rows] = weights @ W_U[:, list(candidates)].T
        return result


def make_contrasts(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> Contrasts:
    """The contrast of each prompt's first answer with the other first answers that its relation has among the prompts.

    Where all answers of a relation begin with the same tokens, these are put behind the prompt, and the contrast is
    made at the first token at which any two of them differ; one token a fact is read, not whole answers. Raises
    `BadRowsError` for relations with one answer, and for prompts that merge with their answer.
    """
    encodings = encode(prompts, tokenizer)
    answers = encode_answers(encodings, tokenizer)
    end = tokenizer.eos_token_id
    rows: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        rows.setdefault(prompt.fact.relation, []).append(i)
    candidates, answer, ambiguous = dict[str, tuple[int, ...]](), [0] * len(prompts), 0
    others: list[tuple[int, ...]] = [()] * len(prompts)
    alone: list[tuple[int, str]] = []
    for relation, places in rows.items():
        shared = _shared([answers[i] for i in places])
        if shared is None:
            alone += [(i, f"relation {relation!r} has the one answer {prompts[i].fact.answer!r}") for i in places]
            continue
        ended = [i for i in places if len(answers[i]) == shared]
        if ended and not isinstance(end, int):
            why = "is how other answers begin, and the tokenizer has no end of sequence to tell them apart"
            alone += [(i, f"{prompts[i].fact.answer!r} {why}") for i in ended]
            continue
        firsts: dict[int, int] = {i: (*answers[i], end)[shared] for i in places}  # pyright: ignore
        candidates[relation] = tuple(dict.fromkeys(firsts.values()))
        place = {token: k for k, token in enumerate(candidates[relation])}
        spelled = {prompts[i].fact.answer: place[firsts[i]] for i in places}
        for i in places:
            accepted = {spelled[text] for text in prompts[i].fact.answers if text in spelled}
            answer[i] = place[firsts[i]]
            others[i] = tuple(k for k in range(len(place)) if k not in accepted)
            if not others[i]:
                alone.append((i, f"every answer of relation {relation!r} is accepted for {prompts[i].fact.subject!r}"))
            ambiguous += sum(k == answer[i] for text, k in spelled.items() if text not in prompts[i].fact.answers) > 0
            head = answers[i][:shared]
            shown = tuple(str(tokenizer.decode([token])) for token in head)
            encodings[i] = replace(encodings[i], ids=encodings[i].ids + head, tokens=encodings[i].tokens + shown)
    if alone:
        raise BadRowsError(
            "facts have no other answer to be set against",
            sorted(alone),
            len(prompts),
            "add facts of the relation with other answers, or drop and count these (`--skip-bad`)",
        )
    return Contrasts(tuple(encodings), candidates, tuple(answer), tuple(others), ambiguous)


def _shared(answers: Sequence[tuple[int, ...]]) -> int | None:
    """How many tokens all answers begin with; None where they are all the same."""
    if len(set(answers)) == 1:
        return None
    shortest = min(map(len, answers))
    return next((k for k in range(shortest) if len({answer[k] for answer in answers}) > 1), shortest)


def check_tokenizers(first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase) -> None:
    """Raise `DataError` for two models whose tokenizers do not give the same ids."""
    if first.get_vocab() != second.get_vocab():
        raise DataError(
            "the two models have different tokenizers: logits, rows and weights cannot be compared token by token"
        )
