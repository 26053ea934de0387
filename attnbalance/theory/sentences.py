"""Sentences (context, subject, phrase, answer) of Xu & Chen (2025), section 3, as samples of the next token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnbalance.errors import DataError

CONTEXT, FORMAT, NOTHING = 0, 1, -1
"""The irrelevant context token c, the question's format token p, and a place without a token (always in front)."""

PHRASES = ("universal", "own")


@dataclass(frozen=True)
class Samples:
    """Inputs with the distribution of their next token; `weight` adds up to 1 in each run.

    The query is the last token. A target may be soft: one sample stands for all sentences that begin alike.
    """

    tokens: Int[Tensor, "run sample position"]
    target: Float[Tensor, "run sample vocab"]
    weight: Float[Tensor, "run sample"]

    def __len__(self) -> int:
        """How many samples each run has."""
        return self.tokens.shape[1]

    def run(self, index: int) -> Samples:
        """The samples of one run alone."""
        return Samples(*(x[index : index + 1] for x in (self.tokens, self.target, self.weight)))


@dataclass(frozen=True)
class Split:
    """Questions (c, s, p) -> a: those finetuned on, and the frequent and the rare ones that are not."""

    train: Samples
    frequent: Samples
    rare: Samples


@dataclass(frozen=True)
class Sentences:
    """Pairs of a subject and an answer, the frequent ones first, and the relation phrases each is written with.

    Tokens are numbered: c, p, the universal phrases, then, if rare pairs have their own, those; subjects; answers.
    `order` is the order in which frequent pairs are taken for finetuning. `context` is whether c is written.
    """

    frequent: Int[Tensor, "run frequent multiplicity"]
    rare: Int[Tensor, "run rare"]
    order: Int[Tensor, "run frequent"]
    phrases: int
    context: bool
    dtype: torch.dtype

    @property
    def pairs(self) -> int:
        """How many pairs of a subject and an answer there are."""
        return self.frequent.shape[1] + self.rare.shape[1]

    @property
    def multiplicity(self) -> int:
        """K, with how many phrases a frequent pair is written."""
        return self.frequent.shape[2]

    @property
    def tokens(self) -> int:
        """How many tokens there are, c and p among them whether they occur or not."""
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
        """The least loss on `pretraining`, in nats.

        Only phrases are uncertain: ln K for frequent pairs, 0 for rare ones, in one of two predictions of a sentence.
        """
        return self.frequent.shape[1] / self.pairs * math.log(self.multiplicity) / 2

    def run(self, index: int) -> Sentences:
        """The world of one run alone."""
        frequent, rare, order = (x[index : index + 1] for x in (self.frequent, self.rare, self.order))
        return replace(self, frequent=frequent, rare=rare, order=order)

    def pretraining(self) -> Samples:
        """Every (c, s) -> phrase and (c, s, phrase) -> a; a rare pair's weighs as the K of a frequent one (appendix J).

        The K sentences of a frequent subject share their beginning (c, s), so they are one sample whose target is even
        over its phrases: the same loss and gradient up to rounding, with K times fewer samples.
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
        """(c, s, p) -> a for some pairs of each run, all with the same weight."""
        weight = torch.full(pair.shape, 1 / max(1, pair.shape[1]), dtype=self.dtype)
        return Samples(self._prompts(pair, torch.full_like(pair, FORMAT)), self._answers(pair), weight)

    def split(self, share: float, spared: float | None = None) -> Split:
        """Questions about a share beta of the frequent pairs to finetune on, at least one; all others test.

        A larger share takes in the smaller one's pairs. With `spared`, only frequent pairs beyond that larger share
        test, so that different shares are tested on the same questions. Raises `DataError` for a share outside (0, 1],
        a smaller `spared`, or where no pair is frequent.
        """
        runs, frequent, _ = self.frequent.shape
        spared = share if spared is None else spared
        if not 0 < share <= spared <= 1:
            raise DataError(
                f"finetune on a share of the frequent pairs above 0 and at most 1, and test beyond one no smaller; got "
                f"{share} and {spared}"
            )
        if not frequent:
            raise DataError("no pair is frequent, so none can be finetuned on: raise the share of frequent pairs")
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

    A share `frequent` of the `pairs` has `multiplicity` K different phrases of the `universe` of M. What a rare pair's
    one phrase is can be read in two ways: one of the universal ones ("universal"), or one that no other pair has
    ("own"). Finetuning on frequent pairs never meets an own phrase. A seed's phrases with a larger K contain those with
    a smaller. Raises `DataError` for impossible sizes.
    """
    if pairs < 1 or not seeds:
        raise DataError(f"at least one pair and one seed are needed, got {pairs} pairs and {len(seeds)} seeds")
    if not 0 <= frequent <= 1:
        raise DataError(f"the share of frequent pairs lies between 0 and 1, got {frequent}")
    if not 1 <= multiplicity <= universe:
        raise DataError(f"the multiplicity K is between 1 and the {universe} universal phrases, got {multiplicity}")
    if rare_phrase not in PHRASES:
        raise DataError(f"rare_phrase is one of {', '.join(PHRASES)}, got {rare_phrase!r}")
    count, own = round(frequent * pairs), rare_phrase == "own"
    many, one, order = [], [], []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.rand(pairs, universe, generator=generator).argsort(1) + 2
        many.append(drawn[:count, :multiplicity])
        one.append(torch.arange(pairs - count) + 2 + universe if own else drawn[count:, 0])
        order.append(torch.randperm(count, generator=generator))
    phrases = universe + (pairs - count) * own
    return Sentences(torch.stack(many), torch.stack(one), torch.stack(order), phrases, context, dtype)
