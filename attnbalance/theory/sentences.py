"""Sentences (context, subject, phrase, answer) of Xu & Chen (2025), section 3, as next-token samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnbalance.errors import DataError

CONTEXT, FORMAT, NOTHING = 0, 1, -1
"""The irrelevant context token c, the question's format token p, and padding (always on the left)."""

PHRASES = ("universal", "own")


@dataclass(frozen=True)
class Samples:
    """Inputs with the distribution of their next token; `weight` sums to 1 in each run.

    The query is the last token. A target may be soft: one sample represents all sentences with the same beginning.
    """

    tokens: Int[Tensor, "run sample position"]
    target: Float[Tensor, "run sample vocab"]
    weight: Float[Tensor, "run sample"]

    def __len__(self) -> int:
        """The number of samples of each run."""
        return self.tokens.shape[1]

    def run(self, index: int) -> Samples:
        """A batch that holds only this run."""
        return Samples(*(x[index : index + 1] for x in (self.tokens, self.target, self.weight)))


@dataclass(frozen=True)
class Split:
    """Questions (c, s, p) -> a: about the finetuned pairs, and about the other frequent and the rare pairs."""

    train: Samples
    frequent: Samples
    rare: Samples


@dataclass(frozen=True)
class Sentences:
    """Pairs of a subject and an answer, frequent pairs first, and the relation phrases of each pair.

    Tokens are numbered in this order: c, p, universal phrases, the rare pairs' own phrases (if any), subjects, answers.
    `order` is the order in which frequent pairs are chosen for finetuning. `context` says whether sentences contain c.
    """

    frequent: Int[Tensor, "run frequent multiplicity"]
    rare: Int[Tensor, "run rare"]
    order: Int[Tensor, "run frequent"]
    phrases: int
    context: bool
    dtype: torch.dtype

    @property
    def pairs(self) -> int:
        """The number of pairs of a subject and an answer."""
        return self.frequent.shape[1] + self.rare.shape[1]

    @property
    def multiplicity(self) -> int:
        """K, the number of phrases of a frequent pair."""
        return self.frequent.shape[2]

    @property
    def tokens(self) -> int:
        """The number of tokens, including c and p even if they do not occur."""
        return 2 + self.phrases + 2 * self.pairs

    @property
    def subject(self) -> int:
        """The first subject's token; pair i has `subject + i`."""
        return 2 + self.phrases

    @property
    def answer(self) -> int:
        """The first answer's token; pair i has `answer + i`."""
        return self.subject + self.pairs

    @property
    def entropy(self) -> float:
        """The lowest possible loss on `pretraining`, in nats.

        A sentence has two predictions, phrase and answer. Only a frequent pair's phrase is uncertain, by ln K.
        """
        return self.frequent.shape[1] / self.pairs * math.log(self.multiplicity) / 2

    def run(self, index: int) -> Sentences:
        """A batch that holds only this run."""
        frequent, rare, order = (x[index : index + 1] for x in (self.frequent, self.rare, self.order))
        return replace(self, frequent=frequent, rare=rare, order=order)

    def pretraining(self) -> Samples:
        """Every (c, s) -> phrase and (c, s, phrase) -> a; each rare sentence has weight K (appendix J).

        The K sentences of a frequent subject begin with the same (c, s). They are one sample whose target is uniform
        over its phrases, which gives the same loss and gradient up to rounding with K times fewer samples.
        """
        runs, frequent, K = self.frequent.shape
        pair = torch.arange(self.pairs)
        written = torch.cat([pair[:frequent].repeat_interleave(K), pair[frequent:]]).expand(runs, -1)
        phrase = torch.cat([self.frequent.flatten(1), self.rare], dim=1)
        even = torch.zeros(runs, self.pairs, self.tokens, dtype=self.dtype)
        even[:, :frequent].scatter_(2, self.frequent, 1 / K)
        even[:, frequent:].scatter_(2, self.rare[..., None], 1.0)
        begun = self._prompts(pair.expand(runs, -1), None)
        whole = self._prompts(written, phrase)
        weight = torch.full((self.pairs + phrase.shape[1],), float(K), dtype=self.dtype)
        weight[self.pairs : self.pairs + frequent * K] = 1.0
        target = torch.cat([even, self._answers(written)], dim=1)
        return Samples(torch.cat([begun, whole], dim=1), target, (weight / weight.sum()).repeat(runs, 1))

    def questions(self, pair: Int[Tensor, "run chosen"]) -> Samples:
        """(c, s, p) -> a for the given pairs of each run, with equal weights."""
        weight = torch.full(pair.shape, 1 / max(1, pair.shape[1]), dtype=self.dtype)
        return Samples(self._prompts(pair, torch.full_like(pair, FORMAT)), self._answers(pair), weight)

    def split(self, share: float, spared: float | None = None) -> Split:
        """Questions for finetuning, about a share beta of the frequent pairs (at least one), and for testing.

        A larger share includes the pairs of a smaller one. The frequent pairs after the share `spared` (by default
        `share`) are test pairs; a common `spared` tests different shares on the same questions. Raises `DataError`
        unless 0 < share <= spared <= 1 and some pair is frequent.
        """
        runs, frequent, _ = self.frequent.shape
        spared = share if spared is None else spared
        if not 0 < share <= spared <= 1:
            raise DataError(
                f"the finetuned share and spared must satisfy 0 < share <= spared <= 1, got {share} and {spared}"
            )
        if not frequent:
            raise DataError("no pair is frequent, so there are none to finetune on: raise the share of frequent pairs")
        taken, beyond = (max(1, round(x * frequent)) for x in (share, spared))
        rare = torch.arange(frequent, self.pairs).expand(runs, -1)
        return Split(*(self.questions(x) for x in (self.order[:, :taken], self.order[:, beyond:], rare)))

    def _prompts(self, pair: Int[Tensor, "run n"], last: Int[Tensor, "run n"] | None) -> Int[Tensor, "run n 3"]:
        first = torch.full_like(pair, CONTEXT if self.context else NOTHING)
        subject = pair + self.subject
        return torch.stack(
            (torch.full_like(pair, NOTHING), first, subject) if last is None else (first, subject, last), dim=2
        )

    def _answers(self, pair: Int[Tensor, "run n"]) -> Float[Tensor, "run n vocab"]:
        return torch.nn.functional.one_hot(pair + self.answer, self.tokens).to(self.dtype)


def make_sentences(
    seeds: Sequence[int],
    *,
    pairs: int,
    frequent: float = 0.8,
    multiplicity: int = 2,
    universe: int = 16,
    rare_phrase: str = "universal",
    context: bool = True,
    dtype: torch.dtype = torch.float64,
) -> Sentences:
    """A world of sentences for each seed, all of the same size.

    A share `frequent` of the `pairs` has `multiplicity` K different phrases from a `universe` of M. The paper leaves a
    rare pair's one phrase open: one of the universal phrases ("universal"), or one of its own ("own"), which finetuning
    on frequent pairs never trains. For one seed, the phrases at a smaller K are a subset of those at a larger K. Raises
    `DataError` for invalid sizes.
    """
    if pairs < 1 or not seeds:
        raise DataError(f"expected at least one pair and one seed, got {pairs} pairs and {len(seeds)} seeds")
    if not 0 <= frequent <= 1:
        raise DataError(f"the share of frequent pairs must be in [0, 1], got {frequent}")
    if not 1 <= multiplicity <= universe:
        raise DataError(
            f"the multiplicity K must be between 1 and the {universe} universal phrases, got {multiplicity}"
        )
    if rare_phrase not in PHRASES:
        raise DataError(f"rare_phrase must be one of {', '.join(PHRASES)}, got {rare_phrase!r}")
    count, own = round(frequent * pairs), rare_phrase == "own"
    frequent_phrases, rare_phrases, order = [], [], []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.rand(pairs, universe, generator=generator).argsort(1) + 2
        frequent_phrases.append(drawn[:count, :multiplicity])
        rare_phrases.append(torch.arange(pairs - count) + 2 + universe if own else drawn[count:, 0])
        order.append(torch.randperm(count, generator=generator))
    phrases = universe + (pairs - count) * own
    return Sentences(
        torch.stack(frequent_phrases), torch.stack(rare_phrases), torch.stack(order), phrases, context, dtype
    )
