"""Facts as (s, r, a) of single tokens: Zipf subjects, answers of each relation, prompts (s, r) and (s, p_r)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnbalance.errors import DataError

SPLITS = ("top", "whole", "random", "bottom")


@dataclass(frozen=True)
class Examples:
    """Prompts (s, q) with their answers, by token; `weight` adds up to 1 in each run."""

    subject: Int[Tensor, "run example"]
    query: Int[Tensor, "run example"]
    answer: Int[Tensor, "run example"]
    weight: Float[Tensor, "run example"]

    def take(self, place: Int[Tensor, "run chosen"]) -> Examples:
        """Some of the examples of each run, all with the same weight."""
        even = torch.full(place.shape, 1 / place.shape[1], dtype=self.weight.dtype)
        subject, query, answer = (x.gather(1, place) for x in (self.subject, self.query, self.answer))
        return Examples(subject, query, answer, even)


@dataclass(frozen=True)
class Triples:
    """A world of facts for each run: one answer for every subject and relation, the most popular subject first.

    Tokens are numbered: subjects, relations r, their prompt tokens p_r, answers. Each relation has answers of its own.
    """

    answer: Int[Tensor, "run subject relation"]
    weight: Float[Tensor, "run subject"]
    tokens: int

    @property
    def subjects(self) -> int:
        """How many subjects there are."""
        return self.answer.shape[1]

    @property
    def relations(self) -> int:
        """How many relations there are."""
        return self.answer.shape[2]

    def examples(self, *, asked: bool = False) -> Examples:
        """Every fact as (s, r) -> a, or as (s, p_r) -> a where `asked`, subject by subject; weights all alike."""
        runs, subjects, relations = self.answer.shape
        subject = torch.arange(subjects).repeat_interleave(relations).expand(runs, -1)
        query = subjects + relations * asked + torch.arange(relations).repeat(subjects).expand(runs, -1)
        even = torch.full((runs, subjects * relations), 1 / (subjects * relations), dtype=self.weight.dtype)
        return Examples(subject, query, self.answer.flatten(1), even)

    def drawn(self, count: int, generators: Sequence[torch.Generator]) -> Examples:
        """`count` statements (s, r) -> a for each run: s by popularity, r evenly (section 3.1)."""
        places = [
            torch.multinomial(weight, count, replacement=True, generator=one) * self.relations
            + torch.randint(self.relations, (count,), generator=one)
            for weight, one in zip(self.weight, generators, strict=True)
        ]
        return self.examples().take(torch.stack(places))

    def of(self, subjects: Bool[Tensor, "run subject"], *, asked: bool = True) -> Examples:
        """The facts of some subjects, as many in each run, as prompts."""
        counts = subjects.sum(1)
        if int(counts.min()) < 1 or int(counts.min()) != int(counts.max()):
            raise DataError(f"choose as many subjects in each run, at least one; got {counts.tolist()}")
        chosen = subjects.repeat_interleave(self.relations, dim=1)
        return self.examples(asked=asked).take(chosen.nonzero()[:, 1].view(len(chosen), -1))


def make_triples(
    seeds: Sequence[int],
    *,
    subjects: int,
    relations: int,
    answers: int,
    alpha: float | Sequence[float] = 1.0,
    dtype: torch.dtype = torch.float64,
) -> Triples:
    """A world for each seed: the k-th subject has popularity proportional to k^-alpha (one alpha, or one a run).

    The `answers` are dealt out to the relations; a fact's answer is drawn evenly from its relation's. Raises
    `DataError` for an alpha that is not above 0, more relations than answers, or a world without subjects, relations or
    seeds.
    """
    alphas = [alpha] * len(seeds) if isinstance(alpha, int | float) else list(alpha)
    if len(alphas) != len(seeds) or not seeds:
        raise DataError(f"a world needs seeds, and one alpha or one a seed; got {len(seeds)} and {len(alphas)}")
    if not all(0 < one < float("inf") for one in alphas):
        raise DataError(f"the Zipf exponent alpha must be above 0, got {min(alphas)}")
    if subjects < 2 or relations < 1:
        raise DataError(f"a world needs at least 2 subjects and 1 relation; got {subjects} and {relations}")
    if relations > answers:
        raise DataError(f"{relations} relations need at least as many answers, got {answers}: each has its own")
    ranks = torch.arange(1, subjects + 1, dtype=dtype)
    weight = torch.stack([ranks**-one / (ranks**-one).sum() for one in alphas])
    first, answer = subjects + 2 * relations, []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        dealt = torch.arange(answers).tensor_split(relations)
        columns = [part[torch.randint(len(part), (subjects,), generator=generator)] for part in dealt]
        answer.append(first + torch.stack(columns, dim=1))
    return Triples(torch.stack(answer), weight, first + answers)


@dataclass(frozen=True)
class Subjects:
    """Which subjects of each run are held out for testing, and which are trained on."""

    heldout: Bool[Tensor, "run subject"]
    trained: Bool[Tensor, "run subject"]


def split_subjects(world: Triples, name: str, seeds: Sequence[int]) -> Subjects:
    """Half of the subjects at random are held out; of the others, `name` says which are trained on (section 3.2).

    "top" and "bottom" take the more and the less popular half of them, "random" a random half, "whole" all. The same
    seed holds out the same subjects for every name. Raises `DataError` for another name.
    """
    if name not in SPLITS:
        raise DataError(f"no split {name!r}; there are {', '.join(SPLITS)}")
    heldout, trained = (torch.zeros(world.weight.shape, dtype=torch.bool) for _ in range(2))
    for run, seed in enumerate(seeds):
        order = torch.randperm(world.subjects, generator=torch.Generator().manual_seed(seed))
        held, rest = order.tensor_split([world.subjects // 2])
        half = len(rest) // 2
        ranked = rest.sort().values
        chosen = {"top": ranked[:half], "bottom": ranked[-half:], "random": rest[:half], "whole": rest}[name]
        heldout[run, held] = True
        trained[run, chosen] = True
    return Subjects(heldout, trained)
